"""What people read of the figures."""

from __future__ import annotations

import pytest

from shm_store.report import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (20 * 1024**3, "20.0 GiB"),
        (1 << 50, "1.0 PiB"),
    ],
)
def test_sizes_are_binary_and_say_so(size: int, text: str) -> None:
    assert size_text(size) == text
