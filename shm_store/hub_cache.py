"""What Hugging Face's cache on this host has of a `hf://` URL, for who asks. Without its library.

Only what cannot differ from the Hub: a commit, which never changes. A branch means what it is on
the Hub now, unless HF_HUB_OFFLINE says not to ask there; then it is what it was when it was
downloaded. The cache is `$HF_HUB_CACHE`, else `$HF_HOME/hub`, and has

    models--ORG--NAME/refs/BRANCH          the commit, as text
    models--ORG--NAME/snapshots/COMMIT/    the files, or some of them
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_URL = re.compile(
    r"hf://(?:models/)?(?P<org>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<inside>.*))?",
    re.IGNORECASE | re.ASCII,
)
_KINDS = ("datasets", "spaces", "buckets", "kernels")
"""What else the Hub has, in the place of an organization."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_YES = ("1", "ON", "YES", "TRUE")


def cached(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a file, or of a folder, that the cache has of a URL, or None.

    Not all of a snapshot has to be there: what is missing shows when it is opened.
    """
    asked = _URL.fullmatch(url)
    if asked is None or asked["org"].lower() in _KINDS or ".." in url.split("/"):
        return None
    folder = os.path.join(_cache(environment), f"models--{asked['org']}--{asked['name']}")
    commit = asked["revision"] or "main"
    if not _COMMIT.fullmatch(commit):
        if environment.get("HF_HUB_OFFLINE", "").upper() not in _YES:
            return None
        try:
            with open(os.path.join(folder, "refs", commit), encoding="ascii") as file:
                commit = file.read(256).strip()
        except (OSError, ValueError):
            return None  # not downloaded
    place = os.path.join(folder, "snapshots", commit, asked["inside"] or "")
    return place if os.path.exists(place) else None


def _cache(environment: Mapping[str, str]) -> str:
    home = os.path.expanduser("~")
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    hub = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.expanduser(environment.get("HF_HUB_CACHE") or os.path.join(hub, "hub"))
