"""``s3cache doctor``, ``stats``, ``version`` and ``keygen``: set up and check an installation."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from s3cache.cli._options import Text, Url, Where, flattened, until_done
from s3cache.cli._output import Output, redacted, size_text
from s3cache.errors import ConfigError
from s3cache.util import __version__
from s3cache.util.pages import pointer
from s3cache.util.words import counted

if TYPE_CHECKING:
    from s3cache.manage import Place

__all__ = ["doctor", "keygen", "stats", "version"]

# -- doctor


def doctor(
    out: Output,
    url: Url = None,
    write: Annotated[
        bool, Option("--write/--no-write", help="Write a test object, and remove it.")
    ] = True,
    programs: Annotated[
        bool, Option("--programs/--no-programs", help="Also start torch and the compiler.")
    ] = True,
    timeout: Annotated[float, Option(help="Seconds for any one request.", min=0.1)] = 15.0,
) -> int:
    """Check settings, credentials, rights, latency, clock, disk, torch, compiler and trust.

    Each check has a verdict and, if something is wrong, a fix and the command that explains it.
    Exits with 1 if there is a fault. Every check ends in bounded time.
    """
    from s3cache.insight import examine

    faults = warnings = 0
    for check in examine(url, may_write=write, programs=programs, timeout_s=timeout):
        faults += check.verdict == "fault"
        warnings += check.verdict == "warning"
        found, fix = redacted(check.found), redacted(check.fix)
        if out.json:
            names = ("name", "verdict", "code", "section")
            record = {name: getattr(check, name) for name in names}
            out.record({**record, "found": found, "fix": fix})
            continue
        out.line(f"{check.verdict:8} {check.name}: {found}")
        if fix:
            out.line(f"{'':8} fix: {fix}{f' {pointer(*check.codes)}' if check.codes else ''}")
    out.note(f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}")
    return 1 if faults else 0


# -- stats


def stats(where: Where, out: Output) -> None:
    """Count the entries in the remote and in the local tier, and the uploads that are pending.

    With --local it counts the local tier only. Hits and misses are counted by each process that
    compiles: with S3CACHE_SUMMARY=1 it prints them at its end.
    """
    from s3cache.manage import open_place
    from s3cache.settings import Settings

    found: dict[str, Any] = {}
    settings, _ = Settings.load(where.url)
    if settings.local:
        with open_place(where.url, in_tier=True, of_all=True) as place:
            found["local"] = {
                **_tier_totals(place),
                "directory": settings.local_dir,
                "max_bytes": settings.local_max_bytes,
                "max_files": settings.local_max_files,
                "to_upload": len(until_done(place.to_upload())),
            }
    if settings.url is not None and not where.local:
        with open_place(where.url) as place:
            found["remote"] = {**_tier_totals(place), "url": place.store.url}
    if out.json:
        out.record(found)
        return
    for name, tier in found.items():
        place_of = tier.get("url") or tier["directory"]
        out.line(f"{name}: {place_of}")
        out.line(
            f"  {counted(tier['entries'], 'entry', 'entries')} under "
            f"{counted(tier['keys'], 'key')}, {size_text(tier['bytes'])}"
        )
        if name == "local":
            share = tier["bytes"] / tier["max_bytes"]
            out.line(f"  {share:.0%} of {size_text(tier['max_bytes'])}")
            out.line(f"  {tier['to_upload']} to upload")


def _tier_totals(place: Place) -> dict[str, int]:
    from s3cache.manage import scan

    entries = size = firsts = 0
    here: set[str] = set()
    for item in flattened(scan(place.store, is_local=place.is_local)):
        entries += 1
        size += item.size
        # There is one first entry to a key. A local tier may have others only, and is bounded.
        if place.is_local:
            here.add(item.name.rpartition(".")[0])
        else:
            firsts += item.name.endswith(".0")
    return {"entries": entries, "keys": len(here) if place.is_local else firsts, "bytes": size}


# -- version

_PACKAGES = (
    *("torch", "triton", "aioboto3", "aiobotocore", "botocore", "aiohttp", "msgpack"),
    *("zstandard", "tenacity", "pynacl", "typer", "rich"),
)


def version(out: Output) -> None:
    """Print the versions of s3cache and of everything that it needs, for a bug report."""
    from importlib import metadata

    found = {
        "s3cache": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "executable": sys.executable,
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    if out.json:
        out.record(found)
        return
    width = max(map(len, found))
    for name, text in found.items():
        out.line(f"{name:{width}}  {text}")


# -- keygen


def keygen(
    out: Output,
    name: Annotated[str, Argument(help="The name of the key, such as ci-main-1: readers see it.")],
    to: Annotated[
        Text, Option(metavar="FILE", help="For the secret key.", show_default="NAME.key")
    ] = None,
    shared: Annotated[
        bool,
        Option("--shared", help="One secret for all machines: each of them can then sign."),
    ] = False,
) -> None:
    """Make a key that signs entries, and the public key to trust.

    The secret key goes to a file that only you can read. The output has the settings for machines
    that save and for machines that read.
    """
    from s3cache.trust import Algorithm, VerifyKey, generate

    path = to or f"{name}.key"
    key = generate(name, Algorithm.HMAC_SHA256 if shared else Algorithm.ED25519)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        problem = f"cannot be made ({exc.strerror})"
        raise ConfigError(f"key file {path}", problem, "name another") from None
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)  # whatever the umask
        file.write(f"{key.secret_text()}\n")
    file_name = os.path.abspath(path)
    trusted = f"$(cat {file_name})" if shared else key.public_text()
    fingerprint = VerifyKey.parse(key.public_text()).fingerprint
    if out.json:
        public = None if shared else key.public_text()
        out.record({"signing_key": file_name, "trusted_key": public, "fingerprint": fingerprint})
        return
    sys.stdout.write(
        f"S3CACHE_SIGNING_KEY={file_name}  # where entries are saved\n"
        f'S3CACHE_TRUSTED_KEYS="{trusted}"  # where they are read\n'
        f"# to revoke it: S3CACHE_REVOKED={fingerprint}\n"
    )
