"""`python -m benchmarks BENCHMARK [--json]`, which `scripts/bench` calls."""

from __future__ import annotations

import argparse
import resource
import sys
import warnings

from benchmarks.rows import Outcome, show


def main(arguments: list[str]) -> None:
    """Run one benchmark and print its outcome."""
    options = _parser().parse_args(arguments)
    # torch.multiprocessing's file_descriptor strategy takes two fds per tensor in its sender.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
    outcome: Outcome = options.run(options)
    if options.json:
        print(outcome.to_json())
    else:
        show(outcome)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")

    attach = commands.add_parser("attach", help="until a process has the tensors")
    _sized(attach, 2000, 1000)
    attach.add_argument("--rounds", type=int, default=25, help="repeats in one process")
    attach.add_argument("--fresh-rounds", type=int, default=9, help="fresh processes of each")
    attach.set_defaults(run=_attach)

    memory = commands.add_parser("memory", help="what many workers of one model take")
    _sized(memory, 500, 1000)
    memory.add_argument("--workers", type=int, default=8)
    memory.set_defaults(run=_memory)

    death = commands.add_parser("death", help="until leases are gone, or a coordinator is back")
    death.add_argument("--kills", type=int, default=100, help="of workers")
    death.add_argument("--coordinator-kills", type=int, default=10)
    death.set_defaults(run=_death)

    start = commands.add_parser("start", help="until a coordinator listens, and what it then takes")
    start.add_argument("--starts", type=int, default=10)
    start.add_argument("--idle-seconds", type=float, default=30.0)
    start.set_defaults(run=_start)

    lock = commands.add_parser("lock", help="entering and leaving a handle of a loaded module")
    lock.add_argument("--pairs", type=int, default=500, help="in each round")
    lock.add_argument("--rounds", type=int, default=200)
    lock.set_defaults(run=_lock)

    scale = commands.add_parser("scale", help="many clients, keys and sessions")
    scale.add_argument("--clients", type=int, default=8, help="processes that ask at once")
    scale.add_argument("--pairs", type=int, default=300, help="of each client in each round")
    scale.add_argument("--rounds", type=int, default=25)
    scale.add_argument("--keys", type=int, default=10_000)
    scale.add_argument("--sessions", type=int, default=256)
    scale.set_defaults(run=_scale)

    swap = commands.add_parser("swap", help="having a model on its device, and having it leave")
    _sized(swap, 1000, 400)
    swap.add_argument("--rounds", type=int, default=15)
    swap.add_argument("--constructions", type=int, default=60, help="that wait for uploads")
    swap.set_defaults(run=_swap)

    restart = commands.add_parser("restart", help="until a killed process answers again")
    _sized(restart, 1000, 60)
    restart.add_argument("--rounds", type=int, default=7, help="kills before each kind of restart")
    restart.set_defaults(run=_restart)

    share = commands.add_parser("share", help="locking what another process has on the device")
    _sized(share, 1000, 60)
    share.add_argument("--rounds", type=int, default=25)
    share.set_defaults(run=_share)

    pages = commands.add_parser("pages", help="the first read, in huge pages and in small ones")
    _sized(pages, 2000, 1000)
    pages.add_argument("--rounds", type=int, default=25, help="repeats in one process")
    pages.add_argument("--fresh-rounds", type=int, default=9, help="fresh processes of each")
    pages.set_defaults(run=_pages)

    fill = commands.add_parser("fill", help="until the bytes of a file are in memory for all")
    _sized(fill, 2000, 300)
    fill.add_argument("--rounds", type=int, default=5, help="with the file in the page cache")
    fill.add_argument("--cold-rounds", type=int, default=5, help="with the file on the disk only")
    fill.add_argument("--crowd-mb", type=float, default=4000, help="of what many ask for; 0: none")
    fill.add_argument("--workers", type=int, default=8, help="that ask at once")
    fill.add_argument("--folder", help="on the disk to measure, for up to four such files")
    fill.add_argument("--disk-mb-per-s", type=float, default=0, help="hold the disk to (as root)")
    fill.set_defaults(run=_fill)

    every = (attach, memory, death, start, lock, scale, swap, restart, share, pages, fill)
    for command in every:
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _sized(command: argparse.ArgumentParser, size_mb: int, tensors: int) -> None:
    command.add_argument("--size-mb", type=float, default=size_mb, help="of the weights")
    command.add_argument("--tensors", type=int, default=tensors)
    command.add_argument(
        "--warm-mb", type=int, default=3072, help="memory to write and free before measuring"
    )
    command.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help="leave a peer or model out"
    )


def _attach(options: argparse.Namespace) -> Outcome:
    from benchmarks import attach

    return attach.run(
        attach.Options(
            int(options.size_mb * 1e6),
            options.tensors,
            options.rounds,
            options.fresh_rounds,
            options.warm_mb << 20,
            options.skip,
        )
    )


def _memory(options: argparse.Namespace) -> Outcome:
    from benchmarks import memory

    return memory.run(
        memory.Options(
            int(options.size_mb * 1e6),
            options.tensors,
            options.workers,
            options.warm_mb << 20,
            options.skip,
        )
    )


def _death(options: argparse.Namespace) -> Outcome:
    from benchmarks import death

    return death.run(death.Options(options.kills, options.coordinator_kills))


def _start(options: argparse.Namespace) -> Outcome:
    from benchmarks import start

    return start.run(start.Options(options.starts, options.idle_seconds))


def _lock(options: argparse.Namespace) -> Outcome:
    from benchmarks import lock

    return lock.run(lock.Options(options.pairs, options.rounds))


def _scale(options: argparse.Namespace) -> Outcome:
    from benchmarks import scale

    return scale.run(
        scale.Options(
            options.clients, options.pairs, options.rounds, options.keys, options.sessions
        )
    )


def _swap(options: argparse.Namespace) -> Outcome:
    from benchmarks import swap

    return swap.run(
        swap.Options(
            int(options.size_mb * 1e6),
            options.tensors,
            options.rounds,
            options.constructions,
            options.warm_mb << 20,
        )
    )


def _restart(options: argparse.Namespace) -> Outcome:
    from benchmarks import restart

    return restart.run(
        restart.Options(
            int(options.size_mb * 1e6),
            options.tensors,
            options.rounds,
            options.warm_mb << 20,
            options.skip,
        )
    )


def _share(options: argparse.Namespace) -> Outcome:
    from benchmarks import share

    return share.run(
        share.Options(
            int(options.size_mb * 1e6),
            options.tensors,
            options.rounds,
            options.warm_mb << 20,
            options.skip,
        )
    )


def _pages(options: argparse.Namespace) -> Outcome:
    from benchmarks import pages

    return pages.run(
        pages.Options(
            int(options.size_mb * 1e6),
            options.tensors,
            options.rounds,
            options.fresh_rounds,
            options.warm_mb << 20,
        )
    )


def _fill(options: argparse.Namespace) -> Outcome:
    from benchmarks import fill

    return fill.run(
        fill.Options(
            size_bytes=int(options.size_mb * 1e6),
            tensors=options.tensors,
            rounds=options.rounds,
            cold_rounds=options.cold_rounds,
            crowd_bytes=int(options.crowd_mb * 1e6),
            workers=options.workers,
            warm_bytes=options.warm_mb << 20,
            skip=options.skip,
            folder=options.folder,
            disk_bytes_per_s=int(options.disk_mb_per_s * 1e6),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
