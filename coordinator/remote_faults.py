"""What went wrong at a server, in our words: whether to try again, and what to tell people.

The libraries that read URLs raise what they like: here it is judged by its status, its class and
the classes and names of what caused it. Nothing of a URL's secrets gets into a message.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

from shm_store.errors import (
    SourceChanged,
    SourceError,
    SourceNotOpened,
    SourceUnreachable,
    SourceUnsupported,
    WeightCacheError,
)
from shm_store.url import PROTOCOLS, protocol_of, scrubbed

TEXT_LIMIT = 300

_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
_FORBIDDEN = frozenset((401, 403, 407))
_MISSING = frozenset((404, 410))

_CREDENTIALS = frozenset(
    (
        "CredentialRetrievalError",
        "DefaultCredentialsError",
        "GatedRepoError",
        "LocalTokenNotFoundError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "RefreshError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    )
)
_NOT_THERE = frozenset(
    (
        "EntryNotFoundError",
        "RemoteEntryNotFoundError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
    )
)
_TLS = frozenset(("ClientConnectorCertificateError", "ClientConnectorSSLError", "SSLError"))
_NO_NAME = frozenset(("ClientConnectorDNSError", "NameResolutionError"))
_BROKEN_OFF = frozenset(
    (
        "ChunkedEncodingError",
        "ClientOSError",
        "ClientPayloadError",
        "ConnectError",
        "ConnectionClosedError",
        "ContentLengthError",
        "EndpointConnectionError",
        "FSTimeoutError",
        "IncompleteReadError",
        "IncompleteRead",
        "NetworkError",
        "PayloadEncodingError",
        "ProtocolError",
        "ReadError",
        "ReadTimeoutError",
        "RemoteProtocolError",
        "ResponseStreamingError",
        "ServerDisconnectedError",
        "TransportError",
    )
)

_CREDENTIALS_REMEDY = {
    "http": "check the URL, or set credentials for its host in the coordinator's ~/.netrc",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the environment of "
    """the coordinator; for a public bucket, FSSPEC_S3='{"anon": true}'""",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS in the environment of the coordinator; for a public "
    """bucket, FSSPEC_GS='{"token": "anon"}'""",
    "hf": "set HF_TOKEN in the environment of the coordinator, or run `hf auth login` as its user; "
    "a gated model has to be accepted on its page",
    "": "set them in the environment of the coordinator",
}


class StatusRefused(Exception):
    """A server's answer that is none of those that carry bytes."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


class EndedEarly(Exception):
    """A server's answer ended before what it was to carry."""


def passing(error: BaseException) -> bool:
    """Say whether what went wrong may go right the next time."""
    if isinstance(error, WeightCacheError | MemoryError | ImportError):
        return False
    status = _status(error)
    if status:
        return status in _AGAIN
    if _named(error, _CREDENTIALS | _NOT_THERE) or _is_tls(error):
        return False
    if _no_name(error):
        return any(
            isinstance(found, socket.gaierror) and found.errno == socket.EAI_AGAIN
            for found in _chain(error)
        )
    return _broken_off(error)


def described(error: BaseException, name: str, url: str) -> WeightCacheError:
    """Return the typed error for what went wrong.

    Args:
        name: of the source, as it may be shown.
    """
    if isinstance(error, WeightCacheError):
        return error
    status = _status(error)
    why = f"HTTP status {status}" if status else ""
    extra = PROTOCOLS[protocol_of(url)]
    if isinstance(error, ImportError):
        return missing_package(error, name, url)
    if status in _FORBIDDEN or _named(error, _CREDENTIALS) or _has(error, PermissionError):
        return SourceNotOpened(
            f"{name}: the server refuses it to these credentials{_in_brackets(why, error)}",
            source=name,
            remedy=_CREDENTIALS_REMEDY[extra],
        )
    if status in _MISSING or _named(error, _NOT_THERE):
        return _not_there(name, extra, why)
    if status == 412:
        return SourceChanged(f"{name}: it changed while it was read", source=name)
    if _is_tls(error):
        return SourceUnreachable(
            f"{name}: TLS with the server failed{_in_brackets('', error)}",
            source=name,
            remedy="check its certificate; SSL_CERT_FILE in the environment of the coordinator "
            "names those to trust",
        )
    if _no_name(error):
        return SourceUnreachable(
            f"{name}: no such host, or no name server answers",
            source=name,
            remedy="check the host in the URL, and the network",
        )
    if _has(error, TimeoutError) or "Timeout" in type(error).__name__:
        return SourceUnreachable(f"{name}: the server does not answer in time", source=name)
    if _has(error, ConnectionRefusedError):
        return SourceUnreachable(f"{name}: the server refuses connections", source=name)
    if status in _AGAIN:
        return SourceUnreachable(f"{name}: the server fails ({why})", source=name)
    if _broken_off(error):
        return SourceUnreachable(
            f"{name}: the connection broke off{_in_brackets('', error)}", source=name
        )
    if _has(error, FileNotFoundError):  # last: fsspec says so whatever it was
        return _not_there(name, extra, why)
    return SourceError(
        f"{name}: reading it failed{_in_brackets(why, error)}",
        source=name,
        remedy="check the URL, and that the coordinator can read it",
    )


def missing_package(error: ImportError, name: str, url: str) -> SourceUnsupported:
    """Return the error for a protocol whose package is not installed."""
    protocol = protocol_of(url)
    extra = PROTOCOLS[protocol]
    package = f"'shm-weight-cache[{extra}]'" if extra else "adlfs"
    if protocol == "memory":
        package = "fsspec"
    missing = f" ({error.name})" if error.name else ""
    return SourceUnsupported(
        f"{name}: the package that reads {protocol}:// URLs is not installed{missing}",
        source=name,
        remedy=f"pip install {package}, where the coordinator runs",
    )


def _not_there(name: str, extra: str, why: str) -> SourceNotOpened:
    more = "; a private model is not found without HF_TOKEN" if extra == "hf" else ""
    return SourceNotOpened(
        f"{name}: no such file on the server{_in_brackets(why)}",
        source=name,
        remedy=f"check the URL{more}",
    )


def _in_brackets(why: str, error: BaseException | None = None) -> str:
    if not why and error is not None:
        text = " ".join(scrubbed(str(error)).split())[:TEXT_LIMIT]
        why = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f" ({why})" if why else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return it, and what caused it; not what it happened to follow, but for what hides it."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _status(error: BaseException) -> int:
    """Return the HTTP status that is behind it, or 0."""
    for found in _chain(error):
        if _is_named(found, _BROKEN_OFF):
            continue  # aiohttp's own name for it is 400
        answer = getattr(found, "response", None)
        places = (found, answer)
        for place in places:
            for attribute in ("status", "status_code", "code"):
                value = getattr(place, attribute, None)
                if type(value) is int and 400 <= value < 600:
                    return value
        if isinstance(answer, dict):  # as botocore has it
            value = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if type(value) is int and 400 <= value < 600:
                return value
    return 0


def _named(error: BaseException, names: frozenset[str]) -> bool:
    return any(_is_named(found, names) for found in _chain(error))


def _is_named(error: BaseException, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _has(error: BaseException, kind: type[BaseException]) -> bool:
    return any(isinstance(found, kind) for found in _chain(error))


def _is_tls(error: BaseException) -> bool:
    # An end without goodbye is a broken connection like any other.
    ended = ssl.SSLEOFError | ssl.SSLZeroReturnError
    return any(
        not isinstance(found, ended) and (isinstance(found, ssl.SSLError) or _is_named(found, _TLS))
        for found in _chain(error)
    )


def _no_name(error: BaseException) -> bool:
    return _has(error, socket.gaierror) or _named(error, _NO_NAME)


def _broken_off(error: BaseException) -> bool:
    return (
        _has(error, ConnectionError)
        or _has(error, TimeoutError)
        or _has(error, EndedEarly)
        or _has(error, ssl.SSLError)
        or _named(error, _BROKEN_OFF)
        or any("Timeout" in type(found).__name__ for found in _chain(error))
    )
