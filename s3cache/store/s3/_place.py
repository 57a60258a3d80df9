"""Which server a bucket is on, found without importing botocore.

As botocore finds it: an option, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, then what the
profile in use says (https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html).
Without any of these it is AWS: there a bucket's name is unique in a partition, whatever the region
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingBucket.html).
"""

from __future__ import annotations

import configparser
import ipaddress
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from urllib.parse import quote, urlsplit

from s3cache.errors import ConfigError, StoreError
from s3cache.store._deadline import DeadlineExecutor

__all__ = [
    "endpoint_in_use",
    "is_exposed",
    "partition_region",
    "place_query",
]

# S3 itself, in any region and by any of its names.
_AWS = re.compile(r"s3(-fips|-accelerate)?([.-]dualstack)?([.-][a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
# Partitions other than the commercial one, by how their regions begin, and one region of each.
_PARTITIONS = {
    "cn-": "cn-north-1",
    "us-gov-": "us-gov-west-1",
    "us-iso-": "us-iso-east-1",
    "us-isob-": "us-isob-east-1",
    "us-isof-": "us-isof-south-1",
    "eu-isoe-": "eu-isoe-west-1",
    "eusc-": "eusc-de-east-1",
}

# Those of people with a profile for each of a thousand accounts are smaller.
_MAX_FILE_BYTES = 4 << 20


def endpoint_in_use(endpoint_url: str | None, profile: str | None) -> str | None:
    """The server that requests will go to; ``None`` for AWS."""
    if endpoint_url is not None:
        return endpoint_url
    ignores = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    if ignores is None:
        ignores = next(_of_profile("ignore_configured_endpoint_urls", profile), "")
    if ignores.lower() == "true":
        return None
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return named or next(_of_profile("endpoint_url", profile), None)


def place_query(endpoint: str | None, region: str | None, profile: str | None) -> str:
    """The query of a URL that says which server it is, in one way; empty for AWS at large."""
    server = _canonical(endpoint) if endpoint else ""
    if server:
        return f"?endpoint_url={quote(server, safe=':/[]')}"
    if endpoint:  # is S3 itself, whatever region requests are signed for
        found = _region_in(endpoint)
    else:
        found = region or os.environ.get("AWS_DEFAULT_REGION") or ""
        found = found or next(_of_profile("region", profile), "")
    one = partition_region(found)
    return f"?region={one}" if one else ""


def partition_region(region: str) -> str:
    """One region, always the same, of the partition that ``region`` is in; empty for ``aws``."""
    return next((one for start, one in _PARTITIONS.items() if region.startswith(start)), "")


def is_exposed(endpoint: str | None, proxy: str | None = None) -> bool:
    """Whether what is sent there can be read on the way: by http, and not to this machine.

    What a proxy elsewhere is asked for goes there, and "this machine" is then that one.

    Args:
        proxy: as it was given to us; else botocore takes one from the environment.
    """
    if endpoint is None or urlsplit(endpoint).scheme != "http":
        return False
    if not _is_loopback(urlsplit(endpoint).hostname or ""):
        return True
    proxy = proxy or _proxy_of_environment(endpoint)
    return proxy is not None and not _is_loopback(_host_of(proxy))


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy_of_environment(endpoint: str) -> str | None:
    """The proxy by which botocore sends what goes to a server by http."""
    if sys.platform != "darwin" and "http_proxy" not in map(str.lower, os.environ):
        return None  # so urllib need not be imported
    from urllib.request import getproxies, proxy_bypass

    proxy = getproxies().get("http")
    return None if proxy is None or proxy_bypass(urlsplit(endpoint).netloc) else proxy


def _host_of(proxy: str) -> str:
    try:
        return urlsplit(proxy if "//" in proxy else f"//{proxy}").hostname or ""
    except ValueError:  # it cannot be used, which whoever uses it says
        return ""


def _canonical(url: str) -> str:
    """``scheme://host[:port][/path]`` in lower case; empty for S3 itself."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    default = {"http": 80, "https": 443}.get(parts.scheme)
    port = f":{parts.port}" if parts.port not in (None, default) else ""
    path = parts.path.rstrip("/")  # with one, the bucket's name is elsewhere: that is another one
    if _AWS.fullmatch(host) and parts.scheme == "https" and not port and not path:
        return ""
    if ":" in host:
        host = f"[{host}]"
    return f"{parts.scheme}://{host}{port}{path}"


def _region_in(endpoint: str | None) -> str:
    found = _AWS.fullmatch(urlsplit(endpoint or "").hostname or "")
    if found is None:
        return ""
    return "cn-" if found[4] else (found[3] or "")[1:]


# -- profiles: ~/.aws/config and ~/.aws/credentials


def _of_profile(option: str, profile: str | None) -> Iterator[str]:
    """What the profile in use says, first for S3 and then for all services."""
    # The order of these two is botocore's.
    name = profile or os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")
    config, keys = map(_sections, _profile_files())
    section = config.get(f"profile {name}" if name and name != "default" else "default", {})
    section = {**section, **keys.get(name or "default", {})}
    services = config.get(f"services {section.get('services')}", {})
    for line in services.get("s3", "").splitlines():  # nested: "s3 =\n  endpoint_url = ..."
        inner, _, value = line.partition("=")
        if inner.strip() == option and value.strip():
            yield value.strip()
    if option in section:
        yield section[option]


def _profile_files() -> tuple[str, str]:
    named = (
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
    )
    config, keys = (os.path.expanduser(os.path.expandvars(path)) for path in named)
    return config, keys


def _sections(path: str) -> Mapping[str, Mapping[str, str]]:
    """A file of settings; nothing where it cannot be read, which botocore will say.

    Raises:
        ConfigError: it is far larger than such a file is, or its file system hangs.
    """
    parser = configparser.RawConfigParser(strict=False, default_section="")
    try:
        parser.read_string(small_file(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    # 'profile "a b"' may be written with quotes.
    return {" ".join(name.replace('"', "").split()): dict(parser[name]) for name in parser}


# -- files


def small_file(path: str) -> bytes:
    """Return all that is in a file that is small by its nature.

    Raises:
        OSError: it cannot be read, or is no file.
        ConfigError: it is large, or its file system hangs.
    """
    executor = DeadlineExecutor.of(os.path.dirname(path))
    try:
        return executor.call(lambda: _read(path))
    except StoreError as exc:
        raise ConfigError(f"file {path}", f"cannot be read: {exc}", "mount it again") from None
    finally:
        executor.release()


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe has no writer perhaps
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no file")
        if status.st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"file {path}",
                f"has {status.st_size} bytes, more than the {_MAX_FILE_BYTES} that are read",
                "give the right one",
            )
        return file.read(_MAX_FILE_BYTES)
