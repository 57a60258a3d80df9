"""The location and options of a store, from a URL, arguments and the environment.

::

    s3://bucket/prefix?endpoint_url=https://minio:9000&region=eu-west-1&sse=aws:kms
    file:///absolute/directory?create=false
    memory://name

An option comes from an argument, else from the URL, else from the environment variable
``S3CACHE_<OPTION>`` (S3 only), else from botocore's own configuration. Credentials are refused in
URLs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from s3cache.errors import ConfigError
from s3cache.store._base import MemoryStore, Store
from s3cache.store._file import FileStore
from s3cache.store._s3 import S3Store
from s3cache.store._s3_options import AddressingStyle, ConditionalCreate, Encryption, S3Options
from s3cache.util import options as _options
from s3cache.util.options import FLAG, PREFIX, option

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Never in a URL (they end up in logs, tickets and process lists), never in a repr.
_SECRETS = frozenset({"access_key", "secret_key", "session_token", "sse_c_key"})
# Names in other tools, so that a credential under another name is refused too.
_LOOKS_SECRET = ("secret", "password", "passwd", "token", "access_key", "accesskey", "credential")
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
class FileLocation:
    """A directory, ``file:///absolute/path``; with ``create``, a missing one is created."""

    path: str
    create: bool = option(True, FLAG)

    def __post_init__(self) -> None:
        _options.check(self)

    @property
    def identity(self) -> str:
        """Return the directory as a canonical URL."""
        return f"file://{quote(self.path)}"


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A store in this process, one per name: ``memory://name``."""

    name: str

    @property
    def identity(self) -> str:
        """Return the name as a canonical URL."""
        return f"memory://{quote(self.name)}"


_Location: TypeAlias = "S3Options | FileLocation | MemoryLocation"

# The options of each scheme, besides the parts of the URL itself.
_OPTIONS: dict[str, frozenset[str]] = {
    "s3": frozenset(_options.kinds(S3Options)) - {"bucket", "prefix"},
    "file": frozenset(_options.kinds(FileLocation)),
    "memory": frozenset(),
}
#: Names of all options of stores.
STORE_OPTIONS = _OPTIONS["s3"] | _OPTIONS["file"]

_memory_stores: dict[str, Store] = {}


def open_store(url: str, **options: Unpack[StoreOptions]) -> Store:
    """Return the store at ``url``, without opening it or importing botocore.

    Equal ``memory://`` URLs are the same store.

    Raises:
        ConfigError: the URL or an option cannot be used; see :func:`parse_url`.
    """
    location = parse_url(url, **options)
    if isinstance(location, S3Options):
        return S3Store(location)
    if isinstance(location, FileLocation):
        return FileStore(location.path, create=location.create)
    return _memory_stores.setdefault(location.name, MemoryStore(location.name))


def parse_url(url: str, **options: Unpack[StoreOptions]) -> _Location:
    """Combine ``url``, ``options`` and the environment, typed and checked.

    ``options`` take precedence over the URL, and the URL over the environment; ``None`` means not
    given.

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
    _options.check_names(query, _OPTIONS[scheme] - _SECRETS, shown)
    _options.check_names(arguments, _OPTIONS[scheme], shown)
    given: dict[str, Any] = {**query, **arguments}
    problem = fix = ""
    if parts.fragment:
        problem, fix = "contains a '#'", "write it as %23"
    elif scheme == "s3":
        if not parts.netloc:
            problem, fix = "names no bucket", "use s3://bucket/prefix"
        elif "//" in path.rstrip("/"):
            problem, fix = "has an empty path segment", "write one '/'"
    elif scheme == "file":
        if parts.netloc not in ("", "localhost") or not path.startswith("/"):
            problem, fix = "names no absolute path", "use three slashes: file:///directory"
        elif "\0" in unquote(path):
            problem, fix = "holds a NUL character", "take it out"
    if problem:
        raise ConfigError(f"store URL {shown}", problem, fix)
    if scheme == "s3":
        given["bucket"], given["prefix"] = unquote(parts.netloc), unquote(path).strip("/")
        return S3Options(**_options.from_environment(S3Options, but=given), **given)
    if scheme == "file":
        return FileLocation("/" + unquote(path).strip("/"), **given)
    return MemoryLocation(unquote(parts.netloc + path).strip("/"))


def _query(parts: SplitResult, shown: str) -> dict[str, str]:
    query: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in _SECRETS or any(word in name.lower() for word in _LOOKS_SECRET):
            raise ConfigError(f"store URL {shown}", f"holds the secret {name!r}", _NO_CREDENTIALS)
        if name == "proxy" and "@" in value:
            raise ConfigError(
                f"store URL {shown}",
                "holds a proxy's user name or password",
                f"set the environment variable {PREFIX}PROXY instead",
            )
        if name in query:
            raise ConfigError(f"option {name} in {shown}", "is given twice", "leave one out")
        if not value:
            raise ConfigError(f"option {name} in {shown}", "has no value", "give one or drop it")
        query[name] = value
    return query
