"""Processes that end or fork while they hold weights: nothing hangs, crashes or speaks up."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.gpu_worker.served import wait_until
from tests.gpu_worker.template import Template
from tests.processes import ROOT, Coordinator, Peer

pytestmark = pytest.mark.process

WAIT_S = 60.0

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


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    started = Template(tmp_path_factory.mktemp("template"))
    yield started
    started.close()


@pytest.fixture
def run(served, template):
    """Runs a script that has attached; it must say nothing on stderr."""

    def run(script: str, socket: str = served.socket, *arguments: str) -> str:
        whole = textwrap.dedent(ATTACHED) + textwrap.dedent(script)
        code, stdout, stderr = template.run(whole, socket, *arguments)
        assert (code, stderr) == (0, "")
        return stdout

    return run


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


class TestFork:
    def test_a_forked_child_is_told_so_and_ends_clean(self, run):
        """Every call raises; what it inherited still computes; the parent goes on undisturbed."""
        out = run(
            """
            handle = load()
            state = worker.state_dict("state", build=lambda: {"w": torch.arange(4.0)})
            with handle as module:
                expected = module(torch.ones(3))
                child = os.fork()
                if not child:
                    for call in (
                        load,
                        lambda: worker.state_dict("linear", build=skeleton),
                        lambda: worker.use("linear", skeleton=skeleton, build=skeleton).__enter__(),
                        lambda: worker.evict("linear"),
                        lambda: worker.flush(),
                        lambda: worker.shutdown(),
                        handle.__enter__,
                    ):
                        try:
                            call()
                        except ForkedProcess:
                            pass
                        else:
                            print("a call was let through")
                    assert torch.equal(module(torch.ones(3)), expected)
                    handle.close()
                    del state
                    sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            worker.flush()
            assert state["w"].sum() == 6
            del state, module
            handle.close()
            assert worker.evict("linear")
            assert worker.shutdown() == ()
            print("the parent is done")
            """
        )
        assert out == "the parent is done\n"

    def test_a_child_may_attach_by_itself(self, run):
        run(
            """
            with worker:
                state = load()
                child = os.fork()
                if not child:
                    with gpu_worker.attach(sys.argv[1]) as mine:
                        with mine.use("linear", skeleton=skeleton, build=skeleton) as module:
                            module(torch.ones(3))
                    sys.exit(0)  # through the parent's block, which is not the child's to end
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                worker.flush()
            """
        )

    def test_a_child_keeps_no_fd_of_the_parents(self, run):
        """So that the parent's connection ends with the parent."""
        run(
            """
            load()
            def sockets():
                links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                names = [os.readlink(link) for link in links if os.path.lexists(link)]
                return [name for name in names if "socket:" in name or "eventfd" in name]
            assert len(sockets()) == 2
            child = os.fork()
            if not child:
                os._exit(len(sockets()))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            """
        )

    def test_a_fork_during_a_fill_keeps_the_segment_nowhere_else(self, run):
        """Its memory would stay after the coordinator freed it, in nobody's books."""
        run(
            """
            from gpu_worker import publish
            fill = publish.fill
            def forking(fd, plan):
                child = os.fork()
                if not child:
                    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                    names = [os.readlink(link) for link in links if os.path.lexists(link)]
                    os._exit(sum("memfd:weight-cache:" in name for name in names))
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                fill(fd, plan)
            publish.fill = forking
            assert worker.state_dict("forking", build=skeleton)["bias"].numel() == 2
            """
        )

    def test_a_lock_that_another_thread_held_is_free_in_the_child(self, run):
        run(
            """
            import signal, threading
            from gpu_worker import registry
            handle = load()
            held, over = threading.Event(), threading.Event()
            def hold():
                with registry._registry, worker._client._lock, worker._table._lock:
                    held.set()
                    over.wait()
            threading.Thread(target=hold).start()
            assert held.wait(60)
            child = os.fork()
            if not child:
                signal.alarm(20)
                handle.close()
                gpu_worker.attach(sys.argv[1]).shutdown()
                os._exit(0)
            over.set()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            """
        )

    def test_a_fork_during_another_threads_skeleton_leaves_the_child_whole(self, run):
        """Nothing stays patched there, and no lock held: neither plain modules nor loads notice."""
        run(
            """
            import signal, threading
            plain = torch.nn.Module.register_parameter
            entered, over = threading.Event(), threading.Event()
            def slow():
                entered.set()
                over.wait()
                return skeleton()
            building = threading.Thread(
                target=lambda: worker.load("slow", skeleton=slow, build=skeleton)
            )
            building.start()
            assert entered.wait(60)
            child = os.fork()
            if not child:
                signal.alarm(20)
                assert torch.nn.Module.register_parameter is plain
                made = []
                def plain_module():
                    made.append(torch.nn.Linear(1, 1).weight.device.type)
                threads = [threading.Thread(target=plain_module) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert made == ["cpu"] * 3
                with gpu_worker.attach(sys.argv[1]) as mine:
                    with mine.use("linear", skeleton=skeleton, build=skeleton) as module:
                        module(torch.ones(3))
                assert torch.nn.Module.register_parameter is plain
                os._exit(0)
            over.set()
            building.join()
            assert torch.nn.Module.register_parameter is plain
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            """
        )

    @pytest.mark.parametrize("callback", ["build", "skeleton"])
    def test_a_child_that_returns_out_of_a_callback_is_told(self, run, callback):
        """Whatever another thread held at that moment. The parent goes on undisturbed."""
        script = """
            import signal, threading
            held, over = threading.Event(), threading.Event()
            def hold():
                with worker._client._lock, worker._table._lock:
                    held.set()
                    over.wait()
            holding = threading.Thread(target=hold)
            def forking():
                global child
                holding.start()
                assert held.wait(60)
                child = os.fork()
                if not child:
                    signal.alarm(20)
                over.set()
                if child:
                    holding.join()
                return skeleton()
            callbacks = {"skeleton": skeleton, "build": skeleton, "CALLBACK": forking}
            try:
                handle = worker.load("CALLBACK", **callbacks)
            except ForkedProcess:
                assert not child
                os._exit(7)
            assert child
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            handle.close()
            assert worker.evict("CALLBACK")
            worker.flush()
        """
        run(script.replace("CALLBACK", callback))

    @pytest.mark.parametrize(
        ("module", "wait"),
        [
            ("request", "worker.state_dict('in request', build=skeleton)"),
            ("flights", "worker.load('in flights', skeleton=skeleton, build=skeleton)"),
            ("module", "worker.load('another', skeleton=skeleton, build=skeleton)"),
            ("client", "worker.flush(60)"),
        ],
    )
    def test_a_child_forked_in_the_middle_of_a_wait_leaves_it(self, run, module, wait):
        """As by a signal handler. There it waits for threads that only its parent has."""
        script = """
            import signal, threading
            from gpu_worker import MODULE, module, waits
            waits.STEP_S = 0.1
            entered, over = threading.Event(), threading.Event()
            def slow():
                entered.set()
                over.wait()
                return skeleton()
            def steps(left_s, pid):
                global child
                for step_s in waits.steps(left_s, pid):
                    if child is None and threading.current_thread() is threading.main_thread():
                        child = os.fork()
                        if not child:
                            signal.alarm(20)
                        else:
                            over.set()
                    yield step_s
            child = None
            if "MODULE" == "client":
                worker._client.keeper.put(slow)
            else:
                callbacks = {"skeleton": skeleton, "build": skeleton}
                callbacks["skeleton" if "MODULE" == "module" else "build"] = slow
                load = lambda: worker.load("in MODULE", **callbacks).close()
                other = threading.Thread(target=load)
                other.start()
            assert entered.wait(60)
            MODULE.steps = steps
            try:
                WAIT
            except ForkedProcess:
                assert child == 0
                os._exit(7)
            assert child
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            if "MODULE" != "client":
                other.join()
        """
        run(script.replace("MODULE", module).replace("WAIT", wait))

    def test_a_fork_in_the_middle_of_everything_hangs_nobody(self, run):
        """Other threads hold every lock there is, again and again, while this one forks."""
        run(
            """
            import signal, threading
            stop = threading.Event()
            def work():
                while not stop.is_set():
                    with worker.use("linear", skeleton=skeleton, build=skeleton):
                        worker.evict("linear")
                    gpu_worker.attach(sys.argv[1]).shutdown()
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            codes = []
            for _ in range(25):
                child = os.fork()
                if not child:
                    try:
                        worker.flush()
                    except ForkedProcess:
                        signal.alarm(20)
                        gpu_worker.attach(sys.argv[1]).shutdown()
                        os._exit(0)
                    os._exit(1)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            stop.set()
            for thread in threads:
                thread.join()
            assert codes == [0] * 25, codes
            """
        )


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
