"""Every command of `weight-cache`, each a thin reading of its arguments.

An expected failure leaves as its typed error: `cli.main` shows it and exits with its code. What a
single command needs is imported there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from coordinator.cli import run_coordinator
from coordinator.roster import RESTARTS, Policy, Rule
from shm_store.errors import ArgumentRefused, BudgetExceeded, LoadTimeout, NoCoordinator, listed
from shm_store.keys import parse_key, short_generation
from shm_store.paths import SOCKET_VARIABLE, socket_path
from shm_store.wire import RAM

if TYPE_CHECKING:
    from coordinator.operator import Operator
    from shm_store.report import StatusReport

EXIT_CODES = """\
\b
Exit codes:
  0  done
  1  an error without a class of its own, an audit that found a difference, or a doctor's `fail`
  2  wrong arguments, or weights that are in use
  3  the checkpoint file cannot be used
  4  no room, no memory, or not done in time
  5  the process at the other end is at fault
  6  no coordinator answers, it drains or went away, or another one has the socket
  7  this system lacks something
  130  interrupted
`launch` exits with the code of the first process that fails for good (128 + N for signal N)."""

TIMEOUT_LIMIT_S = 1e9
DRAIN_TIMEOUT_S = 60.0
INVALIDATE_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 300.0

"""The pool of what is loaded from files."""


class PlainCommand(TyperCommand):
    """A command whose help has arguments by their names: KEY, not `{key}` and `key <str>`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [str(self.options_metavar), *(name for name, _ in self._arguments())]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if arguments := self._arguments():
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = [p.get_help_record(ctx) for p in self.get_params(ctx) if p.opts[0][0] == "-"]
        with formatter.section("Options"):
            formatter.write_dl([shown for shown in options if shown])

    def _arguments(self) -> list[tuple[str, str]]:
        return [
            (str(p.metavar), getattr(p, "help", None) or "")
            for p in self.params
            if p.param_type_name == "argument"
        ]


Key = Annotated[str, typer.Argument(metavar="KEY", help="Name of the weights.")]
Socket = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="The coordinator's socket. Default: WEIGHT_CACHE_SOCKET, or where that is unset or "
        "empty, the user's own.",
        show_default=False,
    ),
]
RamBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Limit of the memory for weights, such as 20GiB. Default: half of what may be used.",
        show_default=False,
    ),
]
NoHugePages = Annotated[
    bool,
    typer.Option(
        "--no-huge-pages",
        help="Leave weights in pages of 4 KiB. Default: a child of the coordinator moves them into "
        "pages of 2 MiB, in the background, once they are loaded.",
    ),
]

app = typer.Typer(
    name="weight-cache",
    help="One copy of the model weights per host, whatever crashes.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib import metadata

    try:
        version = metadata.version("shm-weight-cache")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    print(f"weight-cache {version}")
    raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass  # it is there for its options


@app.command(cls=PlainCommand)
def serve(
    socket: Socket = None,
    ram_budget: RamBudget = None,
    leave_after: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="End, with 0, when no process has been attached for S seconds; retained weights "
            "go with it. Default: stay.",
            show_default=False,
        ),
    ] = None,
    no_huge_pages: NoHugePages = False,
) -> None:
    """Run a coordinator in the foreground until it is drained.

    INT and TERM end it at once, with exit code 0: what workers have mapped stays theirs.
    `gpu_worker.attach(autostart=True)` runs one in the background, with --leave-after 1800.
    """
    sys.exit(run_coordinator(socket, ram_budget, leave_after, huge_pages=not no_huge_pages))


@app.command(
    cls=PlainCommand,
    options_metavar="[OPTIONS]",
    context_settings={"allow_interspersed_args": False},
)
def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- CMD...]",
            help="The worker's command and its own options. Default: a resident worker for each "
            "device.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=4096, metavar="N", help="How many to start.")
    ] = 1,
    socket: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Default: a private one for this group.", show_default=False
        ),
    ] = None,
    ram_budget: RamBudget = None,
    no_huge_pages: NoHugePages = False,
    limits: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Limits of pools, a line `ram 20GiB` for each. HUP has it read again.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="WEIGHT_CACHE_DEVICE of worker 0, 1 and so on, such as cuda:0,cuda:1. Without "
            "CMD: where there is to be a resident worker. Default: each GPU, or else cpu.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=SOURCE",
            help="Without CMD: weights that the resident workers keep; may be repeated.",
            show_default=False,
        ),
    ] = None,
    restart_workers: Annotated[
        Policy | None,
        typer.Option(
            metavar="never|on-failure",
            help="Whether a worker that fails is started again. Default: never; without CMD, "
            "on-failure.",
            show_default=False,
        ),
    ] = None,
    restart_coordinator: Annotated[
        Policy,
        typer.Option(
            metavar="never|on-failure", help="Whether a coordinator that fails is started again."
        ),
    ] = Policy.ON_FAILURE,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Of one process in ten minutes; then all end."),
    ] = RESTARTS,
    grace: Annotated[
        float, typer.Option(metavar="S", help="Seconds between asking processes to end and KILL.")
    ] = 10.0,
) -> None:
    """Start a coordinator and N workers that run CMD.

    Options of CMD come after `--`, or after its first word. Without CMD there is a worker for each
    device, which keeps the weights of --keep there for the processes that attach beside it.

    All end together. Workers find WEIGHT_CACHE_SOCKET, WEIGHT_CACHE_RANK and
    WEIGHT_CACHE_WORLD_SIZE in their environment, and what they write is shown with their name.
    Signals are passed on to them, but for HUP with --limits. INT and TERM ask the group to end; the
    second one kills.
    """
    from coordinator import resident, supervisor
    from coordinator.plan import Plan
    from shm_store.sizes import parse_size

    names, kept = _devices(devices), keep or []
    if command:
        resident.refuse_keep(kept)
    else:
        resident.check(kept, names, workers)
        names = names or resident.visible_devices()
        workers = len(names)
        restart_workers = restart_workers or Policy.ON_FAILURE
    plan = Plan(
        command=tuple(command) if command else resident.command(kept),
        resident=not command,
        workers=workers,
        socket=None if socket is None else socket_path(socket),
        ram_budget_bytes=None if ram_budget is None else parse_size(ram_budget),
        huge_pages=not no_huge_pages,
        limits=limits,
        devices=names,
        grace_s=_seconds("--grace", grace),
        worker_rule=Rule(
            restart_workers or Policy.NEVER,
            restarts=max_restarts,
            hopeless=frozenset() if command else resident.HOPELESS,
        ),
        coordinator_rule=Rule(restart_coordinator, restarts=max_restarts),
    )
    sys.exit(supervisor.launch(plan))


@app.command(cls=PlainCommand)
def status(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    socket: Socket = None,
) -> None:
    """Say what is held, by whom, and what it costs.

    Charged is what is taken from a pool's limit, whether anybody uses it or not. A generation is
    named by the end of its id, `#1a`. States: open, its size is not known yet; reserved, charged,
    and the kernel is asked for memory; filling, with how far that is, how fast of late, and how
    long it takes if it goes on so; ready; retired, replaced or invalidated but still held; freeing.
    Weights of 2 MiB or more are in huge pages, from the start or, once ready, in the background.
    "waiting" counts the requests that wait for it, "waiting for" the keys that a process waits for.
    Ready weights that nobody holds are retained: kept warm until room is needed.

    What is on a device is a process's own: there, or waiting for room, or reserved without a model;
    or shared: one copy for all (share_vram), which has the states above while it comes and goes.
    The last table says how often loads found a model in their process, how much went to the device,
    and how long locks waited and moves took, by all processes that are attached.
    """
    from coordinator.group_file import group_lines, read_group

    with _operator(socket, "status") as operator:
        report = operator.status()
    path = socket_path(socket)
    group = read_group(path)
    if json:
        import msgspec

        shown = {**msgspec.to_builtins(report), "group": msgspec.to_builtins(group)}
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        from coordinator.display import plain, show_status

        show_status(report, path)
        for line in [] if group is None else ["", *group_lines(group)]:
            print(plain(line))


@app.command(cls=PlainCommand)
def load(
    key: Key,
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Path of a checkpoint or its folder, or a URL."),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Read tensors whose names match; can be repeated."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="Rename a prefix of names; can be repeated."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PATTERN=]DTYPE",
            help="Cast floating-point tensors to bf16, f16, f32 ..., or keep what they are; can be "
            "repeated: the first that fits counts.",
        ),
    ] = None,
    digest: Annotated[
        bool, typer.Option("--digest", help="Have digests made, for audit --bytes.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Protect it from eviction.")] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="S", help="Give up after S seconds without progress; 0: do not wait."),
    ] = LOAD_TIMEOUT_S,
    socket: Socket = None,
) -> None:
    """Load weights from a checkpoint, for workers to find them ready."""
    from coordinator.display import LoadProgress, say, waiting_text
    from coordinator.reading_options import parse_reading
    from shm_store.checkpoint_files import open_checkpoint
    from shm_store.report import size_text

    name = parse_key(key)
    if not source:
        raise ArgumentRefused("load takes the path of a file, not an empty one")
    timeout_s = _seconds("--timeout", timeout)
    reading = parse_reading(only or (), rename or (), dtype or (), digest)
    started_s = time.monotonic()
    with _operator(socket, "load") as operator:
        opened = open_checkpoint(source)
        size_bytes = sum(os.fstat(fd).st_size for fd in opened.fds)

        def tell_why(report: StatusReport) -> bool:
            reason = waiting_text(report, name, size_bytes)
            if reason is not None:
                say(reason)
            return reason is not None

        try:
            with LoadProgress(key) as progress:
                granted = operator.acquire(
                    name, opened, reading, timeout_s, progress.update, tell_why
                )
        except LoadTimeout as error:
            error.remedy = "see `weight-cache status` for what it waits for, or raise --timeout"
            if timeout_s == 0:
                _refuse_what_never_fits(operator.status(), name, size_bytes)
                raise LoadTimeout(
                    f"{key!r} is not loaded yet, and --timeout 0 does not wait for it",
                    remedy="give --timeout some seconds",
                ) from error
            raise
        finally:
            opened.close()
        if pin:
            operator.pin(name)  # while it is leased: nothing can evict it in between
        operator.release(granted)
        operator.flush()
    took_s = time.monotonic() - started_s
    generation, size = short_generation(granted.gen), size_text(granted.size_bytes)
    print(f"{key}: generation {generation}, {size}, {took_s:.2f} s")


@app.command(cls=PlainCommand)
def evict(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="Name of the weights.", show_default=False),
    ] = None,
    idle: Annotated[bool, typer.Option("--idle", help="All that nobody leases.")] = False,
    socket: Socket = None,
) -> None:
    """Free weights that nobody leases, and their memory.

    A KEY that is not there is an error (2). For `unpin` and `invalidate` it is none: what they are
    to bring about is so already.
    """
    if (key is None) == (not idle):
        raise ArgumentRefused("evict takes a KEY, or else --idle")
    name = None if key is None else parse_key(key)
    with _operator(socket, "evict") as operator:
        gone = operator.evict(name)
        operator.flush()
        kept = operator.pinned_idle() if idle else ()
    print("\n".join(f"evicted {key}" for key in gone) or "nothing to evict")
    if kept:
        print(f"kept {len(kept)} pinned: {', '.join(kept)}")


@app.command(cls=PlainCommand)
def pin(key: Key, socket: Socket = None) -> None:
    """Protect weights from eviction, now and when they are loaded again."""
    name = parse_key(key)
    with _operator(socket, "pin") as operator:
        operator.pin(name)
        known = operator.known(name)
    private = ""
    if known.private_to:
        private = f"; what is private to {_pids_text(known.private_to)} is not protected"
    what = "nothing shared is" if private else "nothing is"
    note = "" if known.shared else f" ({what} loaded under this key yet{private})"
    print(f"pinned {key}{note}")


@app.command(cls=PlainCommand)
def unpin(key: Key, socket: Socket = None) -> None:
    """Take a pin back."""
    name = parse_key(key)
    with _operator(socket, "unpin") as operator:
        was_pinned = operator.unpin(name)
    print(f"unpinned {key}" if was_pinned else f"{key} was not pinned")


@app.command(cls=PlainCommand)
def invalidate(
    key: Key,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds to wait for those who hold it to know.")
    ] = INVALIDATE_TIMEOUT_S,
    socket: Socket = None,
) -> None:
    """Retire weights, pinned or not: whoever asks next has them made anew.

    It returns when no process hands them out any more. What is in use stays until it is let go.
    """
    name = parse_key(key)
    timeout_s = _seconds("--timeout", timeout)
    with _operator(socket, "invalidate") as operator:
        before = operator.known(name)
        operator.invalidate(name, timeout_s)
        after = operator.known(name)
    nothing = "nothing shared" if after.private_to else "nothing"
    print(f"invalidated {key}" if before.shared else f"{nothing} was loaded under {key}")
    if after.holders:
        print(f"still in use by {_pids_text(after.holders)}")
    if after.private_to:
        pids = _pids_text(after.private_to)
        print(f"private to {pids}: retire it there, by `worker.evict` or `worker.invalidate`")


@app.command(cls=PlainCommand)
def limit(
    pool: Annotated[
        str, typer.Argument(metavar="POOL", help="ram, or a device's, such as vram:UUID.")
    ],
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Its limit, such as 20GiB.")],
    socket: Socket = None,
) -> None:
    """Change the limit of a pool.

    It counts until the coordinator ends. Where `launch` or systemd starts the next one after a
    crash, it is kept for that one.

    Nothing in use is taken away: what is above the limit goes when it is idle, and until then
    nothing more is let in. A device may be limited before anybody uses it.
    """
    from shm_store.report import size_text
    from shm_store.sizes import parse_size

    limit_bytes = parse_size(size)
    with _operator(socket, "limit") as operator:
        known = pool == RAM or any(found.name == pool for found in operator.status().pools)
        operator.limit(pool, limit_bytes)
        operator.flush()
        (changed,) = (found for found in operator.status().pools if found.name == pool)
    above = changed.in_use_bytes > limit_bytes
    note = "; above the limit: goes when it is idle" if above else ""
    if not known:
        note = "; no process uses a device of this name so far"
    print(f"{pool}: {size_text(changed.in_use_bytes)} charged of {size_text(limit_bytes)}{note}")


@app.command(cls=PlainCommand)
def audit(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    bytes_: Annotated[
        bool, typer.Option("--bytes", help="Look at all weights that have digests, too.")
    ] = False,
    socket: Socket = None,
) -> None:
    """Compare what is held with what the kernel says, and exit with 1 if they differ.

    It names who maps weights without a lease, and charges pages that processes have written to.
    """
    from coordinator.audit import audit as look

    with _operator(socket, "audit") as operator:
        report = look(operator, bytes_)
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        from coordinator.display import show_audit

        show_audit(report)
    if not report.agree:
        raise typer.Exit(1)


@app.command(cls=PlainCommand)
def drain(
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds to wait for those who hold weights.")
    ] = DRAIN_TIMEOUT_S,
    socket: Socket = None,
) -> None:
    """Take no new work, wait until nothing is held, and end it.

    At the deadline it says who still holds what; the coordinator then goes on draining.
    """
    timeout_s = _seconds("--timeout", timeout)
    with _operator(socket, "drain") as operator:
        operator.drain(timeout_s)
    print("the coordinator has ended")


@app.command(cls=PlainCommand)
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    socket: Socket = None,
) -> None:
    """Say what this host, container and user allow, and what to do where that is not enough.

    It needs no coordinator and changes nothing. Run it where the coordinator and the workers run:
    as the same user, in the same container or service. Exit code 1 if something is missing without
    which weight-cache cannot work; warnings are no failure.
    """
    from coordinator.doctor import report

    if not report(socket, json):
        raise typer.Exit(1)


@app.command(cls=PlainCommand)
def demo(
    json: Annotated[bool, typer.Option("--json", help="Print claims and figures as JSON.")] = False,
    checkpoint_mib: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Size of the checkpoint that it generates.", show_default=False
        ),
    ] = None,
) -> None:
    """Show two processes that share one copy of a real model."""
    from coordinator.process_host import module_command

    command = module_command("gpu_worker.demo")
    if json:
        command += ["--json"]
    if checkpoint_mib is not None:
        command += ["--checkpoint-mib", str(checkpoint_mib)]
    sys.stdout.flush()
    os.execv(command[0], command)


def _operator(socket: str | None, command: str) -> Operator:
    from coordinator.group_file import read_group
    from coordinator.operator import Operator

    path = socket_path(socket)
    try:
        return Operator.connect(path, command)
    except NoCoordinator as error:
        group = read_group(path)
        if group is not None and not group.ending:
            error.remedy = f"`weight-cache launch` (pid {group.pid}) starts it again: try again"
        elif socket is None and not os.environ.get(SOCKET_VARIABLE):
            # The coordinators of `launch` are elsewhere, each on a path of its own.
            error.remedy += ", or give the --socket that `weight-cache launch` printed"
        raise


def _refuse_what_never_fits(report: StatusReport, key: str, size_bytes: int) -> None:
    """Raise BudgetExceeded for a file that is larger than the pool: no time would help."""
    from shm_store.report import size_text

    for pool in report.pools:
        if pool.name == RAM and size_bytes > pool.limit_bytes:
            raise BudgetExceeded(
                f"{key!r} needs {size_text(size_bytes)}; that is more than all of pool {RAM!r}, "
                f"{size_text(pool.limit_bytes)}",
                remedy=f"raise the limit: `weight-cache limit {RAM} SIZE`",
                needed_bytes=size_bytes,
            )


def _pids_text(pids: Sequence[int]) -> str:
    return listed([f"pid {pid}" for pid in pids])


def _devices(text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(text.split(","))
    for name in names:
        if not name.isprintable() or name != name.strip() or not name:
            raise ArgumentRefused(
                f"--devices {text!r} has a name that is none",
                remedy="write names with commas between them, such as cuda:0,cuda:1",
            )
    return names


def _seconds(option: str, seconds: float) -> float:
    if not 0 <= seconds <= TIMEOUT_LIMIT_S:  # false for nan
        raise ArgumentRefused(f"{option} takes seconds, 0 or more, not {seconds:g}")
    return seconds
