"""The Hugging Face Hub as a loader sees it: one model, in a web server of the test's own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from tests.coordinator.web_server import Web, serving

SHA = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(repo: str, files: dict[str, bytes], revision: str = "main") -> Iterator[Web]:
    """Serve `files` as those of `repo` at a revision, for the length of a block."""
    about = {
        "id": repo,
        "modelId": repo,
        "sha": SHA,
        "private": False,
        "tags": [],
        "downloads": 0,
        "siblings": [{"rfilename": name} for name in files],
    }
    tree = [
        {"type": "file", "path": name, "size": len(data), "oid": f"{number:040x}"}
        for number, (name, data) in enumerate(files.items())
    ]
    said = json.dumps(about).encode()
    with serving() as web:
        web.files = {
            f"/api/models/{repo}": said,
            f"/api/models/{repo}/revision/{revision}": said,
            f"/api/models/{repo}/revision/{SHA}": said,
            f"/api/models/{repo}/tree/{SHA}": json.dumps(tree).encode(),
            **{f"/{repo}/resolve/{SHA}/{name}": data for name, data in files.items()},
        }
        yield web
