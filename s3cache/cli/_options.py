"""Define the options that several commands share, and open the place and entries that they name."""

from __future__ import annotations

import inspect
import io
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterator
from contextlib import aclosing, suppress
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Optional, TypeVar

import typer

from s3cache._words import printable
from s3cache.errors import ConfigError

if TYPE_CHECKING:
    from s3cache.manage import Place

__all__ = [
    "NOT_THERE",
    "Steps",
    "Url",
    "Where",
    "chosen",
    "duration_s",
    "entries_in",
    "grouped",
    "hits_here",
    "named_in",
    "open_file",
    "size_bytes",
    "until_done",
    "whole_batches",
]

# ruff: noqa: UP045 - Typer reads annotations while the program runs, in Python 3.10 too

_F = TypeVar("_F", bound=Callable[..., Any])


def grouped(**groups: Callable[..., Any]) -> Callable[[_F], Callable[..., Any]]:
    """Have a command take the options of ``groups``, and get what each makes of its own.

    ``@grouped(out=Output)`` above ``def ls(out, limit: int)`` gives a command with the options of
    ``Output.__init__`` and ``limit``.
    """

    def decorate(command: _F) -> Callable[..., Any]:
        parameters = _parameters(command, but=groups)
        names: dict[str, list[str]] = {}
        for name, group in groups.items():
            theirs = _parameters(group)
            names[name] = list(theirs)
            parameters.update(theirs)

        @wraps(command)
        def wrapper(**given: Any) -> Any:
            made = {
                name: group(**{each: given.pop(each) for each in names[name]})
                for name, group in groups.items()
            }
            return command(**given, **made)

        ordered = sorted(parameters.values(), key=lambda each: each.default is not each.empty)
        wrapper.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {each.name: each.annotation for each in ordered}
        del wrapper.__wrapped__  # its signature is not ours
        return wrapper

    return decorate


def _parameters(of: Callable[..., Any], but: Container[str] = ()) -> dict[str, inspect.Parameter]:
    """Its parameters with what their annotations mean; those of groups mean something here only."""
    function = vars(of)["__init__"] if isinstance(of, type) else of
    known = inspect.unwrap(function).__globals__
    return {
        name: parameter.replace(
            annotation=eval(parameter.annotation, known),  # noqa: S307 - our own code
            kind=inspect.Parameter.KEYWORD_ONLY,
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and name not in but
    }


#: What is said of each name that nothing lies under.
NOT_THERE = "nothing is there"

_T = TypeVar("_T")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


Url = Annotated[
    Optional[str],
    typer.Option("--url", metavar="URL", help="Where the cache is.", show_default="S3CACHE_URL"),
]

#: Of a program that is run and watched.
Steps = Annotated[
    Optional[int],
    typer.Option(
        metavar="N",
        help="End it when its optimizers have stepped so often since it first compiled.",
        min=1,
        max=1000,
    ),
]


class Where:
    """The remote, or this machine's tier of it, and whose entries are used."""

    def __init__(
        self,
        url: Url = None,
        local: Annotated[
            bool, typer.Option("--local", help="This machine's local tier, of all remotes.")
        ] = False,
    ) -> None:
        self.url = url
        self.local = local

    def open(self) -> Place:
        """Open the place that is meant: of the tier, what is there of all remotes."""
        from s3cache.manage import open_place

        return open_place(self.url, in_tier=self.local, of_all=True)


def until_done(work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
    """What comes of ``work`` on the background loop; Ctrl-C ends it."""
    from s3cache.transfer import background

    return background().wait(work, timeout_s)


def whole_batches(batches: AsyncIterator[list[_T]]) -> Iterator[list[_T]]:
    """The batches one by one, each made when it is asked for."""

    async def step() -> list[_T] | None:
        return await anext(batches, None)

    while (batch := until_done(step())) is not None:
        yield batch


async def entries_in(
    place: Any, selection: Any, absent: list[str], *, heads: bool = False
) -> AsyncIterator[list[Any]]:
    """What is chosen of a place, some at a time.

    In the end standard error has a line for what was asked for by a filter and no entry has: it may
    be misspelt, and kinds, tags and the like are whatever entries have.

    Args:
        absent: gets each name that the selection has and nothing lies under, in the end.
        heads: read headers even where nothing is chosen by them.
    """
    from s3cache.manage import Seen, scan

    seen = Seen(selection)
    batches = scan(
        place.store,
        selection,
        is_local=place.is_local,
        heads=heads,
        admit=place.policy.check,
        absent=absent.append,
        seen=seen.note,
    )
    async with aclosing(batches) as found:
        async for batch in found:
            yield batch
    for each in seen.unmatched():
        option = f"--{each.field.removesuffix('s')}"
        there = f"; entries have: {', '.join(each.there)}" if each.there else ""
        text = f"{option} {each.value}: no entry has it{there}"
        sys.stderr.write(f"s3cache: warning: {printable(text)}\n")


def chosen(
    key: Annotated[
        Optional[list[str]],
        typer.Option("--key", metavar="KEY", help="Keys that begin so; may be repeated."),
    ] = None,
    manifest: Annotated[
        Optional[str],
        typer.Option(metavar="FILE", help="Named there, a key to a line; - for stdin."),
    ] = None,
    kind: Annotated[
        Optional[list[str]],
        typer.Option(metavar="KIND", help="aot, fx or shapes, or what other releases write."),
    ] = None,
    torch: Annotated[
        Optional[list[str]],
        typer.Option(metavar="VERSION", help="Made by that torch, as 2.12 or 2.12.1."),
    ] = None,
    tag: Annotated[
        Optional[list[str]], typer.Option(metavar="TAG", help="With that cache_key_tag.")
    ] = None,
    signer: Annotated[
        Optional[list[str]],
        typer.Option(metavar="NAME", help="Signed by the key of that name, as they say."),
    ] = None,
    device: Annotated[
        Optional[list[str]],
        typer.Option(metavar="DEVICE", help="With code for that: cpu, cuda, xpu, mps."),
    ] = None,
    never_hit: Annotated[
        bool,
        typer.Option(
            "--never-hit", help="Not hit by this machine, as its last 128 processes recorded."
        ),
    ] = False,
    older: Annotated[
        Optional[str], typer.Option(metavar="TIME", help="Not changed for so long: 90d, 12h.")
    ] = None,
    newer: Annotated[
        Optional[str], typer.Option(metavar="TIME", help="Changed since so long ago.")
    ] = None,
    min_size: Annotated[
        Optional[str], typer.Option(metavar="SIZE", help="No smaller than, as 10MB.")
    ] = None,
    max_size: Annotated[Optional[str], typer.Option(metavar="SIZE", help="No larger than.")] = None,
    unreadable: Annotated[
        bool, typer.Option("--unreadable", help="Damaged, or where it does not belong.")
    ] = False,
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Not to be used, as the settings of trust have it.")
    ] = False,
) -> Any:
    """The selection that the options make."""
    from s3cache.manage import Selection

    return Selection(
        keys=tuple(key or ()),
        named=None if manifest is None else frozenset(named_in(manifest)),
        kinds=tuple(kind or ()),
        torch=tuple(torch or ()),
        tags=tuple(tag or ()),
        signers=tuple(signer or ()),
        devices=tuple(device or ()),
        but_keys=frozenset(hits_here()) if never_hit else None,
        older_s=None if older is None else duration_s("--older", older),
        newer_s=None if newer is None else duration_s("--newer", newer),
        min_bytes=None if min_size is None else size_bytes("--min-size", min_size),
        max_bytes=None if max_size is None else size_bytes("--max-size", max_size),
        unreadable=unreadable,
        untrusted=untrusted,
    )


def open_file(thing: str, path: str) -> BinaryIO:
    """Open a file that the user names, if it is a regular one: no other ever ends, or blocks.

    Raises:
        ConfigError: it is a directory, a pipe, a socket or a device, or cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        problem = f"cannot be read ({exc.strerror})"
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return open(fd, "rb")
        os.close(fd)
        problem = "is no regular file"
    raise ConfigError(thing, problem, "name another") from None


def named_in(manifest: str) -> list[str]:
    """Keys, and names of objects, that a file has; ``-`` is standard input.

    Raises:
        ConfigError: it cannot be read, or a line names no entry.
    """
    from s3cache.manage import read_manifest

    try:
        if manifest == "-":
            return read_manifest(manifest, sys.stdin)
        content = open_file(f"manifest {manifest}", manifest)
        with io.TextIOWrapper(content, encoding="utf-8") as file:
            return read_manifest(manifest, file)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"manifest {manifest}", f"cannot be read ({exc})", "name another"
        ) from None


def hits_here() -> Counter[str]:
    """How often each key was hit, as far as processes of this machine have it on record.

    What other machines hit nobody here knows.
    """
    from s3cache.records import read_run, run_names
    from s3cache.settings import Settings

    settings, _ = Settings.load()
    hits: Counter[str] = Counter()
    with suppress(OSError):
        for name in run_names(settings.local_dir):
            with suppress(OSError):  # it has gone meanwhile
                run = read_run(settings.local_dir, name)
                hits.update(each.key for each in run.records if each.outcome == "hit")
    return hits


def duration_s(option: str, text: str) -> float:
    """Seconds that ``90d``, ``12h``, ``30min`` or ``10`` means."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?(\w*)", text)
    unit = _UNITS_S.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"option {option}", f"{text!r} is no time", "give one, e.g. 90d, 12h or 30min"
        )
    return float(match[1]) * unit


def size_bytes(option: str, text: str) -> int:
    """Bytes that ``10MB`` or ``1GiB`` means."""
    from s3cache._options import size

    try:
        parsed: int = size(0).parse(text)
    except ValueError as exc:
        cause, fix = exc.args
        raise ConfigError(f"option {option}", cause, fix) from None
    return parsed
