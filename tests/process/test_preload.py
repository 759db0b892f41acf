"""gunicorn with --preload: the application loads in the master, and the workers are its forks."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.gpu_worker.served import write
from tests.processes import ROOT, WAIT_S, Peer

pytestmark = pytest.mark.process

WORKERS = 3

APPLICATION = """
import json, os
import torch, gpu_worker
worker = gpu_worker.attach()
handle = worker.load(
    "linear", skeleton=lambda: torch.nn.Linear(3, 2), source=os.environ["WEIGHTS"]
)

def application(environ, start_response):
    with handle as module:
        answer = {"pid": os.getpid(), "answer": module(torch.ones(3)).tolist()}
    start_response("200 OK", [("Content-Type", "application/json"), ("Connection", "close")])
    return [json.dumps(answer).encode()]
"""


@pytest.fixture
def server(tmp_path, coordinator):
    (tmp_path / "served_by_gunicorn.py").write_text(APPLICATION)
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "gunicorn", "--preload", "--workers", str(WORKERS)),
            *("--bind", f"unix:{tmp_path}/http", "--log-level", "warning"),
            "served_by_gunicorn:application",
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "WEIGHT_CACHE_SOCKET": coordinator.socket,
            "WEIGHTS": write(tmp_path / "linear.safetensors", 1.0),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    yield started
    if started.poll() is None:
        started.kill()
    started.communicate()


def ask(path: str) -> dict:
    """Ask the application, once it listens."""
    deadline_s = time.monotonic() + 2 * WAIT_S
    while True:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(path)
            connection.request("GET", "/")
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.01)
        finally:
            connection.close()


def holders(operator: Peer, count: int) -> set[int]:
    """Wait until that many processes lease the one generation, and return their pids."""
    deadline_s = time.monotonic() + 2 * WAIT_S
    while True:
        (generation,) = operator.status().generations
        pids = {lease.pid for lease in generation.leases}
        if len(pids) == count:
            return pids
        assert time.monotonic() < deadline_s, pids
        threading.Event().wait(0.01)


def test_every_worker_leases_what_the_master_loaded(coordinator, operator, server, tmp_path):
    path = f"{tmp_path}/http"
    first = ask(path)
    assert first["answer"] == [4.0, 4.0]
    pids = holders(operator, WORKERS + 1)
    assert {first["pid"], server.pid} <= pids
    coordinator.audit()
    os.kill(first["pid"], signal.SIGKILL)
    while first["pid"] in (pids := holders(operator, WORKERS + 1)):
        threading.Event().wait(0.01)
    assert ask(path)["pid"] in pids - {server.pid}
    coordinator.audit()
    server.terminate()
    _, stderr = server.communicate(timeout=WAIT_S)
    assert (server.returncode, "Traceback" in stderr) == (0, False), stderr
    assert holders(operator, 0) == set()
