"""What the loader may take for itself, without the segment: a limit that the kernel keeps.

Note on what counts
fact: RLIMIT_DATA counts private writable mappings: the heap, stacks of threads, and a file that
is mapped privately, though it is never written to; not what is mapped to be read
consequence: torch maps a checkpoint privately, and then all of it counts
choice: the limit is raised by the size of what is mapped, just before
cost: until it is mapped, as much could be taken otherwise
"""

from __future__ import annotations

import resource

MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
"""Of a loader; see its note on what a header costs."""


def bound(limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
    """Have what would take more private memory than this fail with MemoryError."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def allow(more_bytes: int) -> None:
    """Raise the limit by so much, as far as our own parent lets us."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        bound(soft + more_bytes)
