"""The client of aioboto3, on which no other module depends, and the credentials of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import glob
import hashlib
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from s3cache.errors import ClosedError, S3CacheError
from s3cache.store._s3_errors import (
    distrusts_server,
    is_page,
    page_error,
    refuses_credentials,
    translate,
    translate_source,
)
from s3cache.util import __version__
from s3cache.util.logs import quiet_libraries, watch_libraries
from s3cache.util.threads import new_event_loop, threads_are_greenlets

if TYPE_CHECKING:
    from s3cache.store._options import S3Options

_T = TypeVar("_T")

CHUNK_BYTES = 256 << 10
# For one load, which may wait for a program, a metadata service or STS on a thread that the exit
# waits for.
_LOAD_TIMEOUT_S = 30.0
# As botocore: ask for others in the background when these end so soon.
_RENEW_BEFORE_S = 15 * 60
# The pauses between loads that bring nothing new.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_KILL_TIMEOUT_S = 1.0
# A word of a variable or of a line in a file.
_PATH = re.compile(r"""(?:^|(?<=[\s="',;]))[~/][^\s"',;]+""", re.MULTILINE)
_MAX_FILE_BYTES = 1 << 20
# The fields that S3Store reads from answers to the most frequent requests.
_READ_OF_GET, _READ_OF_PUT = {"Body", "ContentLength", "ContentRange", "ETag"}, {"ETag"}


class Clients:
    """One client at a time, opened by the first call that needs it, and its credentials.

    A call that fails is made again, once, if what the client read has been renewed since: the
    credentials that a server refuses, or the certificates with which it does not trust a server.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._is_outdated = False
        self._pause = Pause(options)
        has_own = options.access_key is not None or options.anonymous
        self._credentials = None if has_own else Credentials(options)

    async def run(self, work: Callable[[Any], Awaitable[_T]]) -> _T:
        """Return the result of ``work``, which gets the client.

        Raises ClosedError if the store is closed or in use on another event loop, and
        CredentialsError if there are no credentials.
        """
        with quiet_libraries():
            client = await self._get()
            keys = self._credentials and self._credentials.keys
            try:
                return await work(client)
            except Exception as error:
                if not await self._renew(client, keys, error):
                    raise
            return await work(await self._get())  # it may be closed meanwhile

    def forget_failures(self) -> None:
        """Make no pause before the next call loads credentials or certificates again."""
        self._pause.end()
        if self._credentials is not None:
            self._credentials.pause.end()

    async def aclose(self) -> None:
        self._closed = True
        if self._credentials is not None:
            self._credentials.close()
        async with self._opening:
            client, self._client = self._client, None
            if client is not None:
                await client.close()

    async def _get(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is not None and loop is not self._loop:
            raise ClosedError("the store is in use on another event loop; open a store for each")
        if self._credentials is not None and not self._closed:
            await self._credentials.get_frozen_credentials()
        if self._client is not None and not self._is_outdated:
            return self._client
        async with self._opening:
            if self._closed:
                raise ClosedError("the store is closed")
            if self._client is None or self._is_outdated:
                seen = await asyncio.to_thread(self._pause.inputs)
                opened = await off_loop(lambda: _open_client(self._options, self._credentials))
                former, self._client = self._client, opened
                self._loop, self._is_outdated = loop, False
                self._pause.begin(seen, is_first=former is None)
                if former is not None:
                    await former.close()
            return self._client

    async def _renew(self, client: Any, keys: Any, error: Exception) -> bool:
        """Return whether ``error`` may not occur with the present client and credentials."""
        if distrusts_server(error):
            if client is self._client and await self._pause.is_over_or_moot():
                self._is_outdated = True
            return self._is_outdated or client is not self._client
        if self._credentials is None or not refuses_credentials(error):
            return False
        return await self._credentials.replace(keys)


# -- making a client


async def _open_client(options: S3Options, credentials: Credentials | None) -> Any:
    """Return an open aioboto3 client; ``await client.close()`` ends it."""
    # A client is not bound to a loop before its first request, which opens the connection pool.
    import aioboto3
    import aioboto3.s3.inject  # else the first client would import it
    from aiobotocore.config import AioConfig
    from botocore import UNSIGNED

    await asyncio.sleep(0)  # so that a fork need not wait for the rest too
    s3: dict[str, Any] = {"payload_signing_enabled": True}
    if options.addressing_style != "auto":  # else ~/.aws/config decides
        s3["addressing_style"] = options.addressing_style
    runtime = f"python/{platform.python_version()} {platform.system().lower()}"
    config = AioConfig(
        http_session_cls=_http_session(),
        # RetryingStore does the retries; 1 is the first attempt.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The signature covers the body's SHA-256, which every server verifies. botocore's own
        # checksums are trailers, which Ceph RGW 16 and others refuse.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=s3,
        signature_version=UNSIGNED if options.anonymous else None,
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=options.max_pool_connections,
        proxies={"http": options.proxy, "https": options.proxy} if options.proxy else None,
        # Complete, because botocore would assemble its own for each request.
        user_agent=f"s3cache/{__version__} aioboto3/{aioboto3.__version__} {runtime}",
        parameter_validation=False,  # our parameters are valid
    )
    botocore_session = new_session(options)
    if credentials is not None:
        botocore_session.register_component("credential_provider", credentials)
    session = aioboto3.Session(
        botocore_session=botocore_session,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
    )
    session.events.register_last("before-call.s3", _before_call)
    session.events.register_last("before-parse.s3", _refuse_page)
    client = session.client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint,
        verify=options.ca_bundle,
        config=config,
    )
    return await client.__aenter__()


def _before_call(model: Any, params: dict[str, Any], **_: Any) -> None:
    # For a file body botocore adds "Expect: 100-continue", and aiohttp then waits for an answer
    # that some servers and proxies never send. It would also cost a round trip for each write.
    params["headers"].pop("Expect", None)
    # After a redirect botocore sends HEAD to find the bucket's region. It would repeat this without
    # end if the answer were another redirect.
    if model.name == "HeadBucket":
        params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _refuse_page(response_dict: dict[str, Any], **_: Any) -> None:
    # botocore would return the page as an object.
    if response_dict["status_code"] in (200, 206) and is_page(response_dict["headers"]):
        getattr(response_dict["body"], "close", bool)()  # a body that was not read
        raise page_error()


@cache
def _http_session() -> Any:
    """Return the class of HTTP sessions for clients, which follow no redirects."""
    # aiohttp would follow a redirect to any server, with session token and the customer's key.
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(session.request, allow_redirects=False))

    return Session


# -- credentials


class Credentials:
    """The credentials of the requests of one store.

    botocore's signers call :meth:`get_frozen_credentials`. Each load asks botocore's chain from its
    start, so it finds files, variables and roles as they are now. Credentials that have not ended
    are used whether or not others can be loaded.
    """

    method = "s3cache"  # read by botocore

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._found: _Found | None = None
        self._failure: S3CacheError | None = None
        self._loading: asyncio.Task[None] | None = None
        self._programs = _Programs()
        self.pause = Pause(options)

    @property
    def keys(self) -> Any:
        """The keys in use, as botocore's tuple; None before the first load."""
        return self._found and self._found.keys

    async def get_frozen_credentials(self) -> Any:
        """Return keys that have not ended; raise CredentialsError if there are none."""
        usable = self._usable()
        if usable is None:
            if self._failure is None or await self.pause.is_over_or_moot():
                await asyncio.wait([self._load()])  # goes on if this call is cancelled
            if (usable := self._usable()) is None:
                # Each caller adds where it happened.
                raise copy.copy(self._failure or ClosedError("the store is closed"))
        elif usable.ends_within(_RENEW_BEFORE_S) and self.pause.is_over:
            self._load()
        return usable.keys

    async def replace(self, refused: Any) -> bool:
        """Load again, unless it is too early; return whether there are others than ``refused``."""
        if self.keys == refused and await self.pause.is_over_or_moot():
            await asyncio.wait([self._load()])
        return self._usable() is not None and self.keys != refused

    # botocore takes this object for its chain too. No endpoint of S3 depends on the account.

    async def load_credentials(self) -> Credentials:
        return self

    def get_deferred_property(self, property_name: str) -> Any:
        return getattr(self, f"get_{property_name}", None)

    async def get_account_id(self) -> None: ...

    def close(self) -> None:
        """End a running load, and its program."""
        if self._loading is not None:
            self._loading.cancel()
        self._programs.close()

    def _usable(self) -> _Found | None:
        return None if self._found is None or self._found.ends_within(0) else self._found

    def _load(self) -> asyncio.Task[None]:
        """Start a load if none is running; return it."""
        if self._loading is None or self._loading.done():
            self._loading = asyncio.ensure_future(self._load_now())
        return self._loading

    async def _load_now(self) -> None:
        former = self.keys
        seen = await asyncio.to_thread(self.pause.inputs)  # first: they may change meanwhile
        try:
            loaded = await off_loop(lambda: _load(self._options, _LOAD_TIMEOUT_S, self._programs))
            if loaded is None:
                from botocore.exceptions import NoCredentialsError

                raise NoCredentialsError
            self._found, self._failure = loaded, None
        except Exception as error:  # noqa: BLE001 - raised by each call that needs credentials
            self._failure = translate(error, op="", store="")
        self.pause.begin(seen, is_first=self.keys != former)


class Pause:
    """Decides when to load again what is made from variables and files, after it was of no use.

    The pause doubles with each useless load. It is moot as soon as a variable or file changed.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._seen = ""
        self._look: asyncio.Task[str] | None = None
        self._pause_s, self._until = 0.0, float("-inf")

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    async def is_over_or_moot(self) -> bool:
        if self.is_over:
            return True
        if self._look is None or self._look.done():  # one thread, even if a file system hangs
            self._look = asyncio.ensure_future(asyncio.to_thread(self.inputs))
        await asyncio.wait([look := self._look])
        return look.result() != self._seen

    def begin(self, seen: str, *, is_first: bool) -> None:
        """Begin a pause after a load that began when :meth:`inputs` returned ``seen``."""
        double_s = 0.0 if is_first else 2 * self._pause_s
        self._seen, self._pause_s = seen, min(double_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._until = time.monotonic() + self._pause_s

    def end(self) -> None:
        self._pause_s, self._until = 0.0, float("-inf")

    def inputs(self) -> str:
        """Return a digest of all that botocore reads: variables, files, and files named in them.

        It reads files, so it must not run on the event loop.
        """

        def read(path: str) -> str:
            try:
                with open(os.path.expanduser(path), "rb") as file:
                    return file.read(_MAX_FILE_BYTES).decode(errors="replace")
            except OSError as error:
                return str(error.errno)

        def state_of(path: str) -> tuple[int, ...]:
            with contextlib.suppress(OSError, ValueError):
                status = os.stat(os.path.expanduser(path))
                return status.st_mtime_ns, status.st_size, status.st_ino
            return ()

        variables = {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
        files = [
            variables.get("AWS_CONFIG_FILE") or "~/.aws/config",
            variables.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        ]
        texts = [*variables.values(), *map(read, files), self._options.ca_bundle or ""]
        paths = {path for text in texts for path in _PATH.findall(text)}
        paths |= {*glob.glob(os.path.expanduser("~/.aws/*/cache/*"))}  # of aws sso login
        state = [variables, texts, [(path, state_of(path)) for path in sorted(paths)]]
        return hashlib.sha256(repr(state).encode(errors="replace")).hexdigest()


# -- a load


@dataclass(frozen=True, slots=True)
class _Found:
    keys: Any
    source: str
    ends_within: Callable[[float], bool]  # seconds


# What botocore calls the sources in its chain; what they are, and what to do if one fails.
_SOURCES = {
    "env": ("the environment", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY again"),
    "custom-process": (
        "credential_process of {profile}",
        "run it by hand: it must ask nothing, end with 0 and print JSON as botocore wants it",
    ),
    "assume-role": (
        "the role of {profile}",
        "'aws sts get-caller-identity --profile {name}' must work and ask nothing",
    ),
    "assume-role-with-web-identity": (
        "the web identity token {token}",
        "check that the file is mounted, and that its service account may assume the role",
    ),
    "sso": ("the SSO session of {profile}", "run 'aws sso login --profile {name}'"),
    "shared-credentials-file": ("{credentials}", "check that file"),
    "config-file": ("{profile}", "check that file"),
    "container-role": (
        "the agent {agent}",
        "check that it runs, and the AWS_CONTAINER_* variables",
    ),
    "iam-role": ("the machine's role", "check the role, and that the metadata service answers"),
}
_OTHER_SOURCE = ("botocore's {method}", "check {profile}")
_MFA_FIX = (
    "a job has no terminal, so run 'eval \"$(aws configure export-credentials --profile {name} "
    "--format env)\"' before it (and set no profile=...), or use a profile without mfa_serial"
)


async def _load(options: S3Options, limit_s: float, programs: _Programs) -> _Found | None:
    """Ask each source of botocore's chain; return the first credentials that have not ended."""
    # Like botocore, ask no other after a source that is configured and has none: that is an error.
    until = time.monotonic() + limit_s
    session = new_session(options)
    if options.region is not None:
        session.set_config_variable("region", options.region)  # for STS
    method = "configuration"

    async def ask(provider: Any) -> _Found | None:
        if (loaded := await provider.load()) is None:
            return None
        # Those of a role are only loaded at their first use; others would be loaded twice.
        keys = getattr(loaded, "_frozen_credentials", None) or await loaded.get_frozen_credentials()
        ends_within = getattr(loaded, "refresh_needed", lambda _: False)
        if ends_within(0):
            raise ValueError("the credentials it has are expired")
        return _Found(keys, _describe(session, method)[0], ends_within)

    try:
        for provider in _providers(session, programs):
            method = provider.METHOD
            loaded = await asyncio.wait_for(ask(provider), until - time.monotonic())
            if loaded is not None:
                return loaded
        return None
    except Exception as error:  # noqa: BLE001 - it becomes one of ours
        source, fix = _describe(session, method)
        if isinstance(error, asyncio.TimeoutError):
            error = TimeoutError(f"no answer within {limit_s:.3g} s")
        elif isinstance(error, _PromptError):
            fix = _MFA_FIX.format(name=session.get_config_variable("profile") or "default")
        raise translate_source(error, source, fix) from None
    finally:
        await programs.end()


def _describe(session: Any, method: str) -> tuple[str, str]:
    """Return the words for a source of credentials, and what to do if it fails."""
    name = session.get_config_variable("profile") or "default"
    words = {
        "method": method,
        "name": name,
        "profile": f"profile {name} ({session.get_config_variable('config_file')})",
        "credentials": session.get_config_variable("credentials_file"),
        "token": os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE", f"of profile {name}"),
        "agent": os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "of this container"),
    }
    source, fix = _SOURCES.get(method, _OTHER_SOURCE)
    return source.format(**words), fix.format(**words)


def _providers(session: Any, programs: _Programs) -> Iterator[Any]:
    """Yield the sources of botocore's chain; keep them from reading the program's terminal."""

    def without_terminal(provider: Any) -> Any:
        if provider.METHOD == "custom-process":
            provider._popen = programs.start
        return provider

    for provider in session.get_component("credential_provider").providers:
        if provider.METHOD == "assume-role":
            provider._prompter = _PromptError.refuse
            builder = provider._profile_provider_builder  # makes those of source_profile
            create = builder._create_process_provider
            builder._create_process_provider = lambda name, create=create: without_terminal(
                create(name)
            )
        yield without_terminal(provider)


class _PromptError(Exception):
    """The role needs an MFA code, for which botocore would ask on the terminal."""

    @classmethod
    def refuse(cls, prompt: str) -> str:
        raise cls(prompt.strip(": "))


class _Programs:
    """The programs that a load starts, and that end with it at the latest."""

    def __init__(self) -> None:
        self._running: list[asyncio.subprocess.Process] = []
        self._is_closed = False

    async def start(self, *command: str, **pipes: Any) -> asyncio.subprocess.Process:
        # In a session of its own it cannot open the terminal as /dev/tty either.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, start_new_session=True, **pipes
        )
        self._running.append(process)
        if self._is_closed:
            self._kill()
        return process

    async def end(self) -> None:
        self._kill()
        for process in self._running:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_TIMEOUT_S)
        self._running.clear()

    def close(self) -> None:
        """End all, also those that start later; any thread may call it."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        for process in [*self._running]:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def credentials_source(options: S3Options, timeout_s: float) -> str | None:
    """Return the source of a client's credentials, or None if there are none.

    It runs an event loop. Raises CredentialsError if they cannot be loaded within ``timeout_s``.
    """
    if options.anonymous:
        return "nowhere: requests are anonymous"
    if options.access_key is not None:
        return "the options access_key and secret_key"
    with quiet_libraries():
        try:
            credentials = run_on_new_loop(lambda: _load(options, timeout_s, _Programs()))
        except Exception as error:
            raise translate(error, op="credentials", store=options.url) from error
    return None if credentials is None else credentials.source


# -- sessions of botocore, and where they may block


def new_session(options: S3Options) -> Any:
    from aiobotocore.session import AioSession

    watch_libraries("botocore", "aiobotocore", "aioboto3", "aiohttp")
    session = AioSession(profile=options.profile)
    session.register_component("data_loader", _model_loader())
    return session


@cache
def _model_loader() -> Any:
    """Return botocore's loader for all stores, without parts of its models that we do not use.

    With these, botocore would spend a quarter of a request's CPU time.
    """
    from botocore.loaders import create_loader

    loader = create_loader(os.environ.get("AWS_DATA_PATH"))
    shapes = loader.load_service_model("s3", "service-2")["shapes"]
    for shape, names in (("GetObjectOutput", _READ_OF_GET), ("PutObjectOutput", _READ_OF_PUT)):
        for name in shapes[shape]["members"].keys() - names:
            del shapes[shape]["members"][name]
    # botocore remembers the endpoint for equal parameters, but tries all rules for each new key.
    endpoints = loader.load_service_model("s3", "endpoint-rule-set-1")
    if "'Key'" not in repr(endpoints["rules"]):
        endpoints["parameters"].pop("Key", None)
    return loader


async def off_loop(work: Callable[[], Awaitable[_T]]) -> _T:
    """Return the result of ``work``, run on another thread with its own event loop."""
    # It would block this loop: botocore's import takes 0.7 s, and it reads files.
    if threads_are_greenlets():  # they share one thread, so no second loop can run
        return await work()
    # Import on the loop too: a forked child must not inherit a partly imported module.
    return await asyncio.to_thread(run_on_new_loop, work)


def run_on_new_loop(work: Callable[[], Awaitable[_T]]) -> _T:
    loop = new_event_loop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
