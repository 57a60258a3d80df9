"""Credentials and certificates: their sources, how long they are used, and when they are renewed.

Servers on this machine stand in for S3, STS and the agent of a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import pty
import ssl
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeAlias

import pytest
from aiobotocore.session import AioSession

from s3cache.errors import (
    AccessDeniedError,
    CircuitOpenError,
    ClosedError,
    CredentialsError,
    PermanentError,
    Reason,
    reason_for,
)
from s3cache.store import BreakingStore, S3Options, S3Store, credentials_source
from s3cache.tier import FlushReport
from s3cache.util.threads import Breaker
from tests.support.caching import KEY, OTHER, entry, open_cache
from tests.support.certificates import Authority
from tests.support.processes import KEYS
from tests.support.scripted import Reply, Request, ScriptedServer, error_reply
from tests.support.waiting import eventually, is_running

FROM_CHAIN = {"access_key": None, "secret_key": None, "conditional_create": "native"}
Accept: TypeAlias = "Callable[[str], None]"
OLD, NEW, NEWER = "AKIAOLD", "AKIANEW", "AKIANEWER"


def keys(path: Path, access_key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = s\n")


def granted(minutes: float = 60) -> Reply:
    """Return the answer of an agent or metadata service."""
    ends = datetime.now(timezone.utc) + timedelta(minutes=minutes)
    fields = {"AccessKeyId": NEW, "SecretAccessKey": "s", "Token": "t"}
    fields["Expiration"] = ends.strftime("%Y-%m-%dT%H:%M:%SZ")
    return Reply(body=json.dumps(fields).encode())


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", path := str(tmp_path / "credentials"))
    return Path(path)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AWS_CONFIG_FILE", path := str(tmp_path / "config"))
    return Path(path)


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as agent:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{agent.url}/credentials")
        yield agent


@pytest.fixture
def accept(server: ScriptedServer) -> Accept:
    """Return a function that lets the server of the bucket accept one access key only."""

    def accept(access_key: str) -> None:
        def answer(request: Request) -> Reply:
            if f"={access_key.lower()}/" not in request.headers.get("authorization", ""):
                return error_reply(403, "ExpiredToken", "The provided token has expired.")
            return Reply(headers={"etag": '"e"', "last-modified": "Sat, 28 Nov 2026 09:00:00 GMT"})

        server.answer = answer

    accept(NEW)
    return accept


@pytest.fixture
def s3(accept: object, server: ScriptedServer) -> S3Store:
    return server.open(**FROM_CHAIN)


async def is_refused(s3: S3Store) -> None:
    with pytest.raises(AccessDeniedError, match="expired"):
        await s3.put("key", b"data")


# -- renewed credentials


@pytest.mark.parametrize("place", ["file", "environment"])
async def test_renewed_credentials_are_used_at_once_each_time(
    place: str, s3: S3Store, accept: Accept, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clusters renew short-lived credentials in this file, but botocore reads it only once."""

    def write(access_key: str) -> None:
        if place == "file":
            keys(credentials, access_key)
        else:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")

    write(OLD)
    await is_refused(s3)
    for access_key in (NEW, NEWER):
        accept(access_key)
        await is_refused(s3)
        await is_refused(s3)
        write(access_key)
        await s3.put("key", b"data")


async def test_a_call_does_not_fail_if_its_credentials_were_renewed_before(
    s3: S3Store, accept: Accept, credentials: Path
) -> None:
    keys(credentials, NEW)
    await s3.put("key", b"data")
    accept(NEWER)
    keys(credentials, NEWER)
    calls = [s3.put("key", b"data"), s3.head("key"), s3.get("key"), s3.delete("key")]
    await asyncio.gather(*calls)


@pytest.mark.parametrize("end", ["flush", "close"])
async def test_a_flush_and_the_exit_load_credentials_again(
    end: str, s3: S3Store, server: ScriptedServer, config: Path, tmp_path: Path
) -> None:
    """Nothing shows that the output of a program has changed. A pod's disk ends with the pod."""
    program, output, runs = (tmp_path / name for name in ("program", "output", "runs"))
    program.write_text(f"echo >> {runs}; cat {tmp_path}/out*")
    config.write_text(f"[default]\ncredential_process = sh {program}\n")
    output.write_text('{"Version": 1, "AccessKeyId": "AKIAOLD", "SecretAccessKey": "s"}')

    def save_while_refused() -> FlushReport:
        with open_cache(tmp_path / "local", s3, exit_timeout_s=60) as cache:
            cache.save(KEY, entry())
            eventually(lambda: cache.lookup(OTHER) and len(runs.read_text()) >= 2)
            cache.lookup(OTHER)
            output.write_text(output.read_text().replace(OLD, NEW))
            report: FlushReport = getattr(cache, end)()
            return report

    report = await asyncio.to_thread(save_while_refused)
    assert report.complete
    assert server.made("PUT", KEY)


# -- sources that fail


@pytest.mark.parametrize(("minutes", "fault"), [(8, Reply(500)), (12, Reply(delay_s=30))])
async def test_valid_credentials_are_used_while_their_agent_is_down(
    minutes: float, fault: Reply, s3: S3Store, agent: ScriptedServer
) -> None:
    """botocore asks the agent before each request if they end in 15 minutes, and waits."""
    replies = [granted(minutes)]
    agent.answer = lambda _: replies.pop() if replies else fault
    await s3.put("key", b"data")
    started = time.monotonic()
    for _ in range(40):
        await s3.put("key", b"data")
        await asyncio.sleep(0.03)
    assert time.monotonic() - started < 20
    assert len(agent.requests) < 20


async def test_a_failing_source_is_asked_again_after_a_pause_and_not_by_each_call(
    s3: S3Store, agent: ScriptedServer
) -> None:
    agent.answer = lambda _: Reply(404)
    with pytest.raises(CredentialsError, match=agent.url):
        await s3.put("key", b"data")
    asked = len(agent.requests)
    for _ in range(20):
        with pytest.raises(CredentialsError, match=agent.url):
            await s3.put("key", b"data")
    assert len(agent.requests) < 4 * asked
    agent.answer = lambda _: granted()
    written = False
    while not written:
        await asyncio.sleep(0.05)
        with contextlib.suppress(CredentialsError):
            await s3.put("key", b"data")
            written = True


async def test_failures_without_credentials_open_the_breaker(s3: S3Store) -> None:
    """Misses keep their reason while it is open."""
    breaking = BreakingStore(s3, Breaker(2, 10))
    for _ in range(2):
        with pytest.raises(CredentialsError, match="no credentials were found"):
            await breaking.get("key")
    with pytest.raises(CircuitOpenError) as caught:
        await breaking.get("key")
    assert reason_for(caught.value) is Reason.DENIED


SSO = "sso_start_url = https://x\nsso_region = r\nsso_account_id = 1\nsso_role_name = r\n"
ROLE = "role_arn = arn:aws:iam::1:role/r\nsource_profile = base\n"
BASE = "[profile base]\naws_access_key_id = AKIA\naws_secret_access_key = s\n"


TOKEN = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/opt/token", "AWS_ROLE_ARN": "arn:aws:iam::1:role/r"}
ENDED = {
    "AWS_ACCESS_KEY_ID": NEW,
    "AWS_SECRET_ACCESS_KEY": "s",
    "AWS_CREDENTIAL_EXPIRATION": "2020-01-01T00:00:00Z",
}
PROGRAM = "credential_process ="
# The default profile, variables, and what the message names.
BROKEN: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "missing": (f"{PROGRAM} /opt/nowhere/get", {}, ["/config)", "'/opt/nowhere/get'", "by hand"]),
    "garbage": (f"{PROGRAM} echo hello", {}, ["credential_process of profile default", "JSON"]),
    "fails": (f"{PROGRAM} sh -c 'echo no ticket >&2; exit 3'", {}, ["no ticket"]),
    "keyless": (f"{PROGRAM} echo '{{\"Version\": 1}}'", {}, ["AccessKeyId", "/config)"]),
    "token": ("", TOKEN, ["web identity token /opt/token", "mounted"]),
    "sts": (f"{ROLE}{BASE}", {}, ["the role of profile default", "AssumeRole"]),
    "source": (
        f"{ROLE}[profile base]\n{PROGRAM} /opt/nowhere/get",
        {},
        ["'/opt/nowhere/get'", "the role of profile default"],
    ),
    "sso": (SSO, {}, ["SSO", "aws sso login"]),
    "half": ("aws_access_key_id = AKIA", {}, ["one key of a pair is missing"]),
    "profile": ("", {"AWS_PROFILE": "nope"}, ["nope", "list-profiles"]),
    "broken": ("[broken", {}, ["/config", "parse"]),
    "ended": ("", ENDED, ["the environment", "expired"]),
}


@pytest.mark.parametrize("source", BROKEN)
async def test_a_broken_source_is_named_with_its_file(
    source: str, s3: S3Store, server: ScriptedServer, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, variables, named = BROKEN[source]
    config.write_text(f"[default]\n{text}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with ScriptedServer() as sts:
        refusal = "not authorized to perform: sts:AssumeRole"
        sts.answer = lambda _: error_reply(403, "AccessDenied", refusal)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        with pytest.raises(CredentialsError) as caught:
            await s3.get("key")
    for part in named:
        assert part in str(caught.value)
    assert reason_for(caught.value) is Reason.DENIED
    assert not server.requests


def hanging(config: Path) -> Path:
    """Configure a program that hangs; return the file to which it writes its process id."""
    pid = config.with_name("pid")
    config.write_text(f"[default]\n{PROGRAM} sh -c 'echo $$ > {pid}; sleep 600'")
    return pid


def test_a_program_that_hangs_is_killed(config: Path) -> None:
    pid = hanging(config)
    with pytest.raises(CredentialsError, match="no answer within 2 s"):
        credentials_source(S3Options("bucket", region="us-east-1"), 2)
    assert not is_running(int(pid.read_text()))


async def test_a_close_ends_a_program_that_hangs(s3: S3Store, config: Path) -> None:
    pid = hanging(config)
    call = asyncio.ensure_future(s3.get("key"))
    await asyncio.to_thread(eventually, lambda: pid.exists() and pid.read_text().strip())
    await s3.aclose()
    with pytest.raises(ClosedError):
        await call
    await asyncio.to_thread(eventually, lambda: not is_running(int(pid.read_text())), 20)


# -- the terminal, and logs of libraries


@pytest.mark.parametrize(
    ("profile", "named"),
    [
        (f"{ROLE}mfa_serial = arn:mfa", "arn:mfa"),
        ("credential_process = sh -c 'read a; echo $a >&2; read b < /dev/tty; exit 1'", "tty"),
    ],
    ids=["mfa", "program"],
)
def test_no_source_reads_the_terminal(
    profile: str, named: str, config: Path, tmp_path: Path
) -> None:
    """What the user types is for the program."""
    config.write_text(f"[default]\n{profile}\n{BASE}")
    program = f"""
        import s3cache
        url = "s3://bucket/p?endpoint_url=http://127.0.0.1:9&region=us-east-1"
        where = {str(tmp_path / "local")!r}
        cache = s3cache.Cache.open(url, local_dir=where, lookup_timeout_s=60)
        print("answer:", cache.lookup("0" * 32).reason)
        print("line:", input())
    """
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.write(ours, b"mine\n\x04")  # and the end of the input
        out, err = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert out == "answer: denied\nline: mine\n"
    assert len(err.splitlines()) == 1
    assert named in err
    assert "mine" not in err


async def test_a_failing_source_is_logged_in_one_line_and_other_users_keep_their_log(
    s3: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)

    def seen() -> list[str]:
        return [record.name for record in caplog.records if record.levelno >= logging.WARNING]

    def look_up() -> None:
        with open_cache(tmp_path / "local", s3) as cache:
            for number in range(20):
                cache.lookup(f"{number:032x}")
                s3.forget_failures()

    await asyncio.to_thread(look_up)
    assert seen() == ["s3cache.storage"]
    theirs = await AioSession().get_credentials()
    with pytest.raises(FileNotFoundError):
        await theirs.get_frozen_credentials()
    assert seen() == ["s3cache.storage", "aiobotocore.credentials"]


# -- certificates


async def test_a_certificate_and_its_bundle_may_be_replaced_in_place(tmp_path: Path) -> None:
    former, later = Authority("former"), Authority("later")
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes(former.certificate)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    former.certify(tls, tmp_path)
    async with ScriptedServer(tls) as server:
        server.answer = lambda _: Reply(headers={"etag": '"e"', "connection": "close"})
        options = S3Options("bucket", endpoint_url=server.url, ca_bundle=str(bundle), **KEYS)
        s3 = S3Store(options)
        await s3.put("key", b"data", mode="overwrite")
        for _ in range(2):
            later.certify(tls, tmp_path)
            with pytest.raises(PermanentError, match="not trusted"):
                await s3.put("key", b"data")
            bundle.write_bytes(later.certificate)
            await s3.put("key", b"data")
            later = Authority("latest")
        await s3.aclose()
