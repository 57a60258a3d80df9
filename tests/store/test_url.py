"""Store URLs: their options, the precedence of sources, and the errors for mistakes."""

from __future__ import annotations

import base64
import traceback
from typing import Any

import pytest

from s3cache.errors import ConfigError
from s3cache.store import (
    FileLocation,
    MemoryLocation,
    S3Options,
    open_store,
    parse_url,
)


def s3(url: str, **options: Any) -> S3Options:
    location = parse_url(url, **options)
    assert isinstance(location, S3Options)
    return location


def test_s3_url() -> None:
    options = s3(
        "s3://my-bucket/a/b%20c/?endpoint_url=https://h:9000&region=r&addressing_style=path"
        "&sse=aws:kms&sse_kms_key_id=k&part_bytes=1MB&read_timeout_s=1.5&anonymous=true"
        "&request_payer=requester&conditional_create=check"
    )
    assert options == S3Options(
        "my-bucket",
        "a/b c",
        endpoint_url="https://h:9000",
        region="r",
        addressing_style="path",
        sse="aws:kms",
        sse_kms_key_id="k",
        part_bytes=1_000_000,
        read_timeout_s=1.5,
        anonymous=True,
        request_payer="requester",
        conditional_create="check",
    )


def test_file_url() -> None:
    assert parse_url("file:///a/b%20c/?create=false") == FileLocation("/a/b c", create=False)
    assert parse_url("file:///a") == FileLocation("/a", create=True)


def test_memory_url_names_one_store() -> None:
    assert parse_url("memory://x") == MemoryLocation("x")
    assert open_store("memory://x") is open_store("memory://x")
    assert open_store("memory://x") is not open_store("memory://y")


def test_argument_wins_over_url_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_REGION", "from-environment")
    monkeypatch.setenv("S3CACHE_PROFILE", "from-environment")
    monkeypatch.setenv("S3CACHE_MAX_POOL_CONNECTIONS", "7")
    options = s3("s3://bucket?region=from-url&profile=from-url", region="from-argument")
    assert options.region == "from-argument"
    assert options.profile == "from-url"
    assert options.max_pool_connections == 7


def test_none_and_an_empty_variable_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_REGION", "")
    assert s3("s3://Bucket?profile=p", profile=None) == S3Options("Bucket", profile="p")
    monkeypatch.setenv("S3CACHE_SSE", "maybe")
    with pytest.raises(ConfigError, match="environment variable S3CACHE_SSE"):
        parse_url("s3://bucket")


def test_secrets_come_from_the_environment_and_are_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = bytes(range(32))
    monkeypatch.setenv("S3CACHE_SSE_C_KEY", base64.b64encode(key).decode())
    monkeypatch.setenv("S3CACHE_ACCESS_KEY", "AKIATEST")
    monkeypatch.setenv("S3CACHE_SECRET_KEY", "hidden-1")
    monkeypatch.setenv("S3CACHE_SESSION_TOKEN", "hidden-2")
    options = s3("s3://bucket?sse=C", proxy="http://user:hidden-3@proxy:3128")
    assert options.sse_c_key == key
    assert (options.access_key, options.secret_key) == ("AKIATEST", "hidden-1")
    shown = repr(options) + options.url + options.identity
    assert "hidden" not in shown
    assert "AKIATEST" not in shown
    assert repr(key)[2:20] not in shown


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:very-secret@bucket/p",
        "s3://bucket?access_key=very-secret",
        "s3://bucket?secret_key=very-secret",
        "s3://bucket?aws_secret_access_key=very-secret",
        "s3://bucket?password=very-secret",
        "s3://bucket?endpoint_url=http://u:very-secret@host",
        "s3://bucket?proxy=http://u:very-secret@host",
        "s3://bucket?bogus=very-secret",
        "s3://a:very-secret@[bad",
        "s3://AKIA:12/very-secret@bucket/p",
        "s3://AKIA:very-secret/part@bucket/p",
        "s3://user:very-secret\u2100@bucket",
        "very-secret@bucket",
        "s3:user:very-secret@bucket",
        "s3://bucket//user:very-secret@x",
        "s3://bucket/user:very-secret@x?nonsense=1",
        "file://host/user:very-secret@x",
        "https://user:very-secret@host/bucket",
        "s3://bucket/x?proxy=http%3A%2F%2Fuser%3Avery-secret%40host",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "very-secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3a://bucket", "did you mean 's3'?"),
        ("/shared/cache", "has no scheme; use s3://"),
        ("http://bucket", "use s3://bucket/prefix"),
        ("s3://", "names no bucket"),
        ("s3://b", "not a bucket name"),
        ("s3://bucket/a//b", "empty path segment"),
        ("s3://bucket/a/../b", "'..' segment"),
        ("s3://bucket/a#b", "%23"),
        (f"s3://bucket/{'p' * 826}", "use a shorter one"),
        ("s3://bucket?ca_bundle=/no/such/ca.pem", "'/no/such/ca.pem', which does not exist; give"),
        ("s3://bucket?regoin=x", "did you mean 'region'?"),
        ("s3://bucket?zzz=x", "use one of addressing_style"),
        ("s3://bucket?prefix=x", "not known"),
        ("s3://bucket?region=", "no value"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?addressing_style=paht", "did you mean 'path'?"),
        ("s3://bucket?part_bytes=16mebi", "not a size"),
        ("s3://bucket?part_bytes=0", "out of range"),
        ("s3://bucket?read_timeout_s=soon", "not a number"),
        ("s3://bucket?anonymous=maybe", "use true or false"),
        ("s3://bucket?endpoint_url=localhost:9000", "http://host:port"),
        ("s3://bucket?sse=C", "S3CACHE_SSE_C_KEY"),
        ("s3://bucket?sse_kms_key_id=x", "add sse=aws:kms"),
        ("file://relative/path", "three slashes"),
        ("file:///a?region=x", "not known"),
        ("memory://x?region=x", "takes no options"),
    ],
)
def test_mistakes_are_named_with_a_fix(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"access_key": "a"}, "give both or neither"),
        ({"session_token": "a"}, "without keys"),
        ({"access_key": "a", "secret_key": "b", "anonymous": True}, "contradicts"),
        ({"sse": "C", "sse_c_key": b"short"}, "5 bytes long, not 32"),
        ({"sse": "C", "sse_c_key": "not base64!"}, "not base64"),
        ({"region": 5}, "is a int"),
        ({"regoin": "x"}, "did you mean 'region'?"),
    ],
)
def test_mistakes_in_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("s3://bucket", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://bucket/p", "s3://bucket/p/?region=eu-west-1&part_bytes=5&storage_class=STANDARD"),
        ("s3://bucket?endpoint_url=https://h", "s3://bucket?endpoint_url=https://h/&profile=x"),
        ("file:///a/b", "file://localhost/a/b/?create=false"),
    ],
)
def test_one_place_has_one_identity(one: str, other: str) -> None:
    assert parse_url(one).identity == parse_url(other).identity


def test_different_places_and_encryptions_have_different_identities() -> None:
    urls = [
        "s3://bucket",
        "s3://bucket/p",
        "s3://bucket2/p",
        "s3://bucket/p?endpoint_url=http://127.0.0.1:9000",
        "s3://bucket/p?endpoint_url=http://127.0.0.1:9001",
        "s3://bucket/p?endpoint_url=https://h:9000",
        "s3://bucket/p?sse=AES256",
        "s3://bucket/p?sse=aws:kms",
        "s3://bucket/p?sse=aws:kms&sse_kms_key_id=k",
        "file:///bucket/p",
        "memory://bucket/p",
    ]
    places = {parse_url(url).identity for url in urls}
    for byte in (0, 1):
        places.add(parse_url("s3://bucket/p?sse=C", sse_c_key=bytes([byte] * 32)).identity)
    assert len(places) == len(urls) + 2


@pytest.mark.parametrize(
    "url", ["s3://bucket/a%25b%20c/d?endpoint_url=http://[::1]:9000", "file:///a%20b", "memory://x"]
)
def test_identity_is_a_url_of_the_same_place(url: str) -> None:
    assert parse_url(parse_url(url).identity).identity == parse_url(url).identity


@pytest.mark.parametrize(
    "endpoint", ["https://MinIO.example", "HTTPS://minio.example:443/", "https://minio.example//"]
)
def test_the_spelling_of_a_server_makes_no_difference(endpoint: str) -> None:
    """The local tier keeps the entries of different remotes apart."""
    wanted = "s3://bucket?endpoint_url=https://minio.example"
    assert parse_url("s3://bucket", endpoint_url=endpoint).identity == wanted
    assert parse_url(f"{wanted}:9000").identity != wanted
