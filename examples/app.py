"""A whole program to start with: `weight-cache launch --workers 2 -- python examples/app.py`.

Its two workers use one copy of the weights. Whichever asks first makes them.
"""

import os

import torch

import gpu_worker


def make_module() -> torch.nn.Module:
    """Make an ordinary module, such as `BertModel(config)`. Its weights are left out here."""
    return torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8)
    )


def load_and_convert() -> torch.nn.Module:
    """Make the weights: read a checkpoint, merge, quantise. Runs in one process for all."""
    print("makes the weights", flush=True)
    torch.manual_seed(0)
    return make_module().to(torch.bfloat16)


def told(key: str, generation: str, cause: str) -> None:
    """Hear of a module that is gone from this worker."""
    print(f"{key} is gone: {cause}", flush=True)


def main() -> None:
    """Use the weights once."""
    rank = os.environ.get("WEIGHT_CACHE_RANK", "0")
    with gpu_worker.attach(name=f"app {rank}", on_evict=told) as worker:
        with worker.use("app", skeleton=make_module, build=load_and_convert, version="1") as model:
            answer = model(torch.ones(256, dtype=torch.bfloat16))
        print(f"worker {rank}: {answer.sum().item():.3f}", flush=True)


if __name__ == "__main__":
    main()
