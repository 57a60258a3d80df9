"""The location and options of a store, from a URL, arguments and the environment.

::

    s3://bucket/prefix?endpoint_url=https://minio:9000&region=eu-west-1&sse=aws:kms
    file:///absolute/directory?create=false
    memory://name

An option comes from an argument, else from the URL, else from the environment variable
``S3CACHE_<OPTION>`` (S3 only), else from botocore's own configuration. Credentials are refused in
URLs.

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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from s3cache.errors import ConfigError
from s3cache.store._base import LONGEST_NAME_BYTES, MAX_PATH_BYTES
from s3cache.util import options as _options
from s3cache.util.options import FLAG, KEY, PREFIX, choice, count, option, seconds, size

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
# Never in a URL (they end up in logs, tickets and process lists), also under other tools' names.
_SECRET = re.compile("(?i)secret|passw(or)?d|token|access_?key|credential|sse_c_key")
_EXAMPLES = "use s3://bucket/prefix, file:///directory or memory://name"
_NO_CREDENTIALS = (
    "take it out; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or profile=..., "
    "or pass access_key= and secret_key= in code"
)


class StoreOptions(TypedDict, total=False):
    """Arguments of :func:`open_store` besides the URL; ``None`` means not given."""

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
        _check(self)

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


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A directory, ``file:///absolute/path``; with ``create``, a missing one is created."""

    path: str
    create: bool = option(True, FLAG)

    def __post_init__(self) -> None:
        _options.check(self)

    @property
    def identity(self) -> str:
        return f"file://{quote(self.path)}"


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A store in this process, one per name: ``memory://name``."""

    name: str

    @property
    def identity(self) -> str:
        return f"memory://{quote(self.name)}"


# The options of each scheme, besides the parts of the URL itself.
_OPTIONS: dict[str, frozenset[str]] = {
    "s3": frozenset(_options.kinds(S3Options)) - {"bucket", "prefix"},
    "file": frozenset(_options.kinds(FileLocation)),
    "memory": frozenset(),
}
#: Names of all options of stores.
STORE_OPTIONS = _OPTIONS["s3"] | _OPTIONS["file"]


def parse_url(
    url: str, **options: Unpack[StoreOptions]
) -> S3Options | FileLocation | MemoryLocation:
    """Combine ``options``, ``url`` and the environment, in this order, typed and checked.

    Raises:
        ConfigError: unknown scheme, option or value; a credential in the URL; no bucket or path.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port if parts.scheme == "s3" else None
    except ValueError:
        # Show neither the URL nor urlsplit's message: they may contain a password.
        raise ConfigError("store URL", "cannot be read", _EXAMPLES) from None
    scheme, path = parts.scheme, parts.path
    if not scheme:
        raise ConfigError("store URL", "has no scheme", _EXAMPLES)
    if scheme not in _OPTIONS:
        fix = _options.did_you_mean(scheme, _OPTIONS, _EXAMPLES)
        raise ConfigError(f"store URL scheme {scheme!r}", "is not known", fix)
    # A secret key may contain a '/', so that the rest of it looks like a path.
    if "@" in parts.netloc or (scheme == "s3" and ":" in parts.netloc):
        raise ConfigError(
            f"store URL {scheme}://…",
            "has a user name, a password or a port in place of the bucket's name",
            f"{_NO_CREDENTIALS}; a server goes into endpoint_url=...",
        )
    # Text before an '@' may be a password, even in unlikely places.
    shown = f"{scheme}://" + ("…" if "@" in path else parts.netloc + path)
    query = _query(parts, shown)
    arguments = {name: value for name, value in options.items() if value is not None}
    public = [name for name in _OPTIONS[scheme] if not _SECRET.search(name)]
    _options.check_names(query, public, shown)
    _options.check_names(arguments, _OPTIONS[scheme], shown)
    values: dict[str, Any] = {**query, **arguments}
    is_absolute = parts.netloc in ("", "localhost") and path.startswith("/")
    for of, is_wrong, problem, fix in (
        (scheme, parts.fragment, "contains a '#'", "write it as %23"),
        ("s3", not parts.netloc, "names no bucket", "use s3://bucket/prefix"),
        ("s3", "//" in path.rstrip("/"), "has an empty path segment", "write one '/'"),
        ("file", not is_absolute, "names no absolute path", "use three slashes: file:///directory"),
        ("file", "\0" in unquote(path), "holds a NUL character", "take it out"),
    ):
        if of == scheme and is_wrong:
            raise ConfigError(f"store URL {shown}", problem, fix)
    if scheme == "s3":
        values["bucket"], values["prefix"] = unquote(parts.netloc), unquote(path).strip("/")
        return S3Options(**_options.from_environment(S3Options, but=values), **values)
    if scheme == "file":
        return FileLocation("/" + unquote(path).strip("/"), **values)
    return MemoryLocation(unquote(parts.netloc + path).strip("/"))


def _query(parts: SplitResult, shown: str) -> dict[str, str]:
    query: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        thing = f"option {name} in {shown}"
        if _SECRET.search(name):
            raise ConfigError(f"store URL {shown}", f"holds the secret {name!r}", _NO_CREDENTIALS)
        if name == "proxy" and "@" in value:
            problem = "holds a proxy's user name or password"
            fix = f"set the environment variable {PREFIX}PROXY instead"
            raise ConfigError(f"store URL {shown}", problem, fix)
        if name in query:
            raise ConfigError(thing, "is given twice", "leave one out")
        if not value:
            raise ConfigError(thing, "has no value", "give one or drop it")
        query[name] = value
    return query


# -- checks of S3Options


def _check(options: S3Options) -> None:
    """Raise ConfigError for options that cannot be used, or that contradict each other."""
    endpoint, bucket, prefix, sse = options.endpoint, options.bucket, options.prefix, options.sse
    if endpoint is not None:
        name = "option endpoint_url"
        if options.endpoint_url is None:
            name = "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile's endpoint"
        _check_http_url(name, endpoint)
    if options.proxy is not None:
        _check_http_url("option proxy", options.proxy, may_hold_credentials=True)
    bundle_name, bundle = "option ca_bundle", options.ca_bundle
    if bundle is None and not (endpoint or "").startswith("http:"):
        bundle_name, bundle = "AWS_CA_BUNDLE", os.environ.get("AWS_CA_BUNDLE")
    lacks = "cannot be read" if os.path.exists(bundle or "") else "does not exist"
    prefix_bytes = len(prefix.encode(errors="replace"))
    key, has_keys = options.sse_c_key, options.access_key is not None
    is_secret = not options.anonymous or sse == "C"
    # fmt: off
    for is_wrong, thing, cause, fix in (
        (not _BUCKET.fullmatch(bucket), f"bucket {bucket!r}", "is not a bucket name",
         "use 3 to 255 letters, digits, '.', '-' and '_', e.g. s3://my-bucket/prefix"),
        # S3 servers normalise or refuse such segments.
        (prefix and not (prefix.isprintable() and {"", ".", ".."}.isdisjoint(prefix.split("/"))),
         f"prefix {prefix!r}", "has an empty, '.' or '..' segment, or an unprintable character",
         "use a prefix such as 'team/main'"),
        (prefix_bytes > _MAX_PREFIX_BYTES, f"prefix {prefix!r}",
         f"is {prefix_bytes} bytes long, more than {_MAX_PREFIX_BYTES}",
         "S3 allows 1,024 bytes for prefix and key together: use a shorter one"),
        (bundle and not os.access(bundle, os.R_OK), bundle_name,
         f"names {bundle!r}, which {lacks}", "give the path of a PEM file"),
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
        (not options.allow_http and is_secret and _is_exposed(endpoint, options.proxy),
         "option endpoint_url",
         "is plain http to another machine, or to this one through a proxy elsewhere",
         "use https, name this machine in NO_PROXY, or give allow_http=true in a safe network"),
    ):
        # fmt: on
        if is_wrong:
            raise ConfigError(thing, cause, fix)


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
        problem = "holds a user name or password"
        fix = "take it out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        raise ConfigError(name, problem, fix)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(name, "is not an http:// or https:// URL", fix)
    if parts.query or parts.fragment:
        raise ConfigError(name, "has a query or a fragment", fix)


def _is_exposed(endpoint: str | None, proxy: str | None) -> bool:
    """Return whether requests can be read on the way: they leave this machine by plain http."""
    # A remote proxy would take "this machine" for itself.
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
