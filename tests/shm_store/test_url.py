"""Which URLs are read, and what is shown of one."""

import pytest

from shm_store.errors import SourceNotOpened, SourceUnsupported
from shm_store.url import beside, check_url, scrubbed, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/b.safetensors", "https://host/a/b.safetensors"),
        ("https://host:8080/a?X-Amz-Signature=s#f", "https://host:8080/a"),
        ("https://user:pass@host/a", "https://host/a"),
        ("https://token@host/a@b", "https://host/a@b"),
        ("https://user:p@ss@host/a", "https://host/a"),
        ("https://user:pa/ss@host/a", "https://..."),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
        ("HTTPS://u:p@host/a?q", "HTTPS://host/a"),
        ("hf://org/name@main/m.safetensors", "hf://org/name@main/m.safetensors"),
        ("hf://gpt2@main/m.safetensors", "hf://gpt2@main/m.safetensors"),
        ("hf://user:pass@org/name", "hf://org/name"),
        ("s3://key:secret@bucket/k#1?versionId=3", "s3://bucket/k#1"),
        ("abfs://container@account.dfs.core.windows.net/k", None),
        ("https://host/a\nb", "https://host/a?b"),
    ],
)
def test_a_url_is_shown_without_what_opens_it(url, shown):
    assert shown_url(url) == (shown or url)


def test_urls_in_the_texts_of_others_are_shown_so_too():
    text = "403, url='https://u:p@h/a?sig=1', and s3://b/k"
    assert scrubbed(text) == "403, url='https://h/a', and s3://b/k"


@pytest.mark.parametrize(
    "url",
    [
        "https://host/a b.safetensors",
        "http://[::1]:8000/a",
        "S3://bucket/key",
        "hf://org/name@main",
        "memory://a",
        "gs://b/k",
        "az://c/k",
    ],
)
def test_what_is_for_everybody_is_read(url):
    check_url(url)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("file:///etc/passwd", SourceUnsupported),
        ("local:///etc/passwd", SourceUnsupported),
        ("sftp://host/a", SourceUnsupported),
        ("zip://a::file:///b", SourceUnsupported),
        ("s3://a::file:///b", SourceUnsupported),
        ("https://h/a::file:///b", SourceUnsupported),
        ("https://", SourceNotOpened),
        ("https://h/a?" + 4000 * "s", SourceNotOpened),
        ("s3:///", SourceNotOpened),
        ("https://h/a\nb", SourceNotOpened),
    ],
)
def test_everything_else_is_refused(url, kind):
    with pytest.raises(kind):
        check_url(url)


def test_what_lies_beside_a_file_has_its_query():
    assert beside("https://h/a/i.json?t=a/b", "x%20y") == "https://h/a/x%20y?t=a/b"
    assert beside("s3://b/a#1/i.json", "x") == "s3://b/a#1/x"
