"""A socket path for each test, and peers that are closed after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Peer


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "c.sock")


@pytest.fixture(autouse=True)
def _peers_closed() -> Iterator[None]:
    yield
    Peer.close_all()
