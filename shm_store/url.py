"""URLs that checkpoints are read from: which are, and what of one may be shown. Pure.

The loader opens them, with the coordinator's permissions and not the asker's. So there is a list
of what it opens: what lies elsewhere, for everybody who has the credentials. None of it reaches a
file of this host, a process of it, or another protocol through a chain (`zip::file://`).
"""

from __future__ import annotations

import re

from shm_store.errors import SourceNotOpened, SourceUnsupported

PROTOCOLS = {
    "http": "http",
    "https": "http",
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "hf": "hf",
    "az": "",
    "abfs": "",
    "abfss": "",
    "memory": "",
}
"""What is read, and the extra of this package that brings what reads it, if one does."""

URL_LIMIT = 4000
"""A longer one would not be sent whole."""

WEB = ("http", "https")

_AT_IN_NAMES = ("hf", "az", "abfs", "abfss")
"""Where what stands before an @ names something: `name@revision`, `container@account`."""

_SITE = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:@\[\]\s]*)(:[0-9]*)?")
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


def protocol_of(url: str) -> str:
    """Return the protocol of a URL, in small letters."""
    return url.partition("://")[0].lower()


def check_url(url: str) -> None:
    """Refuse what no loader opens.

    Raises:
        SourceUnsupported: its protocol is none that is read.
        SourceNotOpened: it names nothing, or is no URL.
    """
    protocol, rest = protocol_of(url), url.partition("://")[2]
    name = shown_url(url)
    if protocol not in PROTOCOLS:
        raise SourceUnsupported(
            f"{name}: checkpoints are not read from {protocol}:// URLs",
            source=name,
            remedy="use https, hf, s3, gs or az, or the path of a file",
        )
    if "::" in (rest.partition("/")[2] if protocol in WEB else rest):
        raise SourceUnsupported(
            f"{name}: a chain of protocols, which is not read",
            source=name,
            remedy="name the file itself",
        )
    if len(url) > URL_LIMIT:
        raise SourceNotOpened(
            f"{name[:200]}...: {len(url)} characters are too many for a URL",
            source=name[:200],
            remedy=f"write at most {URL_LIMIT}",
        )
    if not rest.strip("/") or not url.isprintable():
        raise SourceNotOpened(
            f"{name}: names no file", source=name, remedy="write it as protocol://place/file"
        )


def shown_url(url: str) -> str:
    """Return a URL as people and logs may see it: without user, password, query and fragment.

    The query of a signed URL lets whoever reads it have the file.
    """
    protocol, joined, rest = url.partition("://")
    web = protocol.lower() in WEB
    rest = re.split("[?#]" if web else "[?]", rest, maxsplit=1)[0]
    site, slash, path = rest.partition("/")
    user, _, host = site.rpartition("@")
    if protocol.lower() not in _AT_IN_NAMES or ":" in user:
        site = host
    if web and not _SITE.fullmatch(site):
        # A password with a slash in it would stand in the path.
        return f"{protocol}://..."
    shown = protocol + joined + site + slash + path
    return "".join(letter if letter.isprintable() else "?" for letter in shown)


def scrubbed(text: str) -> str:
    """Return a text of somebody else's with its URLs as they may be shown."""
    return _ANY_URL.sub(lambda found: shown_url(found.group()), text)


def beside(url: str, name: str) -> str:
    """Return the URL of a file in the folder of another one's, with the same query.

    Args:
        name: for the web, quoted.
    """
    cut = re.search("[?#]" if protocol_of(url) in WEB else "[?]", url)
    path, query = (url[: cut.start()], url[cut.start() :]) if cut else (url, "")
    return f"{path.rpartition('/')[0]}/{name}{query}"
