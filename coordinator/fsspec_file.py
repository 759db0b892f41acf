"""Files of what fsspec reads: object stores and the Hugging Face Hub.

Nothing of fsspec is imported before a URL is asked for: it takes a fifth of a second and up to
100 MiB. Credentials and options are what its libraries find in the environment of this process,
which is the coordinator's, and in fsspec's own configuration of it.
"""

from __future__ import annotations

from typing import Any

from coordinator.remote_faults import EndedEarly
from coordinator.remote_file import HEAD_BYTES, About, Sink
from shm_store.errors import SourceNotOpened, SourceUnsupported
from shm_store.url import protocol_of

CONNECT_S = 10
SILENCE_S = 20
"""A server that sends nothing for so long is asked again."""

_IDENTITY = (
    "ETag",
    "etag",
    "VersionId",
    "version_id",
    "generation",
    "md5Hash",
    "content_md5",
    "blob_id",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
"""What file systems call what changes with a file."""


def file_system(url: str) -> Any:
    """Return what reads a URL of an object store or the Hub.

    Raises:
        ImportError: the package that does is not installed.
    """
    import fsspec
    from fsspec.config import conf

    protocol = protocol_of(url)
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        known = dict(conf.get("s3", {}).get("config_kwargs", {}))
        # Trying again is done here, where what came already is known.
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_S,
            "read_timeout": SILENCE_S,
            "retries": {"max_attempts": 1},
            **known,
        }
    kind = fsspec.get_filesystem_class(protocol)
    fs = kind(**{**kind._get_kwargs_from_urls(url), **options})
    if protocol in ("s3", "s3a"):
        fs.retries = 1
    return fs


def path_in(fs: Any, url: str) -> str:
    """Return what a file system calls the place of a URL.

    A branch of the Hub is made the commit that it is now, so that all files are of one.
    """
    path = str(fs._strip_protocol(url))
    if protocol_of(url) != "hf":
        return path
    place = fs.resolve_path(path)
    repo_id = getattr(place, "repo_id", None)
    if repo_id is None:
        raise SourceUnsupported(
            f"{url}: no repository of models", source=url, remedy="write hf://org/name/file"
        )
    about = fs._api.repo_info(repo_id, revision=place.revision, repo_type=place.repo_type)
    folder = "" if place.repo_type == "model" else f"{place.repo_type}s/"
    inside = f"/{place.path_in_repo}" if place.path_in_repo else ""
    return f"{folder}{repo_id}@{about.sha}{inside}"


def is_folder(fs: Any, path: str) -> bool:
    """Say whether a place holds files, and is none."""
    return bool(fs.info(path)["type"] == "directory")


def names_in(fs: Any, path: str) -> list[str]:
    """Return the names of what lies in a folder."""
    found = fs.ls(path, detail=False)
    return [str(place).rstrip("/").rpartition("/")[2] for place in found]


class FsspecTransport:
    """Reads one file through a file system of fsspec, by `cat_file`."""

    step_bytes = 16 * 1024 * 1024
    streams = False

    def __init__(self, fs: Any, path: str, name: str) -> None:
        self._fs = fs
        self._path = path
        self._name = name
        self._options: dict[str, Any] = {}
        self._of_hub = fs.protocol == "hf"

    def open(self) -> tuple[About, bytes]:
        about = self.look()
        if self._of_hub:
            # What its files read ahead by themselves would be read twice.
            self._options = {"cache_type": "none", "block_size": 1, "size": about.size_bytes}
        head = self._cat(0, min(HEAD_BYTES, about.size_bytes)) if about.size_bytes else b""
        return about, head

    def look(self) -> About:
        if not self._of_hub:  # a commit does not change
            self._fs.invalidate_cache()
        info = self._fs.info(self._path)
        if info["type"] == "directory":
            raise SourceNotOpened(
                f"{self._name}: a folder, not a file",
                source=self._name,
                remedy="name the file in it",
            )
        size = info.get("size")
        if not isinstance(size, int):
            raise SourceUnsupported(
                f"{self._name}: the server does not say how large it is",
                source=self._name,
                remedy="download it, and name the file",
            )
        known = [(name, str(info[name])) for name in _IDENTITY if info.get(name) is not None]
        return About(size, str(known))

    def fetch(self, start: int, end: int, sink: Sink) -> None:
        data = self._cat(start, end)
        if data:
            sink(start, data)

    def _cat(self, start: int, end: int) -> bytes:
        data: bytes = self._fs.cat_file(self._path, start=start, end=end, **self._options)
        if len(data) > end - start:
            raise EndedEarly(f"{len(data)} bytes came for {end - start}")
        return data
