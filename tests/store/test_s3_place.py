"""Which server a bucket is on: what botocore would find, said in one way."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from botocore.loaders import create_loader

from s3cache.errors import ConfigError
from s3cache.store import S3Options

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[default]
region = eu-west-1

[profile minio]
endpoint_url = https://minio.example

[profile "of services"]
services = ours

[services ours]
ec2 =
  endpoint_url = https://ec2.example
s3 =
  endpoint_url = https://s3.example
  addressing_style = path

[profile china]
region = cn-north-1
"""


@pytest.fixture(autouse=True)
def _configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "credentials"):
        (tmp_path / name).write_text("")
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for variable in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


@pytest.mark.parametrize(
    ("profile", "query"),
    [
        (None, ""),
        ("default", ""),
        ("minio", "?endpoint_url=https://minio.example"),
        ("of services", "?endpoint_url=https://s3.example"),
        ("china", "?region=cn-north-1"),
        ("nobody", ""),
    ],
)
def test_a_profile_says_where_a_bucket_is(
    profile: str | None, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert S3Options("bucket", profile=profile).identity == f"s3://bucket{query}"
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
        assert S3Options("bucket").identity == f"s3://bucket{query}"


DRAWN: dict[str, list[str]] = {
    "AWS_PROFILE": ["minio", "china"],
    "AWS_DEFAULT_PROFILE": ["of services", "china", "ignoring"],
    "AWS_REGION": ["cn-north-1", "us-east-1"],
    "AWS_DEFAULT_REGION": ["us-gov-west-1", "us-east-1"],
    "AWS_ENDPOINT_URL": ["https://all.example", "", "https://s3.cn-north-1.amazonaws.com.cn"],
    "AWS_ENDPOINT_URL_S3": ["https://variable.example", ""],
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": ["true", "True", "false", ""],
}


@pytest.mark.parametrize("seed", range(12))
def test_botocore_finds_the_same_server(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is set together: entries of two places that are taken for one would be trusted
    like each other."""
    import botocore.session

    ignoring = "ignore_configured_endpoint_urls = True\nendpoint_url = https://no.example\n"
    (tmp_path / "config").write_text(f"{CONFIG}\n[profile ignoring]\n{ignoring}")
    draw = random.Random(seed)
    for name, values in DRAWN.items():
        if draw.random() < 0.4:
            monkeypatch.setenv(name, draw.choice(values))
        else:
            monkeypatch.delenv(name, raising=False)
    profile = draw.choice([None, None, "minio", "ignoring"])
    region = draw.choice([None, None, "us-east-1", "cn-north-1"])
    client = botocore.session.Session(profile=profile).create_client(
        "s3", region_name=region, aws_access_key_id="a", aws_secret_access_key="b"
    )
    given = S3Options("bucket", endpoint_url=client.meta.endpoint_url)
    assert S3Options("bucket", profile=profile, region=region).identity == given.identity


@pytest.mark.parametrize(
    ("endpoint", "region", "query"),
    [
        ("https://s3.cn-north-1.amazonaws.com.cn", "us-east-1", "?region=cn-north-1"),
        ("https://s3.us-gov-west-1.amazonaws.com", "us-east-1", "?region=us-gov-west-1"),
        ("https://S3.eu-west-1.amazonaws.com:443/", "cn-north-1", ""),
        # The bucket's name is the first part of the path, whatever we call the bucket.
        (
            "https://s3.amazonaws.com/other",
            None,
            "?endpoint_url=https://s3.amazonaws.com/other",
        ),
        (
            "https://s3.amazonaws.com.evil.example",
            None,
            "?endpoint_url=https://s3.amazonaws.com.evil.example",
        ),
        ("https://s3.amazonaws.com:8443", None, "?endpoint_url=https://s3.amazonaws.com:8443"),
    ],
)
def test_an_endpoint_says_which_place_it_is(endpoint: str, region: str | None, query: str) -> None:
    found = S3Options("bucket", endpoint_url=endpoint, region=region)
    assert found.identity == f"s3://bucket{query}"


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    """Nor does anybody wait at a pipe: botocore passes it by too."""
    (tmp_path / "config").write_bytes(b"\xff[broken")
    (tmp_path / "credentials").unlink()
    os.mkfifo(tmp_path / "credentials")
    assert S3Options("bucket", profile="minio").identity == "s3://bucket"


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "a.localhost"])
def test_plain_http_stays_on_this_machine(host: str) -> None:
    assert S3Options("bucket", endpoint_url=f"http://{host}").url


@pytest.mark.parametrize("host", ["minio:9000", "10.0.0.1", "[fe80::1]:9000", "localhost.example"])
def test_plain_http_to_other_machines_has_to_be_allowed(host: str) -> None:
    endpoint = f"http://{host}"
    with pytest.raises(ConfigError, match="allow_http=true"):
        S3Options("bucket", endpoint_url=endpoint)
    assert "allow_http=true" in S3Options("bucket", endpoint_url=endpoint, allow_http=True).url
    assert S3Options("bucket", endpoint_url=endpoint, anonymous=True)
    with pytest.raises(ConfigError, match="allow_http=true"):
        S3Options("bucket", endpoint_url=endpoint, anonymous=True, sse="C", sse_c_key=bytes(32))


ELSEWHERE = "http://proxy.example:3128"


def test_by_a_proxy_elsewhere_plain_http_leaves_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """... with all that is signed, and the proxy's idea of this machine is its own."""
    endpoint = "http://localhost:9000"
    monkeypatch.setenv("HTTP_PROXY", "user:secret@proxy.example:3128")
    with pytest.raises(ConfigError, match="NO_PROXY"):
        S3Options("bucket", endpoint_url=endpoint)
    assert "allow_http=true" in S3Options("bucket", endpoint_url=endpoint, allow_http=True).url
    assert S3Options("bucket", endpoint_url=endpoint, anonymous=True)
    assert S3Options("bucket", endpoint_url="https://localhost:9000")
    monkeypatch.setenv("NO_PROXY", "localhost")
    with pytest.raises(ConfigError, match="NO_PROXY"):
        S3Options("bucket", endpoint_url=endpoint, proxy=ELSEWHERE)


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:3128", "localhost:3128", "http://[::1]:1"])
def test_a_proxy_on_this_machine_is_as_good_as_the_machine(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    assert S3Options("bucket", endpoint_url="http://localhost:9000")


@pytest.mark.parametrize(
    "no_proxy", ["", "*", "localhost", "localhost:9000", "127.0.0.1", ".localhost", "127.0.0.0/8"]
)
@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "minio.localhost", "[::1]:1"])
def test_botocore_finds_the_same_proxy(
    host: str, no_proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.utils import get_environ_proxies

    monkeypatch.setenv("HTTP_PROXY", ELSEWHERE)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    if get_environ_proxies(f"http://{host}"):
        with pytest.raises(ConfigError, match="NO_PROXY"):
            S3Options("bucket", endpoint_url=f"http://{host}")
    else:
        assert S3Options("bucket", endpoint_url=f"http://{host}")


def test_plain_http_that_the_environment_names_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    with pytest.raises(ConfigError, match="plain http"):
        S3Options("bucket")


def test_partitions_are_told_apart_as_botocore_tells_them() -> None:
    partitions = create_loader().load_data("partitions")["partitions"]
    places = [
        {
            S3Options("bucket", region=region).identity
            for region in partition["regions"]
            if "global" not in region
        }
        for partition in partitions
    ]
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == len(partitions) > 5
