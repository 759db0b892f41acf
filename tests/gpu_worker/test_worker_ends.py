"""Processes that end while they hold weights: nothing hangs, crashes or speaks up."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.gpu_worker.served import wait_until
from tests.gpu_worker.template import ATTACHED
from tests.processes import ROOT, Coordinator, Peer

pytestmark = pytest.mark.process

WAIT_S = 60.0


class TestExit:
    @pytest.mark.parametrize(
        "script",
        [
            pytest.param("", id="idle"),
            pytest.param("state = worker.state_dict('k', build=skeleton)", id="tensors live"),
            pytest.param("handle = load(); module = handle.__enter__()", id="locked"),
            pytest.param("load(); cycle = [load()]; cycle.append(cycle)", id="garbage"),
            pytest.param("import atexit; atexit.register(worker.shutdown)", id="shutdown at exit"),
            pytest.param(
                "import atexit; handle = load(); atexit.register(handle.close)", id="late close"
            ),
            pytest.param("worker.shutdown()", id="shut down"),
        ],
    )
    def test_it_is_clean_whatever_is_held(self, run, script):
        run(script)

    def test_it_is_clean_while_daemon_threads_build_and_wait(self, run):
        """Being told of the end would make them print a traceback."""
        run(
            """
            import threading
            building = threading.Event()
            def build():
                building.set()
                threading.Event().wait()
            def load():
                worker.state_dict("never", build=build)
            for _ in range(30):
                threading.Thread(target=load, daemon=True).start()
            assert building.wait(60)
            """
        )

    def test_a_daemon_thread_that_asks_too_late_is_not_heard_of(self, run):
        """The main thread is told; it may be at a later exit handler."""
        run(
            """
            import threading
            from gpu_worker import registry
            registry._stop_all()
            asking = threading.Thread(
                target=lambda: worker.state_dict("late", build=skeleton), daemon=True
            )
            asking.start()
            asking.join(0.5)
            assert asking.is_alive()
            try:
                worker.state_dict("late", build=skeleton)
            except gpu_worker.CallerError:
                pass
            else:
                print("it was served")
            """
        )

    def test_it_is_clean_while_the_keeper_is_at_work(self, run):
        """A daemon thread that runs torch while the interpreter ends aborts the process."""
        run(
            """
            import threading, time
            destroying = threading.Event()
            class Slow(torch.nn.Linear):
                def __init__(self):
                    super().__init__(3, 2)
                def __del__(self):
                    destroying.set()
                    end_s = time.monotonic() + 1
                    while time.monotonic() < end_s:
                        torch.ones(100_000).sum()
            worker.load("slow", skeleton=Slow, build=skeleton)
            worker._client.keeper.put(lambda: worker.evict("slow"))
            assert destroying.wait(60)
            """
        )

    def test_it_does_not_wait_for_all_that_is_queued(self, run):
        """The end of the process gives everything back at once."""
        started_s = time.monotonic()
        run(
            """
            import threading
            for _ in range(60):
                worker._client.keeper.put(lambda: threading.Event().wait(1))
            """
        )
        assert time.monotonic() - started_s < 9

    def test_it_is_clean_after_the_coordinator_is_gone(self, run, tmp_path):
        mortal = Coordinator(str(tmp_path / "s"))
        script = """
            state = load()
            os.kill(int(sys.argv[2]), 9)
        """
        run(script, mortal.socket, str(mortal.pid))
        assert mortal.stop()[0] == -signal.SIGKILL, "it was there all the time"


class TestImport:
    """In processes of their own, which have imported nothing yet."""

    def test_it_is_cheap(self):
        python(
            """
            import sys
            import gpu_worker
            assert gpu_worker.Worker.load
            heavy = {"torch", "numpy", "accelerate", "transformers", "platformdirs"}
            assert not heavy & set(sys.modules), heavy & set(sys.modules)
            """
        )

    def test_it_works_where_nothing_else_does(self):
        """Elsewhere than on Linux, attaching says that it cannot be done."""
        python(
            """
            import os, select, socket, sys
            for module, names in (
                (os, ("eventfd", "EFD_CLOEXEC", "memfd_create", "pidfd_open", "register_at_fork",
                      "posix_fallocate")),
                (socket, ("AF_UNIX", "CMSG_SPACE", "SO_PEERCRED", "MSG_CMSG_CLOEXEC")),
                (select, ("poll",)),
            ):
                for name in names:
                    delattr(module, name)
            sys.modules["fcntl"] = None
            import gpu_worker
            try:
                gpu_worker.attach("/none")
            except gpu_worker.PlatformUnsupported as error:
                assert error.exit_code == 7
            else:
                sys.exit(1)
            """
        )


def python(script: str) -> None:
    """Run a script in a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_a_waiting_process_clean(served):
    """S23: Ctrl-C in a load; the request is given up, and the peer that builds goes on."""
    owner = Peer(served.socket)
    ticket = owner.ticket("interrupted")
    script = """
        import signal
        # A job in the background of a shell is started with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("asking", flush=True)
        try:
            worker.state_dict("interrupted", build=skeleton)
        except KeyboardInterrupt:
            worker.flush()
            sys.exit(3)
    """
    started = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(ATTACHED) + textwrap.dedent(script),
            served.socket,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "asking\n"
    wait_until(
        lambda: any(
            session.pid == started.pid and session.waiting_for == ("interrupted",)
            for session in owner.status().sessions
        )
    )
    started.send_signal(signal.SIGINT)
    _, stderr = started.communicate(timeout=WAIT_S)
    assert (started.returncode, stderr) == (3, "")
    assert owner.generation("interrupted").generation == ticket.gen


def test_a_user_with_too_many_fds_under_way_is_told_and_stays_attached(run):
    """The caller hears of it at once; the connection, and every other request, goes on."""
    run(
        """
        import resource, shutil, tempfile
        from shm_store import channel
        left, right = map(channel.Channel, channel.pair())
        if os.geteuid() == 0:
            os.setuid(65534)  # root may have any number
        directory = tempfile.mkdtemp()
        source = os.path.join(directory, "empty.safetensors")
        open(source, "w").close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                left.send(b"unread", [0] * 16)
        except gpu_worker.FdsExhausted:
            pass
        def refusal():
            try:
                worker.state_dict("unread", source=source)
            except gpu_worker.WeightCacheError as error:
                return type(error)
        assert refusal() is gpu_worker.FdsExhausted
        worker.flush()
        channel.close_all(right.receive()[1])
        assert refusal() is gpu_worker.SourceMalformed
        shutil.rmtree(directory)
        """
    )
