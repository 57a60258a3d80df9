"""Stores by URL.

::

    s3://bucket/prefix?endpoint_url=https://minio:9000&region=eu-west-1&sse=aws:kms
    file:///absolute/directory?create=false
    memory://name

An option comes, in this order, from an argument, the URL, the environment variable
``S3CACHE_<OPTION>`` (S3 only), botocore's own configuration. Credentials are refused in URLs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from s3cache.errors import ConfigError
from s3cache.store._base import Store
from s3cache.store._file import FileStore, MemoryStore
from s3cache.store._s3 import S3Store
from s3cache.store._s3_options import SECRETS, S3Options, StoreOptions
from s3cache.util import options as _options
from s3cache.util.options import FLAG, PREFIX, option

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What other tools call them, so that a credential under a foreign name is refused as one too.
_LOOKS_SECRET = ("secret", "password", "passwd", "token", "access_key", "accesskey", "credential")
_EXAMPLES = "use s3://bucket/prefix, file:///directory or memory://name"
_NO_CREDENTIALS = (
    "take it out; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or profile=..., "
    "or pass access_key= and secret_key= in code"
)


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A directory, ``file:///absolute/path``; with ``create`` it is made if it is not there."""

    path: str
    create: bool = option(True, FLAG)
    note: ClassVar[bytes] = b""  # see S3Options.note

    def __post_init__(self) -> None:
        _options.check(self)

    @property
    def identity(self) -> str:
        """Return the directory as a canonical URL."""
        return f"file://{quote(self.path)}"


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A store in this process, one to a name: ``memory://name``."""

    name: str
    note: ClassVar[bytes] = b""

    @property
    def identity(self) -> str:
        """Return the name as a canonical URL."""
        return f"memory://{quote(self.name)}"


_Location: TypeAlias = "S3Options | FileLocation | MemoryLocation"

# What each scheme takes beside what is in the URL itself.
_OPTIONS: dict[str, frozenset[str]] = {
    "s3": frozenset(_options.kinds(S3Options)) - {"bucket", "prefix"},
    "file": frozenset(_options.kinds(FileLocation)),
    "memory": frozenset(),
}
#: Names of all options that some store has.
STORE_OPTIONS = _OPTIONS["s3"] | _OPTIONS["file"]

_memory_stores: dict[str, Store] = {}


def open_store(url: str, **options: Unpack[StoreOptions]) -> Store:
    """Return the store at ``url``; nothing is sent or opened yet, and botocore is not imported.

    Two ``memory://`` URLs of one name are one store.

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
    """Return what ``url``, ``options`` and the environment say, typed and checked.

    ``options`` win over the URL, the URL over the environment; one that is ``None`` says nothing.

    Raises:
        ConfigError: unknown scheme, option or value; a credential in the URL; no bucket or path.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port if parts.scheme == "s3" else None
    except ValueError:
        # Neither the URL nor what urlsplit says of it: it may hold a password.
        raise ConfigError("store URL", "cannot be read", _EXAMPLES) from None
    scheme, path = parts.scheme, parts.path
    if not scheme:
        raise ConfigError("store URL", "has no scheme", _EXAMPLES)
    if scheme not in _OPTIONS:
        fix = _options.did_you_mean(scheme, _OPTIONS, _EXAMPLES)
        raise ConfigError(f"store URL scheme {scheme!r}", "is not known", fix)
    # A secret key may have a '/' in it, so that what follows looks like a path.
    if "@" in parts.netloc or (scheme == "s3" and ":" in parts.netloc):
        raise ConfigError(
            f"store URL {scheme}://…",
            "holds a user name, a password or a port where the bucket's name is",
            f"{_NO_CREDENTIALS}; a server goes into endpoint_url=...",
        )
    # What stands before an '@' may be a password, even in unlikely places.
    shown = f"{scheme}://" + ("…" if "@" in path else parts.netloc + path)
    query = _query(parts, shown)
    arguments = {name: value for name, value in options.items() if value is not None}
    _options.check_names(query, _OPTIONS[scheme] - SECRETS, shown)
    _options.check_names(arguments, _OPTIONS[scheme], shown)
    given: dict[str, Any] = {**query, **arguments}
    problem = fix = ""
    if parts.fragment:
        problem, fix = "holds a '#'", "write it as %23"
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
        if name in SECRETS or any(word in name.lower() for word in _LOOKS_SECRET):
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
