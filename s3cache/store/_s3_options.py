"""The location and options of a store in S3, checked.

botocore takes 0.5 s to import, with the GIL held, so it is not imported here. The endpoint is
found like in botocore: an option, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, the profile in use
(https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html).
"""

from __future__ import annotations

import configparser
import hashlib
import ipaddress
import os
import re
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, get_args
from urllib.parse import quote, urlsplit

from s3cache.errors import ConfigError
from s3cache.store._base import LONGEST_NAME_BYTES, MAX_PATH_BYTES
from s3cache.util import options as _options
from s3cache.util.options import FLAG, KEY, choice, count, option, seconds, size

AddressingStyle: TypeAlias = Literal["auto", "path", "virtual"]
Encryption: TypeAlias = Literal["none", "AES256", "aws:kms", "aws:kms:dsse", "C"]
ConditionalCreate: TypeAlias = Literal["auto", "native", "check"]

#: The smallest part that servers accept, except for the last one of an object.
MIN_PART_BYTES = 5 * 2**20
# The limit of one PUT: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MAX_PUT_BYTES = 5 * 2**30
# prefix, "/" and key share the 1,024 bytes of an S3 key
_MAX_PREFIX_BYTES = MAX_PATH_BYTES - 1 - LONGEST_NAME_BYTES
# Laxer than AWS's own rules, which Ceph and MinIO can be configured to relax.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class S3Options:
    """The location and options of an S3 store; see docs/configuration.md.

    Options that are ``None`` are left to botocore's own chain: ``AWS_*`` variables,
    ``~/.aws/config``, web identity, SSO, container and instance metadata.

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
    max_object_bytes: int = option(4 << 30, size(1, _MAX_PUT_BYTES))
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
        """Return the server for requests, or None for AWS."""
        if self.endpoint_url is not None:
            return self.endpoint_url
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            return None
        named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return named or _endpoint_of_profile(self.profile)

    @property
    def is_directory_bucket(self) -> bool:
        """Return whether it is a bucket of S3 Express One Zone, or an access point to one.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/directory-bucket-naming-rules.html
        """
        return self.bucket.endswith(("--x-s3", "--xa-s3"))

    @property
    def identity(self) -> str:
        """Return the location and encryption of the store, as the name of its local entries.

        So a process never uploads entries that were saved with another encryption.
        """
        place = self._place
        encryption = (self.sse, self.sse_kms_key_id, self.sse_c_key)
        if encryption != ("none", None, None):
            digest = hashlib.sha256(f"s3cache {encryption}".encode()).hexdigest()[:16]
            place += f"{'&' if '?' in place else '?'}encryption={digest}"
        return place

    @property
    def url(self) -> str:
        """Return bucket, prefix and endpoint, with ``allow_http`` if needed, to parse again."""
        is_exposed = _is_exposed(self.endpoint, self.proxy)
        return f"{self._place}&allow_http=true" if is_exposed else self._place

    @property
    def via(self) -> str:
        """Return the proxy that requests go through, as words for messages; "" without one."""
        url, name = _proxy_of(self.endpoint or "https://s3.amazonaws.com", self.proxy)
        return url and f" (through {name}={url.rpartition('@')[2]})"

    @property
    def _place(self) -> str:
        place = f"s3://{self.bucket}/{quote(self.prefix)}".rstrip("/")
        if (endpoint := self.endpoint) is None:
            return place
        scheme, host, path = urlsplit(endpoint)[:3]
        host = host.lower().removesuffix(":443" if scheme == "https" else ":80")
        endpoint = f"{scheme}://{host}{path.rstrip('/')}"
        return f"{place}?endpoint_url={quote(endpoint, safe=':/[]')}"


# -- checks


def _check_place(options: S3Options) -> None:
    if not _BUCKET.fullmatch(options.bucket):
        raise ConfigError(
            f"bucket {options.bucket!r}",
            "is not a bucket name",
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
    _check_bundle(options)


def _check_bundle(options: S3Options) -> None:
    name, bundle = "option ca_bundle", options.ca_bundle
    if bundle is None and not (options.endpoint or "").startswith("http:"):
        name, bundle = "AWS_CA_BUNDLE", os.environ.get("AWS_CA_BUNDLE")
    if bundle and not os.access(bundle, os.R_OK):
        exists = "cannot be read" if os.path.exists(bundle) else "does not exist"
        raise ConfigError(name, f"names {bundle!r}, which {exists}", "give the path of a PEM file")


def _check_http_url(name: str, url: str, *, may_hold_credentials: bool = False) -> None:
    fix = "write it as http://host:port or https://host:port"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Show neither the text nor urlsplit's message: they may contain a password.
        raise ConfigError(name, "is not a URL", fix) from None
    # After an unescaped '/' may be the rest of a password.
    if "@" in (parts.path if may_hold_credentials else parts.netloc + parts.path):
        raise ConfigError(
            name,
            "holds a user name or password",
            "take it out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(name, "is not an http:// or https:// URL", fix)
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


def _is_exposed(endpoint: str | None, proxy: str | None) -> bool:
    """Return whether requests can be read on the way: they leave this machine by plain http.

    A remote proxy would take "this machine" for itself.
    """
    if endpoint is None or urlsplit(endpoint).scheme != "http":
        return False
    if not _is_loopback(endpoint):
        return True
    url, _ = _proxy_of(endpoint, proxy)
    return bool(url) and not _is_loopback(url if "//" in url else f"//{url}")


def _proxy_of(endpoint: str, proxy: str | None) -> tuple[str, str]:
    """Return URL and name of the proxy for requests; botocore reads one from the environment."""
    if proxy is not None:
        return proxy, "proxy"
    from urllib.request import getproxies, proxy_bypass

    scheme, host = urlsplit(endpoint)[:2]
    if not (url := "" if proxy_bypass(host) else getproxies().get(scheme, "")):
        return "", ""
    names = (f"{scheme}_proxy", f"{scheme}_proxy".upper())
    return url, next(filter(os.environ.get, names), "the system's proxy")


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        is_named = host == "localhost" or host.endswith(".localhost")
        return is_named or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, or no URL, which is an error when it is used
        return False


def _endpoint_of_profile(profile: str | None) -> str | None:
    """Return the endpoint for S3 in the current profile, if any."""
    # The order of these two is botocore's.
    name = profile or os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")
    section = "default" if name in (None, "default") else f"profile {name}"
    config = configparser.RawConfigParser(strict=False, default_section="")
    try:
        config.read(os.path.expanduser(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return None  # botocore reports it
    services = config.get(section, "services", fallback="")
    # A separate indented block in the option "s3" of that section.
    of_s3 = config.get(f"services {services}", "s3", fallback="")
    named = re.search(r"^\s*endpoint_url\s*=\s*(\S+)", of_s3, re.MULTILINE)
    return named[1] if named else config.get(section, "endpoint_url", fallback=None)
