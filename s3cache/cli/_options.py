"""Define the options that several commands share, and open the place and entries that they name."""

from __future__ import annotations

import inspect
import io
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, Optional, TypeVar

from typer import Option

from s3cache.cli._output import Output
from s3cache.errors import ConfigError
from s3cache.util.words import printable

if TYPE_CHECKING:
    from s3cache.manage import BatchResult, Item, Place, Selection

__all__ = [
    "NOT_THERE",
    "Number",
    "Steps",
    "Text",
    "Texts",
    "Url",
    "Where",
    "chosen",
    "duration_s",
    "entries_in",
    "finish",
    "flattened",
    "hits_here",
    "items_in",
    "named_in",
    "open_file",
    "size_bytes",
    "until_done",
    "with_groups",
]

_T = TypeVar("_T")
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

# Typer reads annotations while the program runs, in Python 3.10 too.
Text = Optional[str]  # noqa: UP045
Texts = Optional[list[str]]  # noqa: UP045
Number = Optional[int]  # noqa: UP045

#: What is said of each name that nothing lies under.
NOT_THERE = "nothing is there"
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Url = Annotated[
    Text, Option("--url", metavar="URL", help="Where the cache is.", show_default="S3CACHE_URL")
]
#: Of a program that is run and watched.
Steps = Annotated[
    Number,
    Option(
        metavar="N",
        help="End it after so many optimizer steps since it first compiled.",
        min=1,
        max=1000,
    ),
]


# -- groups of options


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``command`` as Typer takes it: options in place of the groups that it asks for.

    A parameter annotated ``Output``, ``Where`` or ``Selection`` becomes the options of that group,
    and the command gets what the group makes of them.
    """
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if group := _GROUPS.get(parameter.annotation):
            groups[name] = group, list(inspect.signature(group).parameters)
        else:
            parameters.append(_evaluated(parameter, command))
    for group, _ in groups.values():
        parameters += [
            _evaluated(each, group) for each in inspect.signature(group).parameters.values()
        ]

    def wrapper(**given: Any) -> Any:
        made = {
            name: group(**{each: given.pop(each) for each in names})
            for name, (group, names) in groups.items()
        }
        return command(**given, **made)

    parameters.sort(key=lambda each: each.default is not each.empty)
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapper.__doc__ = command.__doc__
    return wrapper


def _evaluated(parameter: inspect.Parameter, of: Callable[..., Any]) -> inspect.Parameter:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        function: Any = of.__init__ if isinstance(of, type) else of  # type: ignore[misc]
        annotation = eval(annotation, function.__globals__)  # noqa: S307 - our own code
    return parameter.replace(annotation=annotation, kind=_KEYWORD_ONLY)


class Where:
    """The remote, or this machine's tier of it."""

    def __init__(
        self,
        url: Url = None,
        local: Annotated[
            bool, Option("--local", help="This machine's local tier, of all remotes.")
        ] = False,
    ) -> None:
        self.url = url
        self.local = local

    def open(self) -> Place:
        """Open the remote, or what the tier holds of all remotes."""
        from s3cache.manage import open_place

        return open_place(self.url, in_tier=self.local, of_all=True)


# -- values of options


def duration_s(option: str, text: str) -> float:
    """Return the seconds that ``90d``, ``12h``, ``30min`` or ``10`` means."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?(\w*)", text)
    unit = _UNITS_S.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        fix = "give one, e.g. 90d, 12h or 30min"
        raise ConfigError(f"option {option}", f"{text!r} is no time", fix)
    return float(match[1]) * unit


def size_bytes(option: str, text: str) -> int:
    """Return the bytes that ``10MB`` or ``1GiB`` means."""
    from s3cache.util.options import size

    try:
        parsed: int = size(0).parse(text)
    except ValueError as exc:
        cause, fix = exc.args
        raise ConfigError(f"option {option}", cause, fix) from None
    return parsed


def open_file(thing: str, path: str) -> BinaryIO:
    """Open a regular file that the user names: a pipe or a device may block, or never end.

    Raises:
        ConfigError: it is no regular file, or cannot be opened.
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
    """Return the keys, and names of objects, that a file has; ``-`` is standard input.

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
        problem = f"cannot be read ({exc})"
        raise ConfigError(f"manifest {manifest}", problem, "name another") from None


def hits_here() -> Counter[str]:
    """Count the hits of each key that processes of this machine have recorded."""
    from s3cache.records import read_run, run_names
    from s3cache.settings import Settings

    settings, _ = Settings.load()
    hits: Counter[str] = Counter()
    with suppress(OSError):
        for name in run_names(settings.local_dir):
            with suppress(OSError):  # it has gone meanwhile
                run = read_run(settings.local_dir, name)
                hits.update(record.key for record in run.records if record.outcome == "hit")
    return hits


class _Filter(NamedTuple):
    """An option that chooses entries, and the field of `Selection` that it sets."""

    field: str
    help: str
    metavar: str | None = None  # None for a flag
    read: Callable[[Any], Any] = tuple  # which makes an option that may be repeated

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the option as a parameter that Typer reads."""
        kind: Any = bool if self.metavar is None else Texts if self.read is tuple else Text
        option = Option(f"--{name.replace('_', '-')}", metavar=self.metavar, help=self.help)
        default = None if self.metavar else False
        annotation = Annotated[kind, option]
        return inspect.Parameter(name, _KEYWORD_ONLY, default=default, annotation=annotation)


_FILTERS = {
    "key": _Filter("keys", "Only keys that begin so; may be repeated.", "KEY"),
    "manifest": _Filter(
        "named",
        "Only what the file names, a key to a line; - for stdin.",
        "FILE",
        lambda file: frozenset(named_in(file)),
    ),
    "kind": _Filter("kinds", "Only aot, fx or shapes, or what other releases write.", "KIND"),
    "torch": _Filter("torch", "Only entries made by that torch, as 2.12 or 2.12.1.", "VERSION"),
    "tag": _Filter("tags", "Only entries with that cache_key_tag.", "TAG"),
    "signer": _Filter("signers", "Only entries that claim a signature by that key.", "NAME"),
    "device": _Filter("devices", "Only entries with code for that: cpu, cuda, xpu, mps.", "DEVICE"),
    "never_hit": _Filter(
        "but_keys",
        "Only what the last 128 processes of this machine did not hit.",
        read=lambda _: frozenset(hits_here()),
    ),
    "older": _Filter(
        "older_s",
        "Only entries not changed for so long: 90d, 12h.",
        "TIME",
        partial(duration_s, "--older"),
    ),
    "newer": _Filter(
        "newer_s", "Only entries changed within that time.", "TIME", partial(duration_s, "--newer")
    ),
    "min_size": _Filter(
        "min_bytes",
        "Only entries of that size or more, as 10MB.",
        "SIZE",
        partial(size_bytes, "--min-size"),
    ),
    "max_size": _Filter(
        "max_bytes", "Only entries of that size or less.", "SIZE", partial(size_bytes, "--max-size")
    ),
    "unreadable": _Filter(
        "unreadable", "Only entries that are damaged or out of place.", read=bool
    ),
    "untrusted": _Filter("untrusted", "Only entries that the trust settings refuse.", read=bool),
}


def chosen(**given: Any) -> Selection:
    """Return the selection that the options of ``_FILTERS`` make."""
    from s3cache.manage import Selection

    return Selection(
        **{
            wanted.field: wanted.read(given[name])
            for name, wanted in _FILTERS.items()
            if given[name] not in (None, False)
        }
    )


chosen.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [wanted.parameter(name) for name, wanted in _FILTERS.items()]
)
_GROUPS: dict[str, Callable[..., Any]] = {"Output": Output, "Where": Where, "Selection": chosen}


# -- work on entries


def until_done(work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
    """Run ``work`` on the background loop and return its result; Ctrl-C ends it."""
    from s3cache.tier import background

    return background().wait(work, timeout_s)


def flattened(batches: AsyncIterator[list[_T]]) -> Iterator[_T]:
    """Yield what is in the batches, each of which is made when it is needed."""

    async def step() -> list[_T] | None:
        return await anext(batches, None)

    while (batch := until_done(step())) is not None:
        yield from batch


async def entries_in(
    place: Place, selection: Selection, absent: list[str], *, heads: bool = False
) -> AsyncIterator[list[Item]]:
    """Yield the entries of a place that are chosen, in batches.

    At the end it warns on standard error of each filter that no entry meets: it may be misspelt.

    Args:
        absent: gets each name of the selection that nothing lies under, at the end.
        heads: read headers even where nothing is chosen by them.
    """
    from s3cache.manage import FilterFeedback, scan

    feedback = FilterFeedback(selection, absent)
    batches = scan(
        place.store,
        selection,
        is_local=place.is_local,
        heads=heads,
        admit=place.policy.check,
        feedback=feedback,
    )
    async with aclosing(batches) as found:
        async for batch in found:
            yield batch
    for each in feedback.unmatched():
        option = f"--{each.field.removesuffix('s')}"
        there = f"; entries have: {', '.join(each.there)}" if each.there else ""
        text = f"{option} {each.value}: no entry has it{there}"
        sys.stderr.write(f"s3cache: warning: {printable(text)}\n")


def items_in(
    place: Place, selection: Selection, absent: list[str], *, heads: bool = False
) -> Iterator[Item]:
    """Yield the entries of :func:`entries_in` one by one."""
    return flattened(entries_in(place, selection, absent, heads=heads))


def finish(
    out: Output,
    tally: BatchResult,
    absent: list[str],
    summary: Callable[[BatchResult], str],
    **more: object,
) -> int:
    """Show what came of work on many entries, and return the exit code.

    Args:
        absent: names that nothing lies under; they count as failed.
        summary: the last line.
        more: what JSON has before the tally.
    """
    for name in absent:
        tally.fail(name, NOT_THERE)
    if out.json:
        out.record({**more, **vars(tally)})
    else:
        for name, why in tally.failures:
            out.line(f"{name}: {why}")
        if tally.failed > len(tally.failures):
            out.line(f"and {tally.failed - len(tally.failures)} more")
        out.line(summary(tally))
    return 1 if tally.failed else 0
