"""A process that has imported torch, and forks a copy of itself for every script it is given.

Importing torch takes seconds; a copy then lives and ends like any process, interpreter and all.
Reads one JSON object per line: `script`, `arguments`, and the paths `stdout` and `stderr`; answers
with the exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT

ATTACHED = """
    import os, sys, warnings
    import torch, gpu_worker
    from gpu_worker import ForkedProcess
    # Python 3.12 warns of every fork beside threads: that is what is tried here.
    warnings.simplefilter("ignore", DeprecationWarning)
    worker = gpu_worker.attach(sys.argv[1])
    def skeleton():
        return torch.nn.Linear(3, 2)
    def load():
        return worker.load("linear", skeleton=skeleton, build=skeleton)
"""
"""What a script may begin with. Its first argument is the coordinator's socket."""


class Template:
    """Starts the process; `run` has a copy of it run a script."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_worker.template"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        assert self.process.stdin is not None and self.process.stdout is not None
        out, err = self.directory / "stdout", self.directory / "stderr"
        job = {"script": script, "arguments": arguments, "stdout": str(out), "stderr": str(err)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return code, out.read_text(), err.read_text()

    def close(self) -> None:
        self.process.communicate()


def _serve() -> str:
    """Answer jobs in copies; return the script to run, in a copy, or nothing at the end."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            for number, path in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(fd, number)
                os.close(fd)
            sys.argv = ["template", *job["arguments"]]
            return str(job["script"])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)
    return ""


if __name__ == "__main__":
    import accelerate  # noqa: F401
    import torch  # noqa: F401

    exec(compile(_serve(), "script", "exec"), {"__name__": "__main__"})
