"""Processes that fork while they hold weights: the child is a session of its own."""

from __future__ import annotations

import signal
import textwrap

import pytest
import torch
from safetensors.torch import save_file

from tests.gpu_worker.served import wait_until
from tests.processes import Coordinator, running

pytestmark = pytest.mark.process

FORK = """
    import faulthandler, signal, threading, time
    from coordinator.audit import audit
    from coordinator.operator import Operator

    def ask(what):
        with Operator.connect(sys.argv[1], "test") as operator:
            return what(operator)

    def leases(key):
        \"\"\"Who leases each generation of a key, by state.\"\"\"
        generations = ask(lambda operator: operator.status()).generations
        return {
            one.state: {lease.pid for lease in one.leases} for one in generations if one.key == key
        }

    def agree():
        found = ask(audit)
        assert found.agree, found.differences

    def forked(child):
        \"\"\"Run `child` in a child, which has twenty seconds; return its pid.\"\"\"
        pid = os.fork()
        if not pid:
            faulthandler.register(signal.SIGALRM, chain=True)  # says where it hangs
            signal.alarm(20)
            child()
            sys.exit(0)
        return pid

    def joined(pid, code=0):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
"""


@pytest.fixture
def fork(run, operator):
    """Runs a script that has attached, and knows how to fork. Nobody else is attached."""

    def fork(script: str) -> str:
        wait_until(lambda: not operator.status().sessions)
        return run(textwrap.dedent(FORK) + textwrap.dedent(script))

    return fork


class TestChild:
    def test_it_leases_what_it_inherited_before_its_code_runs(self, fork):
        """Shared and private; the books say so, and the kernel too."""
        fork(
            """
            handle = load()
            state = worker.state_dict("dict", build=lambda: {"w": torch.arange(4.0)})
            private = worker.load("private", skeleton=skeleton, build=skeleton, private=True)
            in_use = ask(lambda operator: operator.status()).pools[0].in_use_bytes
            parent = os.getpid()
            def child():
                both = {parent, os.getpid()}
                for key in ("linear", "dict", "private"):
                    assert leases(key) == {"ready": both}, leases(key)
                assert ask(lambda operator: operator.status()).pools[0].in_use_bytes == in_use
                agree()
            joined(forked(child))
            # Its end is the coordinator's to notice, and nothing here waits for that.
            while leases("linear") != {"ready": {parent}}:
                time.sleep(0.001)
            agree()
            """
        )

    def test_it_computes_loads_and_gives_back_and_its_parent_goes_on(self, fork):
        fork(
            """
            handle = load()
            state = worker.state_dict("dict", build=lambda: {"w": torch.arange(4.0)})
            parent = os.getpid()
            with handle as module:
                expected = module(torch.ones(3))
                def child():
                    global handle, state, module
                    assert torch.equal(module(torch.ones(3)), expected)
                    with handle as again:
                        assert again is module
                    handle.__exit__(None, None, None)  # of the block that it was forked in
                    handle.close()
                    del state, module, again
                    assert worker.evict("linear")
                    worker.flush()
                    assert leases("linear") == leases("dict") == {"ready": {parent}}
                    with worker.use("linear", skeleton=skeleton, build=skeleton) as module:
                        assert torch.equal(module(torch.ones(3)), expected)
                    assert worker.state_dict("own", build=lambda: {"w": torch.ones(1)})["w"] == 1
                    del module
                    agree()
                    assert worker.shutdown() == ()
                    os._exit(7)
                joined(forked(child), 7)
                assert torch.equal(module(torch.ones(3)), expected)
            worker.flush()
            assert state["w"].sum() == 6
            del module
            handle.close()
            assert worker.evict("linear")
            """
        )

    def test_what_it_drops_ends_and_with_its_worker_the_session(self, fork):
        """Whatever told of it in the parent would tell a queue that nobody reads here."""
        fork(
            """
            handle = load()
            state = worker.state_dict("dropped", build=lambda: {"w": torch.arange(4.0)})
            parent = os.getpid()
            def child():
                global handle, state, worker
                del handle, state
                worker.flush()
                assert leases("dropped") == {"ready": {parent}}
                assert worker.evict("linear")
                worker.flush()
                assert leases("linear") == {"ready": {parent}}
                del worker
                while any(one.pid != parent for one in ask(lambda one: one.status()).sessions):
                    time.sleep(0.001)
            joined(forked(child))
            assert leases("linear") == leases("dropped") == {"ready": {parent}}
            """
        )

    def test_attaching_in_it_shares_its_session(self, fork):
        fork(
            """
            with worker:
                handle = load()
                def child():
                    with gpu_worker.attach(sys.argv[1]) as mine:
                        with mine.use("linear", skeleton=skeleton, build=skeleton) as module:
                            module(torch.ones(3))
                    sessions = ask(lambda operator: operator.status()).sessions
                    assert [one.pid for one in sessions].count(os.getpid()) == 1
                joined(forked(child))
                worker.flush()
            """
        )

    def test_it_leases_what_is_retired(self, fork):
        """It is freed when both have let go of it."""
        fork(
            """
            old = worker.state_dict("kept", build=lambda: {"w": torch.zeros(3)}, version="1")
            new = worker.state_dict("kept", build=lambda: {"w": torch.ones(3)}, version="2")
            parent = os.getpid()
            reading, writing = os.pipe()
            hearing, saying = os.pipe()
            def child():
                global old, new
                both = {parent, os.getpid()}
                assert leases("kept") == {"retired": both, "ready": both}
                os.write(saying, b"x")
                assert os.read(reading, 1)
                assert leases("kept") == {"retired": {os.getpid()}, "ready": both}
                assert not old["w"].any()
                del old
                worker.flush()
                assert leases("kept") == {"ready": both}
            pid = forked(child)
            assert os.read(hearing, 1)
            del old
            worker.flush()
            os.write(writing, b"x")
            joined(pid)
            """
        )

    def test_it_keeps_them_when_its_parent_ends(self, fork, operator):
        out = fork(
            """
            state = worker.state_dict("orphan", build=lambda: {"w": torch.arange(4.0)})
            if os.fork():
                print(os.getpid(), flush=True)
                os._exit(0)
            signal.alarm(20)
            """
            # The template reports the end of the parent; this goes on.
            """
            while leases("orphan") != {"ready": {os.getpid()}}:
                time.sleep(0.001)
            assert state["w"].sum() == 6
            del state
            worker.flush()
            assert worker.invalidate("orphan")
            """
        )
        assert int(out)
        wait_until(lambda: operator.generation("orphan") is None)

    def test_its_children_are_sessions_too(self, fork):
        fork(
            """
            state = worker.state_dict("deep", build=lambda: {"w": torch.arange(4.0)})
            parent = os.getpid()
            def child():
                middle = os.getpid()
                def grandchild():
                    assert leases("deep") == {"ready": {parent, middle, os.getpid()}}
                    assert worker.state_dict("deep", build=skeleton)["w"].sum() == 6
                joined(forked(grandchild))
            joined(forked(child))
            """
        )

    def test_it_has_no_socket_of_its_parents(self, fork):
        """So that the parent's connection ends with the parent."""
        fork(
            """
            load()
            def sockets():
                links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                names = [os.readlink(link) for link in links if os.path.lexists(link)]
                return [name for name in names if "socket:" in name or "eventfd" in name]
            parents = sockets()
            assert len(parents) == 2
            def child():
                assert len(sockets()) == 2, sockets()
                assert set(parents) & set(sockets()) <= {"anon_inode:[eventfd]"}
            joined(forked(child))
            """
        )

    def test_what_is_unused_there_is_evicted_in_time(self, fork):
        fork(
            """
            evicted = threading.Event()
            tell = lambda key, generation, cause: cause == "unused" and evicted.set()
            quick = gpu_worker.attach(sys.argv[1], idle_timeout=1.0, on_evict=tell)
            quick.load("quick", skeleton=skeleton, build=skeleton).close()
            def child():
                assert evicted.wait(10)
            pid = forked(child)
            assert evicted.wait(10)
            joined(pid)
            """
        )

    def test_its_exit_runs_through_its_parents_blocks(self, fork):
        """Those end what is the child's, and nothing of the parent's."""
        fork(
            """
            with worker, worker.use("linear", skeleton=skeleton, build=skeleton) as module:
                pid = os.fork()
                if not pid:
                    signal.alarm(20)
                    sys.exit(7)
                joined(pid, 7)
                assert os.getpid() in leases("linear")["ready"]
                module(torch.ones(3))
                worker.flush()
            """
        )


class TestWhoForks:
    def test_processes_of_multiprocessing(self, fork):
        fork(
            """
            import multiprocessing
            handle = load()
            with handle as module:
                expected = module(torch.ones(3)).tolist()
            forking = multiprocessing.get_context("fork")
            answers, told = forking.Queue(), forking.Event()
            def answer():
                assert os.getpid() in leases("linear")["ready"]
                with worker.use("linear", skeleton=skeleton, build=skeleton) as module:
                    answers.put(module(torch.ones(3)).tolist())
                told.wait()
            processes = [forking.Process(target=answer) for _ in range(3)]
            for process in processes:
                process.start()
            assert [answers.get() for _ in processes] == [expected] * 3
            assert leases("linear")["ready"] >= {os.getpid(), *(one.pid for one in processes)}
            agree()
            told.set()
            for process in processes:
                process.join()
                assert process.exitcode == 0
            """
        )

    def test_workers_of_a_data_loader(self, fork):
        fork(
            """
            from torch.utils.data import DataLoader, Dataset
            state = worker.state_dict("loaded", build=lambda: {"w": torch.arange(64.0)})
            class Weights(Dataset):
                def __len__(self):
                    return 64
                def __getitem__(self, index):
                    assert os.getpid() in leases("loaded")["ready"]
                    return state["w"][index] * 2
            batches = list(DataLoader(Weights(), batch_size=8, num_workers=2))
            assert torch.equal(torch.cat(batches), state["w"] * 2)
            while leases("loaded") != {"ready": {os.getpid()}}:
                time.sleep(0.001)
            """
        )


class TestExec:
    """The next program inherits nothing, and its process goes on."""

    @pytest.mark.parametrize(
        "start",
        [
            pytest.param(
                "subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=seen)", id="preexec_fn"
            ),
            pytest.param("subprocess.Popen(command, stdin=subprocess.PIPE)", id="subprocess"),
            pytest.param("Forked()", id="fork and exec"),
        ],
    )
    def test_the_books_forget_what_it_had(self, fork, start):
        script = """
            import subprocess
            state = worker.state_dict("left", build=lambda: {"w": torch.arange(4.0)})
            parent = os.getpid()
            command = [sys.executable, "-c", "import os; print(os.getpid(), os.read(0, 1))"]
            def seen():
                assert leases("left") == {"ready": {parent, os.getpid()}}
            class Forked:
                def __init__(self):
                    reading, writing = os.pipe()
                    self.pid = os.fork()
                    if not self.pid:
                        seen()
                        os.dup2(reading, 0)
                        os.close(writing)
                        os.execv(command[0], command)
                    self.stdin = os.fdopen(writing, "wb")
                def poll(self):
                    return None if os.waitpid(self.pid, os.WNOHANG) == (0, 0) else 0
                def wait(self):
                    joined(self.pid)
            next = START
            deadline_s = time.monotonic() + 20
            while leases("left") != {"ready": {parent}}:
                assert time.monotonic() < deadline_s, (parent, next.pid, leases("left"))
            assert next.poll() is None
            assert next.pid not in [one.pid for one in ask(lambda one: one.status()).sessions]
            agree()
            next.stdin.write(b"x")
            next.stdin.close()
            next.wait()
        """
        assert "b'x'" in fork(script.replace("START", start))


class TestCoordinatorThatDoesNotAnswer:
    @pytest.fixture
    def mortal(self, tmp_path):
        started = Coordinator(str(tmp_path / "s"))
        yield started
        started.stop(signal.SIGKILL)

    def test_a_stopped_one_holds_no_child_up(self, run, mortal):
        """It is counted as soon as that goes on."""
        script = """
            handle = load()
            coordinator = int(sys.argv[2])
            parent = os.getpid()
            os.kill(coordinator, signal.SIGSTOP)
            began_s = time.monotonic()
            def child():
                assert time.monotonic() - began_s < 5
                with handle as module:
                    module(torch.ones(3))
                os.kill(coordinator, signal.SIGCONT)
                worker.flush()
                assert leases("linear") == {"ready": {parent, os.getpid()}}
            joined(forked(child))
        """
        run(textwrap.dedent(FORK) + textwrap.dedent(script), mortal.socket, str(mortal.pid))

    def test_one_that_is_gone_is_found_again(self, run, mortal):
        """The next one hears of it from both, and frees nothing that either has."""
        script = """
            import subprocess
            state = worker.state_dict("dict", build=lambda: {"w": torch.arange(4.0)})
            parent = os.getpid()
            os.kill(int(sys.argv[2]), signal.SIGKILL)
            reading, writing = os.pipe()
            def child():
                assert state["w"].sum() == 6
                os.write(writing, b"x")
                worker.flush(20)
                os.close(writing)
                while leases("dict") != {"ready": {parent, os.getpid()}}:
                    time.sleep(0.001)
                agree()
            pid = forked(child)
            assert os.read(reading, 1)
            next = subprocess.Popen(
                [sys.executable, "-m", "coordinator", "serve", "--socket", sys.argv[1]],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            worker.flush(20)
            joined(pid)
            next.kill()
            next.wait()
        """
        run(textwrap.dedent(FORK) + textwrap.dedent(script), mortal.socket, str(mortal.pid))


class TestRoom:
    def test_what_parent_and_child_do_not_use_makes_room(self, run, tmp_path):
        """Private memory that the kernel shares is asked for like weights: both, then both let go.

        It takes both, and neither uses it, so there is room for what a third loads.
        """
        script = """
            def wide():
                return torch.nn.Linear(1000, 1000)
            worker.load("mine", skeleton=wide, build=wide, private=True).close()
            third, parent = Operator.connect(sys.argv[1], "third"), os.getpid()
            over, done = os.pipe()
            def child():
                assert leases("mine") == {"ready": {parent, os.getpid()}}
                os.close(done)
                os.read(over, 1)
                assert not worker._table._records._current
            pid = forked(child)
            os.close(over)
            with third:
                from shm_store.checkpoint_files import open_checkpoint
                from shm_store.reading import AS_IT_IS
                third.acquire("theirs", open_checkpoint(sys.argv[2]), AS_IT_IS, 20.0)
                assert leases("mine") == {}
            os.close(done)
            joined(pid)
        """
        source = tmp_path / "wide.safetensors"
        save_file({"weight": torch.ones(1000, 1000)}, str(source))
        with running(str(tmp_path / "s"), "--ram-budget", "6MiB") as small:
            run(textwrap.dedent(FORK) + textwrap.dedent(script), small.socket, str(source))


class TestOtherThreads:
    """Which the child does not have."""

    def test_what_the_keeper_was_at_is_done_again(self, fork):
        """And what was queued behind it: else a claim would never end in the child."""
        fork(
            """
            at_it, over = threading.Event(), threading.Event()
            def task():
                at_it.set()
                over.wait()
            handle = load()
            worker._client.keeper.put(task)
            assert at_it.wait(20)
            del handle
            def child():
                over.set()
                worker.flush()
                assert worker.evict("linear")
            pid = forked(child)
            over.set()
            joined(pid)
            """
        )

    def test_what_the_keeper_has_just_taken_is_not_lost(self, fork):
        """It has left the queue, and nothing is done of it yet: its claim ends in the child too."""
        fork(
            """
            taken, over = threading.Event(), threading.Event()
            def trace(frame, event, argument):
                if frame.f_code.co_name not in ("_take", "_next"):
                    return None
                if event == "return" and not taken.is_set():
                    taken.set()
                    over.wait(20)
                return trace
            handle = load()
            worker.flush()
            begun = threading.Event()
            def begin():
                sys.settrace(trace)
                begun.set()
            worker._client.keeper.put(begin)
            assert begun.wait(20)
            del handle
            assert taken.wait(20)
            def child():
                worker.flush()
                assert worker.evict("linear")
            pid = os.fork()
            if not pid:
                signal.alarm(20)
                child()
                os._exit(0)
            over.set()
            joined(pid)
            """
        )

    @pytest.mark.parametrize("moment", ["received", "mapped", "closing"])
    def test_what_they_have_of_a_segment_comes_into_the_tables_first(self, fork, moment):
        """An fd on its way to a mapping, or out of it; a map before anybody knows of it.

        A fork waits for our threads, so the child has nothing that is in no table of it.
        """
        script = """
            from gpu_worker import leases, mapping, registry
            registry.FORK_PATIENCE_S = 20
            at_it, over = threading.Event(), threading.Event()
            def wait():
                at_it.set()
                over.wait(20)
            class Os:
                def __getattr__(self, name):
                    return getattr(os, name)
                def close(self, fd):
                    wait()
                    os.close(fd)
            map_segment, granted = mapping.map_segment, mapping.MappingTable.granted
            def mapping_late(fd, size_bytes):
                buffer = map_segment(fd, size_bytes)
                wait()
                return buffer
            def granted_late(*arguments):
                wait()
                return granted(*arguments)
            state = worker.state_dict("known to MOMENT", build=skeleton)
            if "MOMENT" == "received":
                mapping.MappingTable.granted = granted_late
            elif "MOMENT" == "mapped":
                mapping.map_segment = mapping_late
            else:
                mapping.os = Os()
            def use():
                worker.state_dict("MOMENT", build=skeleton)
            threading.Thread(target=use, daemon=True).start()
            assert at_it.wait(20)
            def segments(lines):
                return {line.split("weight-cache:")[1].split()[0] for line in lines}
            threading.Timer(0.1, over.set).start()
            pid = os.fork()
            if not pid:
                signal.alarm(20)
                links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                fds = [os.readlink(link) for link in links if os.path.lexists(link)]
                with open("/proc/self/maps") as maps:
                    lines = [*maps, *fds]
                kept = segments(line for line in lines if "/memfd:weight-cache:" in line)
                os._exit(0 if kept == set(worker._client.leases._mappings._mappings) else 1)
            joined(pid)
            assert state["bias"].numel() == 2
        """
        fork(script.replace("MOMENT", moment))

    def test_one_that_gets_no_thread_is_told(self, fork):
        """And not left to wait for threads that are not there."""
        fork(
            """
            import logging
            logging.disable()
            state = worker.state_dict("threadless", build=skeleton)
            start = threading._start_new_thread
            def refuse(*arguments):
                raise RuntimeError("can't start new thread")
            threading._start_new_thread = refuse
            pid = os.fork()
            threading._start_new_thread = start
            if not pid:
                signal.alarm(20)
                for ask_for in (
                    lambda: worker.state_dict("threadless", build=skeleton), worker.flush
                ):
                    try:
                        ask_for()
                    except gpu_worker.ResourceError as error:
                        assert "not attached" in str(error)
                    else:
                        os._exit(1)
                assert state["bias"].numel() == 2
                gpu_worker.attach(sys.argv[1]).state_dict("threadless", build=skeleton)
                os._exit(0)
            joined(pid)
            """
        )

    def test_what_the_keeper_has_in_its_hands_is_not_kept_for_ever(self, fork):
        """The child has no such thread, and nobody there could let go of it. A fork waits."""
        fork(
            """
            from gpu_worker import registry
            registry.FORK_PATIENCE_S = 20
            state = worker.state_dict("in hand", build=lambda: {"w": torch.arange(4.0)})
            parent = os.getpid()
            at_it, over = threading.Event(), threading.Event()
            def task():
                in_hand = state
                at_it.set()
                over.wait()
            worker._client.keeper.put(task)
            assert at_it.wait(20)
            threading.Timer(0.1, over.set).start()
            def child():
                global state
                del state
                worker.flush()
                assert leases("in hand") == {"ready": {parent}}
            joined(forked(child))
            """
        )

    def test_a_callback_that_forks_is_not_told_twice(self, fork):
        """In the keeper's thread, which is the child's main thread then."""
        fork(
            """
            told, done = [], threading.Event()
            def tell(key, generation, cause):
                told.append(key)
                if key != "first":
                    return
                pid = os.fork()
                if not pid:
                    signal.alarm(20)
                    telling.evict("second")
                    telling.flush()
                    os._exit(0 if told == ["first", "second"] else 1)
                told.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                done.set()
            telling = gpu_worker.attach(sys.argv[1], on_evict=tell)
            first = telling.load("first", skeleton=skeleton, build=skeleton)
            telling.load("second", skeleton=skeleton, build=skeleton).close()
            assert not telling.evict("first")
            first.__enter__()
            first.__exit__(None, None, None)
            del first  # so the keeper ends its claim, and tells of it
            assert done.wait(30)
            assert told == ["first", 0], told
            """
        )

    def test_a_fork_during_a_fill_keeps_the_segment_nowhere_else(self, run):
        """Its memory would stay after the coordinator freed it, in nobody's books."""
        run(
            """
            from gpu_worker import publish
            fill = publish.fill
            def forking(*given):
                child = os.fork()
                if not child:
                    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                    names = [os.readlink(link) for link in links if os.path.lexists(link)]
                    os._exit(sum("memfd:weight-cache:" in name for name in names))
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                fill(*given)
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
                client, table = worker._client, worker._table
                with (
                    registry._registry, client._opening, client._lock, table._lock,
                    client.leases._mappings._lock,
                ):
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
            ("load_lock", "worker.load('another', skeleton=skeleton, build=skeleton)"),
            ("client", "worker.flush(60)"),
        ],
    )
    def test_a_child_forked_in_the_middle_of_a_wait_leaves_it(self, run, module, wait):
        """As by a signal handler. There it waits for threads that only its parent has."""
        script = """
            import signal, threading
            from gpu_worker import MODULE, waits
            waits.STEP_S = 0.1
            entered, over = threading.Event(), threading.Event()
            def slow():
                entered.set()
                over.wait()
                return skeleton()
            def steps(*arguments):
                global child
                for step_s in waits.steps(*arguments):
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
                callbacks["skeleton" if "MODULE" == "load_lock" else "build"] = slow
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

    def test_a_child_forked_while_waiting_for_another_load_loads_by_itself(self, fork):
        """As by a signal handler. The load it waits for is in a thread that only its parent has."""
        fork(
            """
            from gpu_worker import flights, waits
            entered, over = threading.Event(), threading.Event()
            def slow():
                if child != 0:
                    entered.set()
                    over.wait()
                return skeleton()
            def steps(*given):
                global child
                for step_s in waits.steps(*given):
                    if child is None and threading.current_thread() is threading.main_thread():
                        child = os.fork()
                        if not child:
                            signal.alarm(20)
                        else:
                            over.set()
                    yield step_s
            child = None
            load = lambda: worker.load("awaited", skeleton=slow, build=skeleton).close()
            other = threading.Thread(target=load)
            other.start()
            assert entered.wait(60)
            flights.steps = steps
            load()
            if not child:
                assert worker.evict("awaited")
                os._exit(7)
            joined(child, 7)
            other.join()
            """
        )

    def test_a_load_imports_nothing(self, fork):
        """A child that is forked meanwhile would wait for ever for the lock of that import."""
        fork(
            """
            on_device = gpu_worker.attach(sys.argv[1], device="sim:0", vram_budget=1 << 24)
            before = set(sys.modules)
            with worker.use("linear", skeleton=skeleton, build=skeleton) as module:
                module(torch.ones(3))
            worker.state_dict("ones", build=lambda: {"w": torch.ones(1)})
            worker.load("private", skeleton=skeleton, build=skeleton, private=True)
            with on_device.use("linear", skeleton=skeleton, build=skeleton) as module:
                module(torch.ones(3))
            on_device.offload_all()
            assert set(sys.modules) == before, set(sys.modules) - before
            del module
            worker.shutdown(), on_device.shutdown()
            """
        )

    def test_a_fork_in_the_middle_of_everything_hangs_nobody(self, fork):
        """Other threads hold every lock there is, again and again, while this one forks."""
        fork(
            """
            stop = threading.Event()
            def work():
                while not stop.is_set():
                    with worker.use("linear", skeleton=skeleton, build=skeleton):
                        worker.evict("linear")
                    gpu_worker.attach(sys.argv[1]).shutdown()
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            def child():
                worker.flush()
                with worker.use("linear", skeleton=skeleton, build=skeleton) as module:
                    module(torch.ones(3))
                gpu_worker.attach(sys.argv[1]).shutdown()
            codes = []
            for _ in range(25):
                pid = forked(child)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            stop.set()
            for thread in threads:
                thread.join()
            assert codes == [0] * 25, codes
            """
        )
