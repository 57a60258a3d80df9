"""What there is to say about an S3 store before anything is sent to it.

Reading options must not import botocore (0.5 s with the GIL held); only opening the client does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict, get_args
from urllib.parse import quote, urlsplit

from s3cache import _options
from s3cache._options import FLAG, KEY, choice, count, option, seconds, size
from s3cache.errors import ConfigError
from s3cache.store._base import MAX_KEY_BYTES, check_key
from s3cache.store.s3._place import endpoint_in_use, is_exposed, place_query

__all__ = ["MAX_PREFIX_BYTES", "MIN_PART_BYTES", "SECRETS", "S3Arguments", "S3Options"]

AddressingStyle: TypeAlias = Literal["auto", "path", "virtual"]
Encryption: TypeAlias = Literal["none", "AES256", "aws:kms", "aws:kms:dsse", "C"]
ConditionalCreate: TypeAlias = Literal["auto", "native", "check"]

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_BYTES = 5 * 2**20
MAX_PUT_BYTES = 5 * 2**30
# prefix, "/" and key share the 1,024 bytes of an S3 key
MAX_PREFIX_BYTES = 1024 - 1 - MAX_KEY_BYTES

# Never in a URL (they end up in logs, tickets and process lists), never in a repr.
SECRETS = frozenset({"access_key", "secret_key", "session_token", "sse_c_key"})

# Laxer than AWS's own rules, which Ceph and MinIO can be told to relax.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class S3Options:
    """Where an S3 store is and how to talk to it.

    What is ``None`` is left to botocore's own chain: ``AWS_*`` variables, ``~/.aws/config``,
    web identity, SSO, container and instance metadata.

    Attributes:
        bucket: must exist.
        prefix: all keys live under ``prefix/``; at most 123 bytes.
        endpoint_url: an S3-compatible server; ``None`` is AWS or ``AWS_ENDPOINT_URL_S3``.
        addressing_style: ``auto`` is what the AWS configuration says, and failing that ``path``
            where ``endpoint_url`` is set, else ``virtual``.
        sse: server-side encryption asked for with each write; ``none`` leaves it to the bucket.
            ``C`` needs ``sse_c_key`` and https.
        sse_c_key: the 32 bytes of an SSE-C key; base64 where it is given as text.
        request_payer: ``"requester"`` to pay for requests to somebody else's bucket.
        ca_bundle: a PEM file that replaces the system's certificate authorities.
        proxy: URL of an HTTP proxy; ``None`` is ``HTTP_PROXY`` and its kin.
        read_timeout_s: silence for so long ends a request; getting or renewing credentials may take
            as long all in all.
        part_bytes: size of one range of a download, and of one part of an upload (5 MiB at
            least there).
        multipart_bytes: objects larger than this are uploaded in parts.
        max_object_bytes: objects larger than this are not read: no entry is that large, and
            whoever can write to the bucket must not fill the readers' memory.
        conditional_create: whether ``put(mode="create")`` trusts ``If-None-Match: *``.
            ``native`` always does, ``check`` never (it looks first, so racing writers may all
            win), ``auto`` asks the server once.
        anonymous: send unsigned requests.
        allow_http: send signed requests, and keys of SSE-C, over plain http to other machines too:
            whoever is on the way reads what is cached, and can put something else in its place.

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
    part_bytes: int = option(16 << 20, size(1, MAX_PUT_BYTES))
    multipart_bytes: int = option(64 << 20, size(MIN_PART_BYTES, MAX_PUT_BYTES))
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
        _check_encryption(self)
        _check_credentials(self)
        _check_transport(self)

    @property
    def identity(self) -> str:
        """Where the bytes are, as a canonical URL: no credentials, no tuning options.

        Two spellings of one place give one identity, so it can name what is kept locally for the
        place: server (of AWS, the partition), bucket and prefix, whoever says them.
        """
        place = f"s3://{self.bucket}/{quote(self.prefix)}".rstrip("/")
        endpoint = endpoint_in_use(self.endpoint_url, self.profile)
        return place + place_query(endpoint, self.region, self.profile)

    @property
    def note(self) -> bytes:
        """How objects are written, for whoever uploads one that was saved here; empty if plainly.

        There is no key of SSE-C in it, only what tells whether somebody has the same.
        """
        said = {
            "sse": None if self.sse == "none" else self.sse,
            "sse_kms_key_id": self.sse_kms_key_id,
            "sse_c_key_digest": self._sse_c_key_digest,
            "storage_class": self.storage_class,
        }
        said = {name: value for name, value in said.items() if value is not None}
        return json.dumps(said, sort_keys=True).encode() if said else b""

    def as_noted(self, note: bytes) -> S3Options:
        """These options, but objects are written as ``note`` says.

        Raises:
            ConfigError: it cannot be read, or needs an SSE-C key that is not ours.
        """
        try:
            said = json.loads(note or b"{}")
            digest = said.pop("sse_c_key_digest", None)
            plain: dict[str, Any] = {"sse": "none", "sse_kms_key_id": None, "storage_class": None}
            if digest is None:
                return replace(self, **{**plain, **said}, sse_c_key=None)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                "record of an upload", f"cannot be read ({error})", "leave it to whoever made it"
            ) from None
        if digest != self._sse_c_key_digest:
            raise ConfigError(
                "upload of an entry that another process saved",
                "needs the SSE-C key which that one had: keys are not written to disk",
                "set S3CACHE_SSE=C and S3CACHE_SSE_C_KEY to that key in a process on this machine",
            )
        return replace(self, **{**plain, **said})

    @property
    def _sse_c_key_digest(self) -> str | None:
        if self.sse_c_key is None:
            return None
        return hashlib.sha256(b"s3cache sse-c" + self.sse_c_key).hexdigest()

    @property
    def url(self) -> str:
        """For messages and for :func:`~s3cache.store.parse_url`: the identity, and leave to go."""
        exposed = is_exposed(endpoint_in_use(self.endpoint_url, self.profile), self.proxy)
        return f"{self.identity}&allow_http=true" if exposed else self.identity


class S3Arguments(TypedDict, total=False):
    """The options above as arguments, beside a URL that has the bucket and the prefix."""

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


def _check_place(options: S3Options) -> None:
    if not _BUCKET.fullmatch(options.bucket):
        raise ConfigError(
            f"bucket {options.bucket!r}",
            "is no bucket name",
            "use 3 to 255 letters, digits, '.', '-' and '_', e.g. s3://my-bucket/prefix",
        )
    if options.prefix:
        check_key(options.prefix)
        if (size := len(options.prefix.encode())) > MAX_PREFIX_BYTES:
            raise ConfigError(
                f"prefix {options.prefix!r}",
                f"is {size} bytes long, more than {MAX_PREFIX_BYTES}",
                "S3 allows 1,024 bytes for prefix and key together: use a shorter one",
            )
    if options.endpoint_url is not None:
        _check_http_url("option endpoint_url", options.endpoint_url)
    elif (named := endpoint_in_use(None, options.profile)) is not None:
        _check_http_url("AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile's endpoint", named)
    if options.proxy is not None:
        _check_http_url("option proxy", options.proxy, may_hold_credentials=True)


def _check_http_url(what: str, url: str, *, may_hold_credentials: bool = False) -> None:
    fix = "write it as http://host:port or https://host:port"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Neither the text nor what urlsplit says of it: it may hold a password.
        raise ConfigError(what, "is no URL", fix) from None
    # Behind a '/' that was not escaped is the rest of a password.
    if "@" in (parts.path if may_hold_credentials else parts.netloc + parts.path):
        raise ConfigError(
            what,
            "holds a user name or password",
            "take it out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(what, "is no http:// or https:// URL", fix)
    if parts.query or parts.fragment:
        raise ConfigError(what, "has a query or a fragment", fix)


def _check_encryption(options: S3Options) -> None:
    if options.sse_kms_key_id is not None and not options.sse.startswith("aws:kms"):
        raise ConfigError(
            "option sse_kms_key_id",
            f"means nothing with sse={options.sse}",
            "add sse=aws:kms or sse=aws:kms:dsse",
        )
    if (options.sse == "C") != (options.sse_c_key is not None):
        raise ConfigError(
            "options sse and sse_c_key",
            "sse=C and a key go together, and one of them is missing",
            "set sse=C and the environment variable S3CACHE_SSE_C_KEY to 32 bytes in base64",
        )
    if options.sse_c_key is not None and len(options.sse_c_key) != 32:
        raise ConfigError(
            "option sse_c_key",
            f"is {len(options.sse_c_key)} bytes long, not 32",
            "make one with: openssl rand -base64 32",
        )


def _check_credentials(options: S3Options) -> None:
    if (options.access_key is None) != (options.secret_key is None):
        raise ConfigError(
            "options access_key and secret_key", "one is missing", "give both or neither"
        )
    if options.session_token is not None and options.access_key is None:
        raise ConfigError(
            "option session_token", "is given without keys", "give access_key and secret_key too"
        )
    if options.anonymous and options.access_key is not None:
        raise ConfigError("option anonymous", "contradicts access_key", "leave one of the two out")


def _check_transport(options: S3Options) -> None:
    if options.allow_http or (options.anonymous and options.sse != "C"):
        return
    if is_exposed(endpoint_in_use(options.endpoint_url, options.profile), options.proxy):
        raise ConfigError(
            "option endpoint_url",
            "is plain http to another machine, or to this one through a proxy elsewhere: what is "
            "sent there can be read and changed",
            "use https (ca_bundle=... for a certificate of your own), name this machine in "
            "NO_PROXY, or give allow_http=true where the network is yours alone",
        )
