"""What libraries raise, in our words: by status, by class, by the name of a class."""

from __future__ import annotations

import socket
import ssl

import pytest

from coordinator.remote_faults import EndedEarly, StatusRefused, described, passing
from shm_store.errors import (
    SourceChanged,
    SourceError,
    SourceNotOpened,
    SourceUnreachable,
    SourceUnsupported,
)

URL = "s3://user:S3cr3t@b/k?sig=S3cr3t"


def named(name: str, *bases: type[Exception], **facts) -> Exception:
    """An error of a library, by the name of its class."""
    error = type(name, bases or (Exception,), {})(f"it failed at {URL}")
    for fact, value in facts.items():
        setattr(error, fact, value)
    return error


def caused_by(cause: Exception, error: Exception | None = None) -> Exception:
    error = error or FileNotFoundError("as fsspec says whatever it was")
    error.__cause__ = cause
    return error


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


BOTO = {"ResponseMetadata": {"HTTPStatusCode": 403}}


@pytest.mark.parametrize(
    ("error", "kind", "text", "again"),
    [
        (StatusRefused(404), SourceNotOpened, "no such file", False),
        (StatusRefused(403), SourceNotOpened, "credentials", False),
        (StatusRefused(412), SourceChanged, "changed", False),
        (StatusRefused(429), SourceUnreachable, "the server fails", True),
        (StatusRefused(418), SourceError, "HTTP status 418", False),
        (EndedEarly("ended"), SourceUnreachable, "broke off", True),
        (ConnectionRefusedError(), SourceUnreachable, "refuses connections", True),
        (ConnectionResetError(), SourceUnreachable, "broke off", True),
        (TimeoutError(), SourceUnreachable, "in time", True),
        (socket.gaierror(socket.EAI_NONAME, "no"), SourceUnreachable, "no such host", False),
        (socket.gaierror(socket.EAI_AGAIN, "no"), SourceUnreachable, "no such host", True),
        (ssl.SSLCertVerificationError(1, "expired"), SourceUnreachable, "TLS", False),
        (ssl.SSLEOFError(8, "ended"), SourceUnreachable, "broke off", True),
        (PermissionError("no"), SourceNotOpened, "credentials", False),
        (FileNotFoundError("no"), SourceNotOpened, "no such file", False),
        (named("NoCredentialsError"), SourceNotOpened, "credentials", False),
        (named("DefaultCredentialsError"), SourceNotOpened, "credentials", False),
        (named("ClientError", response=BOTO), SourceNotOpened, "credentials", False),
        (named("HfHubHTTPError", response=Response(500)), SourceUnreachable, "fails", True),
        (named("HttpError", code=404), SourceNotOpened, "no such file", False),
        (named("ContentLengthError", code=400), SourceError, "ContentLengthError", True),
        (named("EndpointConnectionError"), SourceUnreachable, "broke off", True),
        (named("ReadTimeout"), SourceUnreachable, "in time", True),
        (ValueError("odd"), SourceError, "ValueError: odd", False),
        (ImportError("no", name="s3fs"), SourceUnsupported, "not installed", False),
        (caused_by(StatusRefused(403)), SourceNotOpened, "credentials", False),
        (caused_by(StatusRefused(503)), SourceUnreachable, "fails", True),
        (caused_by(ConnectionResetError()), SourceError, "", True),
    ],
)
def test_what_went_wrong_has_a_type_a_remedy_and_no_secret(error, kind, text, again):
    said = described(error, "s3://b/k", URL)
    assert type(said) is kind or (kind is SourceError and isinstance(said, kind))
    assert text in said.message and said.message.startswith("s3://b/k: ")
    assert said.remedy and getattr(said, "source", None) == "s3://b/k"
    assert "S3cr3t" not in str(said)
    assert passing(error) is again
