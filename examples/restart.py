"""A server that dies and is started again, and finds its weights where they were: on the device.

    weight-cache launch --restart-workers on-failure -- python examples/restart.py

The one that makes the weights kills itself while it works, as if it had crashed. Set DEVICE for
another device than "sim:0", a simulated one.
"""

import json
import os
import signal
import subprocess
import sys
import threading

import torch

import gpu_worker

DEVICE = os.environ.get("DEVICE", "sim:0")


def make_module() -> torch.nn.Module:
    """Make an ordinary module. Its weights are left out here."""
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))


def moved_bytes(worker: gpu_worker.Worker) -> int:
    """Return what this process has brought to its device, as `weight-cache status` shows it."""
    worker.flush()
    command = [sys.executable, "-m", "coordinator", "status", "--json"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    (mine,) = [session for session in told["sessions"] if session["pid"] == os.getpid()]
    return sum(model["moved_bytes"] for model in mine["models"])


def main() -> None:
    """Answer once, or until the end."""
    makes = threading.Event()

    def load_and_convert() -> torch.nn.Module:
        makes.set()
        torch.manual_seed(0)
        return make_module()

    x = torch.ones(1, 1024, device="cpu" if DEVICE.startswith("sim") else DEVICE)
    with (
        gpu_worker.attach(device=DEVICE, share_vram=True) as worker,
        worker.use("restart", skeleton=make_module, build=load_and_convert, version="1") as model,
    ):
        print(f"the answer is {model(x).sum().item():.4f}", flush=True)
        print(f"moved to the device: {moved_bytes(worker)} bytes", flush=True)
        if makes.is_set():
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                model(x)


if __name__ == "__main__":
    main()
