"""Every setting and its default.

A setting comes from an argument, else from the environment variable ``S3CACHE_<NAME>``, else from
the default here. Options of the store (``endpoint_url``, ``region``, ...) are in
:class:`s3cache.store.S3Options`, and may be given in the same three ways or in the URL.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, get_args

from s3cache.errors import ConfigError, StoreError
from s3cache.seam import features
from s3cache.store import STORE_OPTIONS, RetryPolicy, StoreOptions
from s3cache.trust import (
    AUDIENCE,
    Policy,
    Signer,
    TimeLimitedSigner,
    for_audience,
    policy_of,
    signing_key_of,
)
from s3cache.util import options as _options
from s3cache.util.logs import logger_of
from s3cache.util.options import (
    FLAG,
    PATH,
    PREFIX,
    Kind,
    choice,
    count,
    did_you_mean,
    flag_or,
    option,
    seconds,
    size,
)
from s3cache.util.threads import DeadlineExecutor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.options import Options

_T = TypeVar("_T")

Mode: TypeAlias = Literal["read-write", "read-only", "write-only", "off"]
Trust: TypeAlias = Literal["auto", "off", "prefer", "require"]
OnMiss: TypeAlias = Literal["compile", "wait", "error"]

_MOMENT_S = 0.001  # the minimum of times that must not be zero

_SIGNER = Kind(str, (Signer,), is_path=True)

# Variables that are read elsewhere, not as settings of a cache.
_NO_SETTINGS = ("AUTOLOAD", "INERT_DEVICE", "JOB", "WATCHED")
#: Set if another process watches the progress of a program.
WATCHED = f"{PREFIX}WATCHED"

logger = logger_of()


def _default_local_dir() -> str:
    """Return ``$XDG_CACHE_HOME/s3cache``; without a home, a directory in the temporary one."""
    home = os.path.expanduser("~")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return os.path.join(cache, "s3cache") if _is_home(cache, home) else _temporary_local_dir()


@functools.cache
def _is_home(cache: str, home: str) -> bool:
    """Return whether we may write to the home; a hanging file system is tried once."""
    try:
        return _in_time(cache, lambda: os.access(cache if os.path.isdir(cache) else home, os.W_OK))
    except StoreError as exc:
        logger.warning("the local tier goes to %s: %s", _temporary_local_dir(), exc)
        return False


def _in_time(path: str, work: Callable[[], _T]) -> _T:
    """Return the result of ``work``; raise :class:`StoreError` if the disk with ``path`` hangs."""
    executor = DeadlineExecutor.of(path)
    try:
        return executor.call(work)
    finally:
        executor.release()


def _temporary_local_dir() -> str:
    try:
        place = tempfile.gettempdir()
    except OSError:  # there is none: opening the tier reports it
        place = "/tmp"  # noqa: S108
    return os.path.join(place, f"s3cache-{os.geteuid()}")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings of a cache. Times are in seconds, sizes in bytes.

    ``docs/configuration.md`` explains every setting. Values may be text, as in environment
    variables: ``local_max_bytes="10GiB"``.

    Raises:
        ConfigError: a value cannot be used.
    """

    url: str | None = option(None)
    mode: Mode = option("read-write", choice(*get_args(Mode)))
    strict: bool = option(False, FLAG)
    recache: bool = option(False, FLAG)
    summary: bool | str = option(False, flag_or("json"))
    metrics_file: str | None = option(None, PATH)
    record: bool = option(True, FLAG)
    share_sources: bool = option(False, FLAG)
    trust: Trust = option("auto", choice(*get_args(Trust)))
    trusted_keys: str | None = option(None, secret=True)
    revoked: str | None = option(None)
    signing_key: str | Signer | None = option(None, _SIGNER, secret=True)
    signing_timeout_s: float = option(5.0, seconds(_MOMENT_S))
    audience: str = option(AUDIENCE)
    signature_ttl_s: float = option(0.0, seconds())
    local: bool = option(True, FLAG)
    local_dir: str = option(_default_local_dir, PATH)
    local_max_bytes: int = option(10 << 30, size())
    local_max_files: int = option(50_000, count())
    lookup_timeout_s: float = option(10.0, seconds())
    on_miss: OnMiss = option("wait", choice(*get_args(OnMiss)))
    download_concurrency: int = option(16, count())
    upload_concurrency: int = option(16, count())
    prefetch_max_bytes: int = option(256 << 20, size())
    upload_queue_max_count: int = option(10_000, count())
    upload_queue_max_bytes: int = option(256 << 20, size())
    exit_timeout_s: float = option(10.0, seconds())
    retry_attempts: int = option(4, count())
    attempt_timeout_s: float = option(60.0, seconds(_MOMENT_S))
    retry_timeout_s: float = option(120.0, seconds(_MOMENT_S))
    upload_timeout_s: float = option(900.0, seconds(_MOMENT_S))
    breaker_failures: int = option(2, count())
    breaker_reset_s: float = option(30.0, seconds(_MOMENT_S))

    def __post_init__(self) -> None:
        _options.check(self)

    @property
    def has_default_local_dir(self) -> bool:
        """Whether ``local_dir`` is the default, which may be unusable."""
        return self.local_dir == _default_local_dir()

    @property
    def local_dirs(self) -> list[str]:
        """The possible directories of the local tier, best first."""
        spare = [_temporary_local_dir()] if self.has_default_local_dir else []
        return [*dict.fromkeys([self.local_dir, *spare])]

    def of(self, options: type[_T]) -> _T:
        """Return the settings as the options that a feature has declared."""
        return cast("_T", self)

    @property
    def retry_policy(self) -> RetryPolicy:
        """The policy for retrying requests to the remote."""
        return RetryPolicy(self.retry_attempts, self.retry_timeout_s, self.attempt_timeout_s)

    def trust_policy(self) -> Policy:
        """Return the trust policy, from the settings and the machine's own file.

        Raises ConfigError if a key or a name cannot be used.
        """
        level = None if self.trust == "auto" else self.trust
        return policy_of(level, self.trusted_keys or "", self.revoked or "", audience=self.audience)

    def signer(self) -> Signer | None:
        """Return the signer of entries that are saved here.

        Raises ConfigError if the key cannot be used, or if the disk with its file hangs.
        """
        if not isinstance(key := self.signing_key or "", str):
            return TimeLimitedSigner(key, self.signing_timeout_s)
        try:
            return _in_time("the signing key", lambda: signing_key_of(key))
        except StoreError as exc:
            raise ConfigError("the signing key", str(exc), "mount its disk again") from None

    @classmethod
    def load(
        cls, url: str | None = None, **options: Unpack[Options]
    ) -> tuple[Settings, StoreOptions]:
        """Return settings from arguments and environment, and the options of the store.

        Raises ConfigError if a value cannot be used, or if an argument is unknown.
        """
        _options.check_names(options, _all_names())
        arguments: dict[str, Any] = {n: value for n, value in options.items() if value is not None}
        of_store = {name: arguments.pop(name) for name in [*arguments] if name in STORE_OPTIONS}
        if url is not None:
            arguments["url"] = url
        # Keys in code are required: environment variables cannot weaken that.
        fixed = set(arguments)
        if keys := arguments.get("trusted_keys"):
            fixed.add("trust")
            if isinstance(keys, str):  # nor can a variable choose the audience
                arguments["trusted_keys"] = for_audience(keys, arguments.get("audience", AUDIENCE))
        environment = _options.from_environment(cls, but=fixed)
        return cast("Settings", cls(**environment, **arguments)), cast("StoreOptions", of_store)


if TYPE_CHECKING:

    class Settings(_Settings):
        """The settings of a cache, with those of features."""

        def __init__(self, **options: Unpack[Options]) -> None: ...

else:
    # Each feature declares its own options.
    Settings = make_dataclass(
        "Settings",
        (),
        bases=(*dict.fromkeys(feature.options for feature in reversed(features())), _Settings),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": _Settings.__doc__, "__module__": __name__},
    )


def warn_of_unknown_variables() -> None:
    """Log unknown ``S3CACHE_*`` variables: they are probably misspelt."""
    for variable, hint in unknown_variables():
        logger.warning("environment variable %s is not known; %s", variable, hint)


def unknown_variables() -> Iterator[tuple[str, str]]:
    """Yield unknown ``S3CACHE_*`` variables, with a hint about the intended one."""
    of_features = (feature.variables for feature in features())
    names = {name.upper() for name in _all_names()}.union(_NO_SETTINGS, *of_features)
    for variable in os.environ:
        name = variable.removeprefix(PREFIX)
        if name not in (variable, *names) and not name.startswith("TEST_"):
            yield variable, did_you_mean(name, names, "nothing reads it", prefix=PREFIX)


def is_strict_by_environment() -> bool:
    """Return ``strict`` from the environment, even if other settings are unusable."""
    try:
        return bool(FLAG.parse(os.environ.get(f"{PREFIX}STRICT") or "no"))
    except ValueError:
        return False


def _all_names() -> set[str]:
    return {*_options.kinds(Settings), *STORE_OPTIONS}
