"""The load lock: who waits for whom, and what is left after whatever comes between."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

import gpu_worker
from gpu_worker.load_lock import LoadLock, _over, load_lock
from gpu_worker.module import assemble
from gpu_worker.waits import steps
from shm_store.errors import ArgumentRefused, CallerError, LoadTimeout, ReentryRefused
from tests.gpu_worker.sealed import KEY, mapped, seal
from tests.gpu_worker.served import WAIT_S, skeleton, wait_until
from tests.processes import ROOT

SIDES = ("read", "write")

PROMPT_S = 0.1
"""How long it may take until an exception from outside has ended a wait."""

PACKAGE = os.path.dirname(gpu_worker.__file__)
OURS = {os.path.join(PACKAGE, name) for name in ("load_lock.py", "reentry.py", "waits.py")}


class Taker(threading.Thread):
    """A thread that takes a side, says when it has it, and leaves it when it is told.

    It has arrived when this is made, so who is made first came first.
    """

    def __init__(self, lock: LoadLock, side: str, left_s: float | None = None) -> None:
        super().__init__(daemon=True)
        self.inside, self.leave = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.ended_s = 0.0
        self.hold = getattr(lock, side)(left_s)
        self.start()
        wait_until(lambda: self.hold in lock._holds.values() or not self.is_alive())

    def run(self) -> None:
        try:
            with self.hold:
                self.inside.set()
                assert self.leave.wait(WAIT_S)
        except BaseException as error:
            self.error = error
        self.ended_s = time.monotonic()

    def wait_inside(self) -> None:
        assert self.inside.wait(WAIT_S), self.error

    def done(self) -> None:
        """Have it leave, and wait until it has."""
        self.leave.set()
        self.join(WAIT_S)
        assert not self.is_alive()


class Stopped(BaseException):
    """What `stop_thread` raises."""


def stop_thread(thread: threading.Thread) -> None:
    """Raise `Stopped` in a thread from outside, as debuggers and notebooks do."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))


@pytest.fixture
def lock():
    return LoadLock()


@pytest.fixture
def take(lock):
    """Makes takers, and has all leave at the end."""
    takers: list[Taker] = []

    def take(side: str, left_s: float | None = None) -> Taker:
        takers.append(Taker(lock, side, left_s))
        return takers[-1]

    yield take
    for taker in takers:
        taker.leave.set()
    for taker in takers:
        taker.join(1.0)  # one that never ends has failed its test already


def check_free(lock: LoadLock) -> None:
    """Nobody has it: this thread and another get either side at once."""
    assert not lock.owned()

    def take_both() -> None:
        for side in SIDES:
            with getattr(lock, side)(0.0):
                pass

    take_both()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            take_both()
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=run, daemon=True)
    other.start()
    other.join(WAIT_S)
    assert errors == []


class TestOrder:
    def test_readers_are_there_together(self, take):
        for taker in [take("read") for _ in range(3)]:
            taker.wait_inside()

    @pytest.mark.parametrize(("first", "second"), [("write", "read"), ("write", "write")])
    def test_a_writer_is_there_alone(self, take, first, second):
        writer, other = take(first), take(second)
        writer.wait_inside()
        assert not other.inside.is_set()
        writer.done()
        other.wait_inside()

    def test_a_writer_waits_for_every_reader(self, take):
        readers = [take("read") for _ in range(3)]
        for reader in readers:
            reader.wait_inside()
        writer = take("write")
        for reader in readers:
            assert not writer.inside.is_set()
            reader.done()
        writer.wait_inside()

    def test_a_writer_that_waits_holds_back_later_readers(self, take):
        first = take("read")
        first.wait_inside()
        writer, later = take("write"), take("read")
        assert not writer.inside.is_set() and not later.inside.is_set()
        first.done()
        writer.wait_inside()
        assert not later.inside.is_set()
        writer.done()
        later.wait_inside()

    def test_a_reader_waits_for_no_writer_that_comes_after_it(self, take):
        """So a row of writers, one after the other, lets it in."""
        writer = take("write")
        writer.wait_inside()
        reader, row = take("read"), [take("write") for _ in range(3)]
        writer.done()
        reader.wait_inside()
        assert not any(one.inside.is_set() for one in row)
        reader.done()
        for number, one in enumerate(row):
            one.wait_inside()
            assert not any(later.inside.is_set() for later in row[number + 1 :])
            one.done()

    def test_between_two_passes_a_writer_that_waits_is_let_in(self, lock, take):
        """S30: it waits for one pass of each mover, the one that is under way."""
        passes: list[int] = []
        in_third, go_on = threading.Event(), threading.Event()
        seen: list[int] = []

        def move() -> None:
            for number in range(1, 101):
                with lock.read():
                    passes.append(number)
                    if number == 3:
                        in_third.set()
                        assert go_on.wait(WAIT_S)

        def build() -> None:
            with lock.write():
                seen.extend(passes)

        mover = threading.Thread(target=move, daemon=True)
        mover.start()
        assert in_third.wait(WAIT_S)
        builder = threading.Thread(target=build, daemon=True)
        builder.start()
        wait_until(lambda: any(hold.writes for hold in lock._holds.values()))
        go_on.set()
        builder.join(WAIT_S)
        mover.join(WAIT_S)
        assert seen == [1, 2, 3]
        assert len(passes) == 100

    def test_no_two_overlap_that_must_not(self, lock):
        """Many of both, as fast as they can."""
        inside: list[str] = []
        errors: list[object] = []

        def work(side: str) -> None:
            for _ in range(300):
                with getattr(lock, side)(WAIT_S):
                    inside.append(side)
                    there = list(inside)
                    if "write" in there and len(there) > 1:
                        errors.append(there)
                    inside.remove(side)

        threads = [
            threading.Thread(target=work, args=(side,), daemon=True)
            for side in [*SIDES, "read"] * 2
        ]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
        finally:
            sys.setswitchinterval(before)
        assert errors == [] and inside == []
        check_free(lock)

    def test_who_comes_again_is_behind_those_who_came_meanwhile(self, lock, take):
        with lock.read():
            writer = take("write")
        writer.wait_inside()
        with pytest.raises(LoadTimeout), lock.read(0.0):
            pass

    @pytest.mark.parametrize("side", SIDES)
    def test_who_comes_between_any_two_lines_is_before_or_behind(self, lock, take, side):
        """And a finalizer that comes and goes changes nothing: who is behind gets no better place.

        So nobody is inside together, and nobody waits for somebody who waits for him.
        """
        together: list[Taker] = []
        for number in points():
            came: list[tuple[Taker, bool]] = []

            def come(came=came):
                arrived = lock.owned()
                with contextlib.suppress(ReentryRefused), lock.read(0.0):
                    pass
                came.append((take("write"), arrived))
                if not arrived:
                    came[0][0].wait_inside()

            def call(came=came):
                with getattr(lock, side)(0.0):
                    together.extend(writer for writer, _ in came if writer.inside.is_set())

            point = AtPoint("line", number, come)
            error = point.during(call)
            if not point.place:
                break
            [(writer, arrived)] = came
            assert (error is None) is arrived, point.place
            writer.done()
            assert together == [] and writer.error is None
        check_free(lock)

    def test_a_wait_for_several_is_no_longer_than_one_step(self):
        """However slowly one after the other leaves, a deadline is kept."""

        class Leaving:
            def wait_over(self, step_s: float) -> bool:
                steps_s.append(step_s)
                return len(steps_s) < 3

        steps_s: list[float] = []
        left = [Leaving() for _ in range(4)]
        assert not _over(left, 0.05)
        assert steps_s == [0.05, 0.0, 0.0] and len(left) == 2
        steps_s.clear()
        assert _over(left, 0.05)
        assert left == []

    def test_an_end_that_was_seen_is_not_looked_for_again(self, lock, take, monkeypatch):
        """Or readers would meet at the lock of a writer that is long gone."""
        take("write").done()
        with lock.read():
            pass
        monkeypatch.setattr("gpu_worker.load_lock.steps", None)
        with lock.read():
            pass

    def test_what_is_kept_of_those_that_left_is_one_for_each_thread(self, lock):
        for side in SIDES * 5:
            with getattr(lock, side)():
                pass
        assert len(lock._holds) == 1


class TestReentry:
    @pytest.mark.parametrize("waiting", [False, True], ids=["alone", "a writer waits"])
    @pytest.mark.parametrize("inner", SIDES)
    @pytest.mark.parametrize("outer", SIDES)
    def test_it_is_refused_and_nobody_stalls(self, lock, take, outer, inner, waiting):
        """S28: whatever it has and asks for; what it has goes on as it was."""
        with getattr(lock, outer)():
            writer = take("write") if waiting else None
            with pytest.raises(ReentryRefused) as caught, getattr(lock, inner)():
                pass
            assert "set a flag" in caught.value.remedy
            with pytest.raises(ReentryRefused):
                lock.refuse_owned()
            assert lock.owned()
            assert writer is None or not writer.inside.is_set()
            reader = take("read", 0.0)
            reader.join(WAIT_S) if outer == "write" or waiting else reader.done()
            assert isinstance(reader.error, LoadTimeout) is (outer == "write" or waiting)
        if writer is not None:
            writer.wait_inside()
            writer.done()
        check_free(lock)

    def test_what_another_thread_has_is_no_reentry(self, lock, take):
        take("read").wait_inside()
        assert not lock.owned()
        lock.refuse_owned()
        with lock.read(0.0):
            pass

    @pytest.mark.parametrize("side", SIDES)
    def test_one_side_is_for_one_with(self, lock, side):
        """What others know of its end would be wrong for the second."""
        hold = getattr(lock, side)()
        with hold, pytest.raises(CallerError, match="entered twice"), hold:
            pass
        with pytest.raises(CallerError, match="entered twice"), hold:
            pass
        check_free(lock)

    @pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
    @pytest.mark.parametrize("inner", SIDES)
    @pytest.mark.parametrize("outer", SIDES)
    def test_in_the_middle_of_our_own_code_it_never_hangs(self, lock, take, outer, inner, held):
        """As by a finalizer, at every line: refused, or done before the other has begun."""
        outcomes: list[list[str]] = []

        def again() -> None:
            try:
                with getattr(lock, inner)(0.0):
                    outcomes[-1].append("taken")
            except (ReentryRefused, LoadTimeout) as error:
                outcomes[-1].append(type(error).__name__)

        writer = take("write") if held else None
        for number in points():
            outcomes.append([])
            point = AtPoint("line", number, again)
            error = point.during(lambda: enter(lock, outer, 0.0))
            assert isinstance(error, LoadTimeout) is held
            if not point.place:
                break
            assert len(outcomes[-1]) == 1
        happened = [one for outcome in outcomes for one in outcome]
        begun = happened.index("ReentryRefused")
        assert set(happened[:begun]) == {"LoadTimeout" if held else "taken"}
        assert "ReentryRefused" in set(happened[begun:])
        if writer is not None:
            writer.done()
        check_free(lock)

    def test_a_signal_handler_in_the_middle_of_a_wait_is_refused(self, lock, take):
        refused: list[Exception | None] = []

        def handle(*_: object) -> None:
            try:
                with lock.read():
                    refused.append(None)
            except ReentryRefused as error:
                refused.append(error)
            writer.leave.set()

        writer = take("write")
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            with when_waiting(lock, lambda: signal.raise_signal(signal.SIGUSR1)), lock.read(WAIT_S):
                pass
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert [type(one) for one in refused] == [ReentryRefused]
        check_free(lock)


@contextlib.contextmanager
def when_waiting(lock: LoadLock, do: Callable[[], object]) -> Iterator[None]:
    """Have another thread call `do` once this one waits for the lock."""
    mine = threading.get_ident()

    def run() -> None:
        wait_until(lambda: mine in lock._holds)
        do()

    assert mine not in lock._holds
    other = threading.Thread(target=run, daemon=True)
    other.start()
    yield
    other.join(WAIT_S)


class TestGivingUp:
    @pytest.mark.parametrize("left_s", [0.0, 0.06])
    @pytest.mark.parametrize(("held", "side"), [("write", "read"), ("read", "write")])
    def test_a_wait_has_a_deadline_and_takes_nothing(self, lock, take, held, side, left_s):
        """S31."""
        holder = take(held)
        holder.wait_inside()
        with pytest.raises(LoadTimeout, match="turn in time"), getattr(lock, side)(left_s):
            pass
        holder.done()
        check_free(lock)

    def test_the_caller_words_the_error(self, lock, take):
        take("write").wait_inside()
        error = LoadTimeout("mine")
        with pytest.raises(LoadTimeout) as caught, lock.read(0.0, busy=lambda: error):
            pass
        assert caught.value is error

    def test_who_is_over_needs_no_time(self, lock, take):
        """However many came and went: a deadline of none is enough."""
        for taker in [take(side) for side in SIDES for _ in range(3)]:
            taker.done()
        with lock.write(0.0):
            pass

    def test_a_writer_that_gives_up_holds_no_reader_back(self, take):
        """S31: those who came after it go on at once, with the reader that it waited for."""
        first = take("read")
        first.wait_inside()
        writer, later = take("write"), take("read")
        stop_thread(writer)
        later.wait_inside()
        writer.join(WAIT_S)
        assert isinstance(writer.error, Stopped) and not writer.inside.is_set()

    @pytest.mark.parametrize(("held", "side"), [("write", "read"), ("read", "write")])
    def test_an_exception_from_outside_ends_a_wait_at_once(self, lock, take, held, side):
        """S31, S23: in a thread that is not the main one. The best of a few tries is looked at."""
        holder = take(held)
        holder.wait_inside()
        took_s = []
        for _ in range(5):
            waiting = take(side)
            began_s = time.monotonic()
            stop_thread(waiting)
            waiting.join(WAIT_S)
            assert isinstance(waiting.error, Stopped) and not waiting.inside.is_set()
            took_s.append(waiting.ended_s - began_s)
        holder.done()
        check_free(lock)
        assert min(took_s) < PROMPT_S

    def test_an_interrupt_ends_a_wait_of_the_main_thread_at_once(self):
        """S31, S23. The best of a few tries is looked at."""
        began_s: list[float] = []
        took_s: list[float] = []

        def interrupt_main() -> None:
            began_s.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for _ in range(5):
                lock = LoadLock()
                holder = Taker(lock, "write")
                with when_waiting(lock, interrupt_main):
                    with pytest.raises(KeyboardInterrupt), lock.write():
                        pass
                    took_s.append(time.monotonic() - began_s[-1])
                holder.done()
                check_free(lock)
        finally:
            signal.signal(signal.SIGINT, before)
        assert min(took_s) < PROMPT_S

    @pytest.mark.parametrize("side", SIDES)
    def test_what_the_body_raises_comes_out_and_the_lock_is_free(self, lock, side):
        with pytest.raises(KeyError, match="mine"), getattr(lock, side)():
            raise KeyError("mine")
        check_free(lock)


# --- at every point -----------------------------------------------------------------------------


def points() -> Iterator[int]:
    """Number the points of a call, from 1 on; who finds no more of them breaks."""
    yield from range(1, 2000)
    pytest.fail("so many points cannot be")


class AtPoint:
    """A tracer that does something at the nth point in the lock's own code.

    Points are its lines, or the instructions before which the interpreter lets an exception from
    outside in: those after a call, a jump back, and the beginning of a function.

    Attributes:
        place: where that was; empty as long as it was not.
    """

    def __init__(self, kind: str, number: int, do: Callable[[], object]) -> None:
        self.kind, self.left, self.do = kind, number, do
        self.place = ""

    def during(self, call: Callable[[], object]) -> BaseException | None:
        """Call it; return what it raises, if it does."""

        def apart() -> Iterator[object]:
            # Raised here and there, it can leave the interpreter thinking that another exception is
            # still handled, and all that is raised later would be shown with that one. A generator
            # has its own idea of that.
            yield call()

        before = sys.gettrace()
        sys.settrace(self)
        try:
            next(iter(apart()))
        except (LoadTimeout, KeyboardInterrupt) as error:
            return error
        finally:
            sys.settrace(before)
        return None

    def __call__(self, frame: FrameType, event: str, argument: object) -> AtPoint | None:
        if frame.f_code.co_filename not in OURS:
            return None
        frame.f_trace_opcodes = self.kind == "opcode"
        if event == self.kind and not self.place and self._counts(frame):
            self.left -= 1
            if not self.left:
                self.place = f"{frame.f_code.co_name}:{frame.f_lineno}:{frame.f_lasti}"
                self.do()
        return self

    def _counts(self, frame: FrameType) -> bool:
        return self.kind == "line" or frame.f_lasti in _let_in(frame.f_code)


_known: dict[CodeType, set[int]] = {}


def _let_in(code: CodeType) -> set[int]:
    """Return the offsets in front of which an exception from outside can come."""
    if code not in _known:
        instructions = list(dis.get_instructions(code))
        known = _known[code] = set()
        for before, after in itertools.pairwise(instructions):
            if "JUMP_BACKWARD" in before.opname:
                known.add(before.argval)
            elif before.opname.startswith(("RESUME", "CALL")):
                known.add(after.offset)
    return _known[code]


def enter(lock: LoadLock, side: str, left_s: float | None) -> None:
    with getattr(lock, side)(left_s):
        pass


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["line", "opcode"])
@pytest.mark.parametrize("side", SIDES)
class TestInterruptedAnywhere:
    """S23: an exception at every point of taking and leaving it leaves it free."""

    def test_while_it_is_free(self, lock, side, kind):
        for number in points():
            with lock.write():  # so that there is something to be put away
                pass
            point = AtPoint(kind, number, interrupt)
            error = point.during(lambda: enter(lock, side, None))
            check_free(lock)
            if not point.place:
                break
            assert isinstance(error, KeyboardInterrupt), point.place
        assert number > 10

    @pytest.mark.parametrize("held", SIDES)
    def test_while_it_is_held_to_the_end(self, lock, take, side, held, kind):
        if side == held == "read":
            return  # as if it were free
        for number in points():
            holder = take(held)
            holder.wait_inside()
            point = AtPoint(kind, number, interrupt)
            error = point.during(lambda: enter(lock, side, 0.0))
            holder.done()
            check_free(lock)
            if not point.place:
                break
            assert isinstance(error, KeyboardInterrupt), point.place
        assert number > 20

    @pytest.mark.parametrize("held", SIDES)
    def test_while_who_has_it_leaves(self, lock, take, side, held, kind):
        """And somebody else waits behind, who must get in, whatever becomes of the one between."""
        if side == held == "read":
            return
        for number in points():
            holder, behind = take(held), None
            holder.wait_inside()
            point = AtPoint(kind, number, interrupt)

            def leave(holder=holder):
                nonlocal behind
                if behind is None:
                    tracer = sys.gettrace()
                    sys.settrace(None)
                    behind = take("write")
                    holder.done()
                    sys.settrace(tracer)

            with leaving(leave):
                error = point.during(lambda: enter(lock, side, None))
            if behind is not None:
                behind.wait_inside()
                behind.done()
            holder.done()
            check_free(lock)
            if not point.place:
                break
            assert isinstance(error, KeyboardInterrupt), point.place
        assert number > 20


@contextlib.contextmanager
def leaving(leave: Callable[[], None]) -> Iterator[None]:
    """Have `leave` called where a thread begins to wait for another, before any of that."""
    mine = threading.get_ident()

    def steps_here(*arguments: Any) -> Iterator[float]:
        for step_s in steps(*arguments):
            if threading.get_ident() == mine:
                leave()
            yield step_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_worker.load_lock.steps", steps_here)
        yield


def test_threads_that_are_interrupted_at_random_leave_it_whole(lock, monkeypatch):
    """From outside, wherever they are, while others use it."""
    # They may be anywhere, so some end of it.
    monkeypatch.setattr(threading, "excepthook", lambda arguments: died.append(arguments.exc_type))
    died: list[type[BaseException]] = []
    stop = threading.Event()
    passes, stopped = [0], [0]

    def run(side: str) -> None:
        while not stop.is_set():
            try:
                while not stop.is_set():
                    with getattr(lock, side)():
                        passes[0] += 1
            except Stopped:
                stopped[0] += 1

    def start(side: str) -> threading.Thread:
        thread = threading.Thread(target=run, args=(side,), daemon=True)
        thread.start()
        return thread

    sides = ["read", "read", "write"]
    threads = [start(side) for side in sides]
    for number in range(200):
        which = number % len(sides)
        if not threads[which].is_alive():
            threads[which] = start(sides[which])
        stop_thread(threads[which])
        seen = passes[0]
        wait_until(lambda seen=seen: passes[0] > seen + 10)
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert stopped[0] > 100
    assert set(died) <= {Stopped}
    check_free(lock)


# --- fork ---------------------------------------------------------------------------------------

FORKING = """
    import os, signal, sys, threading
    from gpu_worker.load_lock import load_lock
    from shm_store.errors import ForkedProcess, LoadTimeout, ReentryRefused

    def in_thread(call):
        results = []
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        thread.join()
        return results[0]

    def free():
        for side in (load_lock.read, load_lock.write):
            try:
                with side(0.0):
                    pass
            except LoadTimeout:
                return False
        return True

    def forked(child):
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            try:
                child()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def hold(side, inside, leave):
        with side():
            inside.set()
            leave.wait()

    def held_by_another(side):
        inside, leave = threading.Event(), threading.Event()
        thread = threading.Thread(target=hold, args=(side, inside, leave))
        thread.start()
        inside.wait()
        return leave, thread
"""


def run(script: str) -> None:
    """Run a script in a fresh interpreter; it must say nothing on stderr."""
    whole = textwrap.dedent(FORKING) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", whole],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
class TestFork:
    @pytest.mark.parametrize("side", SIDES)
    def test_what_another_thread_has_is_free_in_the_child(self, side):
        """And what another waits for. The parent's is as it was."""
        run(
            f"""
            leave, thread = held_by_another(load_lock.{side})
            waiting = threading.Thread(target=hold, args=(load_lock.write, leave, leave))
            waiting.start()
            while len(load_lock._holds) < 2:
                pass
            def child():
                assert free() and in_thread(free)
            forked(child)
            assert not load_lock.owned() and not in_thread(free)
            leave.set()
            thread.join()
            waiting.join()
            assert free()
            """
        )

    @pytest.mark.parametrize("side", SIDES)
    def test_what_the_forking_thread_has_is_its_own_there_until_it_leaves(self, side):
        """The rest of the block runs in the child, too."""
        run(
            f"""
            def child():
                assert load_lock.owned() and not in_thread(free)
                try:
                    free()
                except ReentryRefused:
                    pass
                else:
                    raise AssertionError("not refused")
                block.__exit__(None, None, None)
                assert free() and in_thread(free)
            with load_lock.{side}():
                block = load_lock._holds[threading.get_ident()]
                forked(child)
                assert load_lock.owned() and not in_thread(free)
            assert free()
            """
        )

    def test_at_every_line_of_taking_it_the_child_is_whole(self):
        """As by a signal handler. The call has the lock there, or says that its parent waits."""
        run(
            """
            from gpu_worker import load_lock as module

            class ForkAtLine:
                def __init__(self, number):
                    self.left = number
                    self.pid = None
                def __call__(self, frame, event, argument):
                    if frame.f_code.co_filename != module.__file__:
                        return None
                    if event == "line":
                        self.left -= 1
                        if not self.left:
                            self.pid = os.fork()
                            if not self.pid:
                                signal.alarm(20)
                    return self

            leave, thread = held_by_another(load_lock.read)
            heard = []
            while True:
                forking = ForkAtLine(len(heard) + 1)
                sys.settrace(forking)
                error = None
                try:
                    with load_lock.write(0.0):
                        pass
                except (LoadTimeout, ForkedProcess) as raised:
                    error = raised
                sys.settrace(None)
                words = ["had it", "ForkedProcess", "LoadTimeout"]
                outcome = type(error).__name__ if error else "had it"
                if forking.pid == 0:
                    os._exit(words.index(outcome) if free() and in_thread(free) else 9)
                assert outcome == "LoadTimeout"
                if forking.pid is None:
                    break
                code = os.waitstatus_to_exitcode(os.waitpid(forking.pid, 0)[1])
                heard.append(words[code])
            # Before it is known who is ahead, while that is waited for, and when the time is up.
            assert list(dict.fromkeys(heard)) == words, heard
            leave.set()
            thread.join()
            """
        )


# --- construction -------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("table", torch.ones(3))


@pytest.mark.parametrize("include_buffers", [False, True])
def test_no_parameter_lands_on_meta_while_a_user_constructs(include_buffers):
    """S27: each time that one has everything patched, another asks for its next pass."""
    errors: list[BaseException] = []
    asked = done = 0
    devices: set[str] = set()

    def construct() -> None:
        try:
            for _ in range(20):
                with gpu_worker.constructing(), init_empty_weights(include_buffers=include_buffers):
                    wait_until(lambda: asked > done)
                    model = Model()
                assert all(parameter.is_meta for parameter in model.parameters())
                assert model.table.is_meta is include_buffers
        except BaseException as error:
            errors.append(error)

    mover = Model()
    builder = threading.Thread(target=construct, daemon=True)
    builder.start()
    while builder.is_alive():
        for layer in mover.layers:
            asked += 1
            with load_lock.read():
                made = [torch.empty(3), torch.zeros(3), torch.ones(3), torch.full((3,), 1.0)]
                layer.weight.data = torch.ones(3, 3)
                layer.bias = torch.nn.Parameter(made[0], requires_grad=False)
                layer.table = torch.nn.Buffer(made[1])
                done += 1
            made += [layer.weight, layer.bias, layer.table]
            devices.update(tensor.device.type for tensor in made)
    assert errors == []
    assert devices == {"cpu"}
    assert not torch.nn.Linear(1, 1).weight.is_meta


def test_an_assembly_waits_for_the_passes_under_way():
    """And passes for it: its skeleton is not called before, and nobody moves meanwhile."""
    in_skeleton, leave = threading.Event(), threading.Event()

    def slow() -> Model:
        in_skeleton.set()
        assert leave.wait(WAIT_S)
        return Model()

    mover = Taker(load_lock, "read")
    mover.wait_inside()
    with mapped(seal(Model())) as buffer:
        building = threading.Thread(target=assemble, args=(KEY, slow, buffer), daemon=True)
        building.start()
        wait_until(lambda: any(hold.writes and not hold.over for hold in load_lock._holds.values()))
        assert not in_skeleton.is_set()
        mover.done()
        assert in_skeleton.wait(WAIT_S)
        late = Taker(load_lock, "read", 0.0)
        late.done()
        assert isinstance(late.error, LoadTimeout)
        leave.set()
        building.join(WAIT_S)
    check_free(load_lock)


def test_an_assembly_whose_time_is_up_says_who_builds():
    builder = Taker(load_lock, "write")
    builder.wait_inside()
    called: list[int] = []

    def never() -> Model:
        called.append(1)
        return Model()

    with mapped(seal(Model())) as buffer, pytest.raises(LoadTimeout) as caught:
        assemble(KEY, never, buffer, left_s=0.0)
    assert repr(KEY) in caught.value.message
    assert "another thread builds a module" in caught.value.message
    builder.done()
    assert called == []
    check_free(load_lock)


class TestConstructing:
    def test_it_refuses_loads_inside_before_anything_is_asked(self, worker, operator, key, source):
        """What is there already can be used: that builds and moves nothing."""
        worker.load("there", skeleton=skeleton, build=skeleton).close()
        with gpu_worker.constructing():
            with pytest.raises(ReentryRefused) as caught:
                worker.load(key, skeleton=skeleton, source=source)
            assert "gpu_worker.constructing" in caught.value.remedy
            assert operator.generation(key) is None
            with worker.use("there", skeleton=skeleton, build=skeleton) as model:
                assert model.weight.device.type == "cpu"
        with worker.use(key, skeleton=skeleton, source=source):
            pass

    def test_it_refuses_to_wait_for_a_load_of_another_thread(self, worker, key, source):
        """Which waits for this one."""
        handles: list[gpu_worker.ModelHandle] = []

        def load() -> None:
            handles.append(worker.load(key, skeleton=skeleton, source=source))

        with gpu_worker.constructing():
            loading = threading.Thread(target=load, daemon=True)
            loading.start()
            wait_until(lambda: worker._table._flights._flights)
            with pytest.raises(ReentryRefused):
                load()
        loading.join(WAIT_S)
        assert len(handles) == 1
        handles[0].close()

    def test_it_refuses_private_loads(self, worker, key):
        """They take no load lock, but would be built under whatever is patched there."""
        with gpu_worker.constructing(), pytest.raises(ReentryRefused):
            worker.load(key, skeleton=skeleton, build=skeleton, private=True)

    def test_loads_of_other_threads_wait(self, worker, key, source):
        handles: list[gpu_worker.ModelHandle] = []

        def load() -> None:
            handles.append(worker.load(key, skeleton=skeleton, source=source))

        with gpu_worker.constructing():
            loading = threading.Thread(target=load, daemon=True)
            loading.start()
            mine = load_lock._holds[threading.get_ident()]
            wait_until(lambda: any(hold.writes for hold in behind(mine)))
            assert handles == []
        loading.join(WAIT_S)
        assert len(handles) == 1
        handles[0].close()

    def test_in_a_skeleton_it_is_refused(self):
        def nested() -> Model:
            with gpu_worker.constructing():
                return Model()

        with mapped(seal(Model())) as buffer:
            with pytest.raises(ReentryRefused):
                assemble(KEY, nested, buffer)
            assert assemble(KEY, Model, buffer).unexpected == ()

    def test_inside_it_nothing_is_assembled(self):
        """Everything may be patched there; what a skeleton hears of one inside is another thing."""
        with (
            mapped(seal(Model())) as buffer,
            gpu_worker.constructing(),
            pytest.raises(ReentryRefused, match="builds a module"),
        ):
            assemble(KEY, Model, buffer)

    def test_its_timeout_is_checked_at_once_and_kept(self):
        with pytest.raises(ArgumentRefused, match="timeout"):
            gpu_worker.constructing(timeout=-1.0)
        mover = Taker(load_lock, "read")
        mover.wait_inside()
        with pytest.raises(LoadTimeout, match="turn in time"), gpu_worker.constructing(timeout=0):
            pass
        mover.done()
        check_free(load_lock)


def behind(first) -> list:
    """Those who came after a hold."""
    holds = list(load_lock._holds.values())
    return holds[holds.index(first) + 1 :]
