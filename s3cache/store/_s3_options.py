"""Options of an S3 store, and which server they lead to, found without importing botocore.

botocore takes 0.5 s to import, with the GIL held; only opening a client does that. The server is
found as botocore finds it: an option, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, the profile in
use (https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html). Without any of
these it is AWS, where a bucket's name is unique in a partition, whatever the region
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingBucket.html).
"""

from __future__ import annotations

import configparser
import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict, get_args
from urllib.parse import quote, urlsplit

from s3cache.errors import ConfigError
from s3cache.store._base import MAX_KEY_BYTES
from s3cache.util import options as _options
from s3cache.util.options import FLAG, KEY, choice, count, option, seconds, size

AddressingStyle: TypeAlias = Literal["auto", "path", "virtual"]
Encryption: TypeAlias = Literal["none", "AES256", "aws:kms", "aws:kms:dsse", "C"]
ConditionalCreate: TypeAlias = Literal["auto", "native", "check"]

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_BYTES = 5 * 2**20
_MAX_PUT_BYTES = 5 * 2**30
# prefix, "/" and key share the 1,024 bytes of an S3 key
_MAX_PREFIX_BYTES = 1024 - 1 - MAX_KEY_BYTES

# Never in a URL (they end up in logs, tickets and process lists), never in a repr.
SECRETS = frozenset({"access_key", "secret_key", "session_token", "sse_c_key"})
# Laxer than AWS's own rules, which Ceph and MinIO can be configured to relax.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
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


@dataclass(frozen=True, slots=True)
class S3Options:
    """Say where an S3 store is and how to talk to it; see docs/configuration.md.

    What is ``None`` is left to botocore's own chain: ``AWS_*`` variables, ``~/.aws/config``,
    web identity, SSO, container and instance metadata.

    Raises:
        ConfigError: a value cannot be used, or two contradict each other.
    """

    bucket: str = option()
    prefix: str = option("")
    _: KW_ONLY
    endpoint_url: str | None = option(None)
    region: str | None = option(None)
    addressing_style: AddressingStyle = option("auto", choice(*get_args(AddressingStyle)))
    profile: str | None = option(None)
    sse: Encryption = option("none", choice(*get_args(Encryption)))
    sse_kms_key_id: str | None = option(None)
    sse_c_key: bytes | None = option(None, KEY, secret=True)
    storage_class: str | None = option(None)
    request_payer: Literal["requester"] | None = option(None, choice("requester"))
    ca_bundle: str | None = option(None)
    proxy: str | None = option(None, secret=True)
    connect_timeout_s: float = option(5.0, seconds(0.001, 3600))
    read_timeout_s: float = option(30.0, seconds(0.001, 3600))
    max_pool_connections: int = option(32, count(10_000))
    part_bytes: int = option(16 << 20, size(1, _MAX_PUT_BYTES))
    multipart_bytes: int = option(64 << 20, size(MIN_PART_BYTES, _MAX_PUT_BYTES))
    max_object_bytes: int = option(4 << 30, size(1, 5 << 40))
    conditional_create: ConditionalCreate = option("auto", choice(*get_args(ConditionalCreate)))
    anonymous: bool = option(False, FLAG)
    allow_http: bool = option(False, FLAG)
    access_key: str | None = option(None, secret=True)
    secret_key: str | None = option(None, secret=True)
    session_token: str | None = option(None, secret=True)

    def __post_init__(self) -> None:
        _options.check(self)
        _check_place(self)
        _check_together(self)

    @property
    def endpoint(self) -> str | None:
        """Return the server that requests will go to, or None for AWS."""
        if self.endpoint_url is not None:
            return self.endpoint_url
        ignores = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
        if ignores is None:
            ignores = _from_profile("ignore_configured_endpoint_urls", self.profile)
        if ignores.lower() == "true":
            return None
        named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return named or _from_profile("endpoint_url", self.profile) or None

    @property
    def identity(self) -> str:
        """Return where the bytes are, as one canonical URL for all spellings of the place.

        It has server (of AWS, the partition), bucket and prefix, and names what is kept locally.
        """
        place = f"s3://{self.bucket}/{quote(self.prefix)}".rstrip("/")
        return place + _server_query(self)

    @property
    def url(self) -> str:
        """Return the identity with ``allow_http`` where it is needed, for ``parse_url``."""
        exposed = _is_exposed(self.endpoint, self.proxy)
        return f"{self.identity}&allow_http=true" if exposed else self.identity

    @property
    def note(self) -> bytes:
        """Return how objects are written, for another process that uploads them; often empty.

        An SSE-C key is not in it, only a digest that says whether another process has the same.
        """
        names = ("sse", "sse_kms_key_id", "storage_class")
        values = {name: getattr(self, name) for name in names}
        values["sse_c_key_digest"] = self._sse_c_key_digest
        given = {name: value for name, value in values.items() if value not in (None, "none")}
        return json.dumps(given, sort_keys=True).encode() if given else b""

    def as_noted(self, note: bytes) -> S3Options:
        """Return these options with objects written as ``note`` says.

        Raises:
            ConfigError: it cannot be read, or needs an SSE-C key that is not ours.
        """
        given: dict[str, Any] = {"sse": "none", "sse_kms_key_id": None, "storage_class": None}
        try:
            given.update(json.loads(note or b"{}"))
            digest = given.pop("sse_c_key_digest", None)
            if digest in (None, self._sse_c_key_digest):
                return replace(self, **given, sse_c_key=self.sse_c_key if digest else None)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "note of a pending upload", f"cannot be read ({error})", "leave it to its writer"
            ) from None
        raise ConfigError(
            "upload of an entry that another process saved",
            "needs the SSE-C key which that one had: keys are not written to disk",
            "set S3CACHE_SSE=C and S3CACHE_SSE_C_KEY to that key in a process on this machine",
        )

    @property
    def _sse_c_key_digest(self) -> str | None:
        if self.sse_c_key is None:
            return None
        return hashlib.sha256(b"s3cache sse-c" + self.sse_c_key).hexdigest()


class StoreOptions(TypedDict, total=False):
    """Arguments of :func:`open_store` beside the URL; ``None`` counts as not given."""

    create: bool | str | None

    endpoint_url: str | None
    region: str | None
    addressing_style: AddressingStyle | None
    profile: str | None
    sse: Encryption | None
    sse_kms_key_id: str | None
    sse_c_key: bytes | str | None
    storage_class: str | None
    request_payer: Literal["requester"] | None
    ca_bundle: str | os.PathLike[str] | None
    proxy: str | None
    connect_timeout_s: float | str | None
    read_timeout_s: float | str | None
    max_pool_connections: int | str | None
    part_bytes: int | str | None
    multipart_bytes: int | str | None
    max_object_bytes: int | str | None
    conditional_create: ConditionalCreate | None
    anonymous: bool | str | None
    allow_http: bool | str | None
    access_key: str | None
    secret_key: str | None
    session_token: str | None


# -- checks


def _check_place(options: S3Options) -> None:
    if not _BUCKET.fullmatch(options.bucket):
        raise ConfigError(
            f"bucket {options.bucket!r}",
            "is no bucket name",
            "use 3 to 255 letters, digits, '.', '-' and '_', e.g. s3://my-bucket/prefix",
        )
    if prefix := options.prefix:
        problem, fix = "", "use a prefix such as 'team/main'"
        # S3 servers normalise or refuse such segments.
        if not prefix.isprintable() or not {"", ".", ".."}.isdisjoint(prefix.split("/")):
            problem = "has an empty, '.' or '..' segment, or an unprintable character"
        elif (length := len(prefix.encode())) > _MAX_PREFIX_BYTES:
            problem = f"is {length} bytes long, more than {_MAX_PREFIX_BYTES}"
            fix = "S3 allows 1,024 bytes for prefix and key together: use a shorter one"
        if problem:
            raise ConfigError(f"prefix {prefix!r}", problem, fix)
    if options.endpoint is not None:
        name = "option endpoint_url"
        if options.endpoint_url is None:
            name = "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile's endpoint"
        _check_http_url(name, options.endpoint)
    if options.proxy is not None:
        _check_http_url("option proxy", options.proxy, may_hold_credentials=True)


def _check_http_url(name: str, url: str, *, may_hold_credentials: bool = False) -> None:
    fix = "write it as http://host:port or https://host:port"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Neither the text nor what urlsplit says about it: it may hold a password.
        raise ConfigError(name, "is no URL", fix) from None
    # Behind a '/' that was not escaped is the rest of a password.
    if "@" in (parts.path if may_hold_credentials else parts.netloc + parts.path):
        raise ConfigError(
            name,
            "holds a user name or password",
            "take it out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(name, "is no http:// or https:// URL", fix)
    if parts.query or parts.fragment:
        raise ConfigError(name, "has a query or a fragment", fix)


def _check_together(options: S3Options) -> None:
    """Raise ConfigError for options that contradict each other."""
    sse, key, has_keys = options.sse, options.sse_c_key, options.access_key is not None
    is_secret = not options.anonymous or sse == "C"
    # fmt: off
    for is_wrong, thing, cause, fix in (
        (options.sse_kms_key_id is not None and not sse.startswith("aws:kms"),
         "option sse_kms_key_id", f"means nothing with sse={sse}",
         "add sse=aws:kms or sse=aws:kms:dsse"),
        ((sse == "C") != (key is not None), "options sse and sse_c_key",
         "sse=C and a key go together, and one of them is missing",
         "set sse=C and the environment variable S3CACHE_SSE_C_KEY to 32 bytes in base64"),
        (key is not None and len(key) != 32, "option sse_c_key",
         f"is {len(key or b'')} bytes long, not 32", "make one with: openssl rand -base64 32"),
        (has_keys != (options.secret_key is not None), "options access_key and secret_key",
         "one is missing", "give both or neither"),
        (options.session_token is not None and not has_keys, "option session_token",
         "is given without keys", "give access_key and secret_key too"),
        (options.anonymous and has_keys, "option anonymous",
         "contradicts access_key", "leave one of the two out"),
        (not options.allow_http and is_secret and _is_exposed(options.endpoint, options.proxy),
         "option endpoint_url",
         "is plain http to another machine, or to this one through a proxy elsewhere",
         "use https, name this machine in NO_PROXY, or give allow_http=true in a safe network"),
    ):
        # fmt: on
        if is_wrong:
            raise ConfigError(thing, cause, fix)


# -- the server


def _server_query(options: S3Options) -> str:
    """Return the query of a URL that names the server in one way; empty for AWS at large."""
    if (endpoint := options.endpoint) is None:
        found = options.region or os.environ.get("AWS_DEFAULT_REGION")
        found = found or _from_profile("region", options.profile)
    else:
        parts = urlsplit(endpoint)
        host, path = parts.hostname or "", parts.path.rstrip("/")
        default = {"http": 80, "https": 443}.get(parts.scheme)
        port = f":{parts.port}" if parts.port not in (None, default) else ""
        aws = _AWS.fullmatch(host)
        # With a path the bucket's name is elsewhere: that is another bucket.
        if aws is None or parts.scheme != "https" or port or path:
            host = f"[{host}]" if ":" in host else host
            server = quote(f"{parts.scheme}://{host}{port}{path}", safe=":/[]")
            return f"?endpoint_url={server}"
        # It is S3 itself, whatever region requests are signed for.
        found = "cn-" if aws[4] else (aws[3] or "")[1:]
    one = partition_region(found)
    return f"?region={one}" if one else ""


def partition_region(region: str) -> str:
    """Return one region, always the same, of the partition of ``region``; empty for ``aws``."""
    return next((one for start, one in _PARTITIONS.items() if region.startswith(start)), "")


def _is_exposed(endpoint: str | None, proxy: str | None) -> bool:
    """Return whether requests can be read on the way: they leave this machine by plain http.

    Where a proxy elsewhere is asked, "this machine" is that one.
    """
    if endpoint is None or urlsplit(endpoint).scheme != "http":
        return False
    if not _is_loopback(endpoint):
        return True
    if proxy is None:  # botocore takes one from the environment
        from urllib.request import getproxies, proxy_bypass

        is_used = not proxy_bypass(urlsplit(endpoint).netloc)
        proxy = getproxies().get("http") if is_used else None
    return proxy is not None and not _is_loopback(proxy if "//" in proxy else f"//{proxy}")


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        is_named = host == "localhost" or host.endswith(".localhost")
        return is_named or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or unusable, which is an error once it is used
        return False


def _from_profile(option: str, profile: str | None) -> str:
    """Return the option in the profile in use, for S3 if it is there, or ``""``."""
    # The order of these two is botocore's.
    name = profile or os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")
    config = _sections(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
    keys = _sections(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    section = config.get(f"profile {name}" if name and name != "default" else "default", {})
    section = {**section, **keys.get(name or "default", {})}
    services = config.get(f"services {section.get('services')}", {})
    for line in services.get("s3", "").splitlines():  # nested: "s3 =\n  endpoint_url = ..."
        inner, _, value = line.partition("=")
        if inner.strip() == option and value.strip():
            return value.strip()
    return section.get(option, "")


def _sections(path: str) -> Mapping[str, Mapping[str, str]]:
    """Return the sections of a file of settings; none if it cannot be read, as botocore reports."""
    path = os.path.expanduser(os.path.expandvars(path))
    parser = configparser.RawConfigParser(strict=False, default_section="")
    try:
        if os.path.isfile(path):  # a pipe may have no writer
            with open(path, encoding="utf-8") as file:
                parser.read_file(file)
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    # 'profile "a b"' may be written with quotes.
    return {" ".join(name.replace('"', "").split()): dict(parser[name]) for name in parser}
