"""What must hold once two workers have worked: by the ledger, by the kernel, and by both alike."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.demo import kernel
from gpu_worker.demo.claims import Claims
from gpu_worker.demo.performance import Cast, Performance
from shm_store.report import GenerationReport

COPY_LIMIT = 1.02
"""How much of one copy both workers may take together, by what they map."""

GAIN = 1.5
"""How many times our memory plain loading takes at least, where weights are converted."""

_ROUNDING_BYTES = 2 * 1024 * 1024 + 128 * 1024
"""Pages of a segment that hold no weights: it is a whole number of huge pages, with a manifest."""


def check_answers(claims: Claims, plain: Performance, shared: Performance) -> None:
    """Claim that all answers are the same, to the last bit."""
    digests = [part.answered.digest for part in (*plain.parts, *shared.parts)]
    claims.check(
        f"{shared.key}: answers are bit-equal, in both processes, to those of plain loading",
        len(set(digests)) == 1,
        "sha256 " + ", ".join(digest[:12] for digest in digests),
    )


def check_one_copy(claims: Claims, cast: Cast, shared: Performance) -> None:
    """Claim that both workers use one copy, whoever is asked."""
    claims.check(
        f"{shared.key}: the ledger has one generation, with a lease for each worker",
        [held.generation for held in shared.held] == [shared.generation]
        and shared.parts[1].opened.generation == shared.generation
        and leases(shared.held) == cast.pids,
        describe(shared.held),
    )
    check_books(claims, cast, shared.key)
    _check_mapping(claims, cast, shared)
    _check_memory(claims, shared)


def check_books(claims: Claims, cast: Cast, when: str) -> None:
    """Claim that ledger and kernel count the same bytes."""
    ledger_bytes = sum(pool.in_use_bytes for pool in cast.operator.status().pools)
    kernel_bytes = sum(kernel.open_segments(cast.coordinator.pid).values())
    claims.check(
        f"{when}: the ledger's bytes are the kernel's",
        ledger_bytes == kernel_bytes > 0,
        f"ledger {ledger_bytes}, memfd blocks {kernel_bytes}",
    )


def check_gain(claims: Claims, plain: Performance, shared: Performance) -> None:
    """Claim that plain loading takes much more, where weights are converted at load."""
    gain = plain.row("").total_bytes / shared.row("").total_bytes
    claims.check(
        f"{shared.key}: plain loading takes at least {GAIN} times the memory",
        gain >= GAIN,
        f"{gain:.2f} times",
    )


def leases(held: Sequence[GenerationReport]) -> list[int]:
    """Return the pid of each lease on these generations."""
    return sorted(lease.pid for report in held for lease in report.leases)


def describe(held: Sequence[GenerationReport]) -> str:
    """Return who leases what, for people."""
    told = [f"{report.generation} leased by {leases([report])}" for report in held]
    return "generation " + ", ".join(told) if told else "no generation"


def _check_mapping(claims: Claims, cast: Cast, shared: Performance) -> None:
    owned = {
        segment
        for segment in kernel.open_segments(cast.coordinator.pid)
        if segment.generation == shared.generation
    }
    mapped = [kernel.mapped_segments(worker.pid) for worker in cast.workers]
    claims.check(
        f"{shared.key}: both workers map the very memfd that the coordinator holds",
        len(owned) == 1 and all(each == owned for each in mapped),
        f"coordinator {_inodes(owned)}, workers {[_inodes(each) for each in mapped]}",
    )


def _check_memory(claims: Claims, shared: Performance) -> None:
    size_bytes = shared.size_bytes
    memories = [part.memory for part in shared.parts]
    mapped_bytes = sum(memory.segment_bytes for memory in memories)
    private_bytes = [memory.private_bytes for memory in memories]
    claims.check(
        f"{shared.key}: together they take one copy in memory, and neither has one of its own",
        size_bytes - _ROUNDING_BYTES <= mapped_bytes <= COPY_LIMIT * size_bytes
        and all(each < size_bytes / 2 for each in private_bytes),
        f"{mapped_bytes} of {size_bytes} bytes mapped by PSS, private bytes {private_bytes}",
    )


def _inodes(segments: set[kernel.Segment]) -> str:
    return (
        ", ".join(f"{segment.generation} inode {segment.inode}" for segment in segments) or "none"
    )
