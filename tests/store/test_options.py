"""Store URLs and options: their sources, the server that they name, and errors for mistakes."""

from __future__ import annotations

import base64
import traceback
from pathlib import Path
from typing import Any

import pytest

from s3cache.errors import ConfigError
from s3cache.store import FileLocation, MemoryLocation, S3Options, open_store, parse_url

CONFIG = """
[default]
region = eu-west-1

[profile minio]
endpoint_url = https://minio.example

[profile services]
services = ours

[services ours]
ec2 =
  endpoint_url = https://ec2.example
s3 =
  endpoint_url = https://s3.example
  addressing_style = path
"""
HTTP_HERE = "http://localhost:9000"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: None) -> Path:
    path = tmp_path / "config"
    path.write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return path


def s3(url: str, **options: Any) -> S3Options:
    location = parse_url(url, **options)
    assert isinstance(location, S3Options)
    return location


def test_a_url_has_place_and_options() -> None:
    texts: dict[str, Any] = {"endpoint_url": "https://h:9000", "addressing_style": "path"}
    texts |= {"region": "r", "sse": "aws:kms", "sse_kms_key_id": "k", "request_payer": "requester"}
    url = f"s3://my-bucket/a/b%20c/?{'&'.join(f'{name}={text}' for name, text in texts.items())}"
    others: dict[str, Any] = {"part_bytes": 1_000_000, "read_timeout_s": 1.5, "anonymous": True}
    options = s3(f"{url}&part_bytes=1MB&read_timeout_s=1.5&anonymous=true")
    assert options == S3Options("my-bucket", "a/b c", **texts, **others)
    assert parse_url("file:///a/b%20c/?create=false") == FileLocation("/a/b c", create=False)
    assert parse_url("file:///a") == FileLocation("/a", create=True)
    assert parse_url("memory://x") == MemoryLocation("x")
    assert open_store("memory://x") is open_store("memory://x")
    assert open_store("memory://x") is not open_store("memory://y")


def test_an_argument_wins_over_the_url_and_that_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None and an empty variable mean not given."""
    monkeypatch.setenv("S3CACHE_REGION", "")
    assert s3("s3://Bucket?profile=p", profile=None) == S3Options("Bucket", profile="p")
    monkeypatch.setenv("S3CACHE_REGION", "from-environment")
    monkeypatch.setenv("S3CACHE_PROFILE", "from-environment")
    monkeypatch.setenv("S3CACHE_MAX_POOL_CONNECTIONS", "7")
    options = s3("s3://bucket?region=from-url&profile=from-url", region="from-argument")
    assert (options.region, options.profile) == ("from-argument", "from-url")
    assert options.max_pool_connections == 7
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
    ("given", "message"),
    [
        ("s3a://bucket", "did you mean 's3'?"),
        ("http://bucket", "use s3://bucket/prefix"),
        ("s3://", "names no bucket"),
        ("s3://b", "not a bucket name"),
        ("s3://bucket/a//b", "empty path segment"),
        ("s3://bucket/a/../b", "'..' segment"),
        ("s3://bucket/a#b", "%23"),
        (f"s3://bucket/{'p' * 826}", "use a shorter one"),
        ("file://relative/path", "three slashes"),
        ("file:///a?region=x", "not known"),
        ("memory://x?region=x", "takes no options"),
        ("?ca_bundle=/no/such/ca.pem", "'/no/such/ca.pem', which does not exist; give"),
        ("?regoin=x", "did you mean 'region'?"),
        ("?zzz=x", "use one of addressing_style"),
        ("?prefix=x", "not known"),
        ("?region=", "no value"),
        ("?region=a&region=b", "twice"),
        ("?addressing_style=paht", "did you mean 'path'?"),
        ("?part_bytes=16mebi", "not a size"),
        ("?part_bytes=0", "out of range"),
        ("?read_timeout_s=soon", "not a number"),
        ("?anonymous=maybe", "use true or false"),
        ("?endpoint_url=localhost:9000", "http://host:port"),
        ("?sse=C", "S3CACHE_SSE_C_KEY"),
        ("?sse_kms_key_id=x", "add sse=aws:kms"),
        ({"access_key": "a"}, "give both or neither"),
        ({"session_token": "a"}, "without keys"),
        ({"access_key": "a", "secret_key": "b", "anonymous": True}, "contradicts"),
        ({"sse": "C", "sse_c_key": b"short"}, "5 bytes long, not 32"),
        ({"sse": "C", "sse_c_key": "not base64!"}, "not base64"),
        ({"region": 5}, "is a int"),
        ({"regoin": "x"}, "did you mean 'region'?"),
    ],
)
def test_mistakes_are_named_with_a_fix(given: str | dict[str, Any], message: str) -> None:
    """A mistake in a URL, in the options of a bucket's URL, or in arguments."""
    options = given if isinstance(given, dict) else {}
    url = given if isinstance(given, str) and "://" in given[:10] else f"s3://bucket{given}"
    with pytest.raises(ConfigError) as caught:
        parse_url("s3://bucket" if options else url, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://bucket/p", "s3://bucket/p/?region=eu-west-1&part_bytes=5&storage_class=STANDARD"),
        ("s3://bucket/a%25b%20c/d?endpoint_url=http://[::1]:9000", ""),
        ("s3://bucket?endpoint_url=https://h", "s3://bucket?endpoint_url=https://H//&profile=x"),
        ("s3://bucket?endpoint_url=https://h", "s3://bucket?endpoint_url=HTTPS://h:443/"),
        ("file:///a/b", "file://localhost/a/b/?create=false"),
        ("file:///a%20b", ""),
        ("memory://x", ""),
    ],
)
def test_a_place_has_one_identity_which_is_a_url_of_it(one: str, other: str) -> None:
    """The local tier keeps the entries of different remotes apart."""
    identity = parse_url(one).identity
    assert parse_url(other or one).identity == parse_url(identity).identity == identity


def test_different_places_and_encryptions_have_different_identities() -> None:
    of_buckets = """
        s3://bucket
        s3://bucket/p
        s3://bucket2/p
        s3://bucket/p?endpoint_url=http://127.0.0.1:9000
        s3://bucket/p?endpoint_url=http://127.0.0.1:9001
        s3://bucket/p?endpoint_url=https://h
        s3://bucket/p?endpoint_url=https://h:9000
        s3://bucket/p?sse=AES256
        s3://bucket/p?sse=aws:kms
        s3://bucket/p?sse=aws:kms&sse_kms_key_id=k
    """
    urls = [*of_buckets.split(), "file:///bucket/p", "memory://bucket/p"]
    places = {parse_url(url).identity for url in urls}
    for byte in (0, 1):
        places.add(parse_url("s3://bucket/p?sse=C", sse_c_key=bytes([byte] * 32)).identity)
    assert len(places) == len(urls) + 2


# -- the server of a bucket


@pytest.mark.parametrize(
    ("profile", "query"),
    [
        (None, ""),
        ("default", ""),
        ("minio", "?endpoint_url=https://minio.example"),
        ("services", "?endpoint_url=https://s3.example"),
        ("absent", ""),
    ],
)
def test_a_profile_names_the_server_of_a_bucket(
    profile: str | None, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert S3Options("bucket", profile=profile).identity == f"s3://bucket{query}"
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
        assert S3Options("bucket").identity == f"s3://bucket{query}"


def test_variables_win_over_the_profile_and_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://all.example")
    assert S3Options("bucket", profile="minio").endpoint == "https://all.example"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example")
    assert S3Options("bucket").endpoint == "https://s3.example"
    assert S3Options("bucket", endpoint_url="https://own").endpoint == "https://own"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert S3Options("bucket", profile="minio").endpoint is None


def test_an_unreadable_config_file_is_ignored(config: Path) -> None:
    config.write_bytes(b"\xff[broken")
    assert S3Options("bucket", profile="minio").identity == "s3://bucket"


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "a.localhost"])
def test_plain_http_to_this_machine_is_allowed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a proxy on this machine."""
    assert S3Options("bucket", endpoint_url=f"http://{host}").url
    for proxy in ("http://127.0.0.1:3128", "localhost:3128", "http://[::1]:1"):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        assert S3Options("bucket", endpoint_url=HTTP_HERE)


def needs_allow_http(endpoint: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        S3Options("bucket", endpoint_url=endpoint)
    assert "allow_http=true" in S3Options("bucket", endpoint_url=endpoint, allow_http=True).url
    assert S3Options("bucket", endpoint_url=endpoint, anonymous=True)


@pytest.mark.parametrize("host", ["minio:9000", "10.0.0.1", "[fe80::1]:9000", "localhost.example"])
def test_plain_http_to_other_machines_needs_allow_http(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"http://{host}"
    needs_allow_http(endpoint, "allow_http=true")
    with pytest.raises(ConfigError, match="allow_http=true"):
        S3Options("bucket", endpoint_url=endpoint, anonymous=True, sse="C", sse_c_key=bytes(32))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match="plain http"):
        S3Options("bucket")


def test_plain_http_by_a_proxy_elsewhere_needs_allow_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy sees all signed requests, and takes localhost for itself."""
    monkeypatch.setenv("HTTP_PROXY", "user:secret@proxy.example:3128")
    needs_allow_http(HTTP_HERE, "NO_PROXY")
    assert S3Options("bucket", endpoint_url="https://localhost:9000")
    monkeypatch.setenv("NO_PROXY", "localhost")
    with pytest.raises(ConfigError, match="NO_PROXY"):
        S3Options("bucket", endpoint_url=HTTP_HERE, proxy="http://proxy.example:3128")


@pytest.mark.parametrize("no_proxy_for", ["", "*", "localhost", "localhost:9000", ".localhost"])
def test_botocore_finds_the_same_proxy(no_proxy_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.utils import get_environ_proxies

    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy_for)
    for host in ("localhost:9000", "127.0.0.1:9000", "minio.localhost", "[::1]:1"):
        if get_environ_proxies(f"http://{host}"):
            with pytest.raises(ConfigError, match="NO_PROXY"):
                S3Options("bucket", endpoint_url=f"http://{host}")
        else:
            assert S3Options("bucket", endpoint_url=f"http://{host}")


def test_a_path_is_not_a_url() -> None:
    with pytest.raises(ConfigError, match="has no scheme; use s3://"):
        parse_url("/shared/cache")


def test_the_bundle_of_certificates_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=r"option ca_bundle.*does not exist; give the path"):
        S3Options("bucket", ca_bundle=str(bundle))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE.*does not exist"):
        S3Options("bucket")
    assert S3Options("bucket", endpoint_url="http://localhost:9000")  # no certificates are used
    bundle.touch()
    assert S3Options("bucket", ca_bundle=str(bundle))
