"""How people write sizes."""

from __future__ import annotations

import pytest

from shm_store.errors import ArgumentRefused
from shm_store.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1000", 1000),
        ("7B", 7),
        ("20GiB", 20 << 30),
        ("20 gib", 20 << 30),
        (" 512MB\n", 512_000_000),
        ("1.5GiB", 3 << 29),
        ("0.1KB", 100),
        ("1024TiB", 1 << 50),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "0", "-1", "nan", "1e9", "1.", ".5", "20G", "1025TiB", "٣", "9" * 5000]
)
def test_absurd_sizes_are_refused(text: str) -> None:
    """With a remedy, and without repeating a novel."""
    with pytest.raises(ArgumentRefused) as caught:
        parse_size(text)
    assert caught.value.remedy and len(str(caught.value)) < 200
