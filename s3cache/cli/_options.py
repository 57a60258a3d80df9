"""Define the options that several commands share, and open the place and entries that they name."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from typer import Option

from s3cache.cli._output import Output, size_text
from s3cache.errors import ConfigError
from s3cache.util.text import printable

if TYPE_CHECKING:
    from s3cache.manage import BatchResult, Item, Place, Scan, Selection

_T = TypeVar("_T")
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


_NOT_THERE = "nothing is there"
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

URL: str | None = Option(
    None, "--url", metavar="URL", help="Where the cache is.", show_default="S3CACHE_URL"
)


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
        return int(size(0).parse(text))
    except ValueError as exc:
        raise ConfigError(f"option {option}", *exc.args) from None


def check_file(thing: str, path: str) -> str:
    """Return ``path``, or raise ConfigError: a pipe or a device may block, or never end."""
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise ConfigError(thing, "cannot be read, or is no regular file", "name another")
    return path


def named_in(manifest: str) -> list[str]:
    """Return the keys, and names of objects, that a file has; ``-`` is standard input."""
    from s3cache.manage import read_manifest

    thing = f"manifest {manifest}"
    try:
        if manifest == "-":
            return read_manifest(manifest, sys.stdin)
        with open(check_file(thing, manifest), encoding="utf-8") as file:
            return read_manifest(manifest, file)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(thing, f"cannot be read ({exc})", "name another") from None


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


class Where:
    """The remote, or this machine's tier of it."""

    def __init__(
        self,
        url: str | None = URL,
        local: bool = Option(False, "--local", help="This machine's local tier, of all remotes."),
    ) -> None:
        self.url = url
        self.local = local

    def open(self) -> Place:
        """Open the remote, or what the tier holds of all remotes."""
        from s3cache.manage import open_place

        return open_place(self.url, in_tier=self.local, of_all=True)


# An option that chooses entries sets the field of ``Selection`` that has its name: its help, what
# its value is called (nothing for a flag), and how that is read. ``tuple`` makes an option that may
# be repeated.
_FILTERS: dict[str, tuple[str, str | None, Callable[[Any], Any]]] = {
    "key": ("Only keys that begin so; may be repeated.", "KEY", tuple),
    "manifest": (
        "Only what the file names, a key to a line; - for stdin.",
        "FILE",
        lambda file: frozenset(named_in(file)),
    ),
    "kind": ("Only aot, fx or shapes, or what other releases write.", "KIND", tuple),
    "torch": ("Only entries made by that torch, as 2.12 or 2.12.1.", "VERSION", tuple),
    "tag": ("Only entries with that cache_key_tag.", "TAG", tuple),
    "signer": ("Only entries that claim a signature by that key.", "NAME", tuple),
    "device": ("Only entries with code for that: cpu, cuda, xpu, mps.", "DEVICE", tuple),
    "never_hit": (
        "Only what the last 128 processes of this machine did not hit.",
        None,
        lambda _: frozenset(hits_here()),
    ),
    "older": (
        "Only entries not changed for so long: 90d, 12h.",
        "TIME",
        partial(duration_s, "--older"),
    ),
    "newer": ("Only entries changed within that time.", "TIME", partial(duration_s, "--newer")),
    "min_size": (
        "Only entries of that size or more, as 10MB.",
        "SIZE",
        partial(size_bytes, "--min-size"),
    ),
    "max_size": ("Only entries of that size or less.", "SIZE", partial(size_bytes, "--max-size")),
    "unreadable": ("Only entries that are damaged or out of place.", None, bool),
    "untrusted": ("Only entries that the trust settings refuse.", None, bool),
}


class Filters:
    """The entries that the options of ``_FILTERS`` choose."""

    def __init__(self, **given: Any) -> None:
        self.given = {name: value for name, value in given.items() if value not in (None, False)}

    def selection(self) -> Selection:
        """Read the values of the options."""
        from s3cache.manage import Selection

        return Selection(**{name: _FILTERS[name][2](value) for name, value in self.given.items()})


def _filter_parameter(name: str) -> inspect.Parameter:
    text, metavar, read = _FILTERS[name]
    kind: Any = bool if metavar is None else list[str] | None if read is tuple else str | None
    default = None if metavar else False
    option = Option(default, f"--{name.replace('_', '-')}", metavar=metavar, help=text)
    return inspect.Parameter(name, _KEYWORD_ONLY, default=option, annotation=kind)


Filters.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_filter_parameter(name) for name in _FILTERS]
)


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``command`` as Typer takes it: options in place of the groups that it asks for.

    A parameter annotated ``Output``, ``Where`` or ``Filters`` becomes the options of that group,
    and the command gets the group, made with their values.
    """
    own = _parameters(command)
    groups = {each.name: each.annotation for each in own if each.annotation in _GROUPS}
    options = {name: _parameters(group) for name, group in groups.items()}

    def wrapper(**given: Any) -> Any:
        made = {
            name: group(**{each.name: given.pop(each.name) for each in options[name]})
            for name, group in groups.items()
        }
        return command(**given, **made)

    parameters = [each for each in own if each.name not in groups]
    parameters += [each for of_group in options.values() for each in of_group]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapper.__doc__ = command.__doc__
    return wrapper


_GROUPS = (Output, Where, Filters)


def _parameters(of: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(of, eval_str=True).parameters.values()
    return [each.replace(kind=_KEYWORD_ONLY) for each in parameters]


def until_done(work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
    """Run ``work`` on the background loop and return its result; Ctrl-C ends it."""
    from s3cache.tier import background

    return background().wait(work, timeout_s)


def items_of(scan: Scan) -> Iterator[Item]:
    """Yield the entries of a scan, each batch of which is made when it is needed."""
    batches = scan.batches()

    async def step() -> list[Item] | None:
        return await anext(batches, None)

    while (batch := until_done(step())) is not None:
        yield from batch


def _warn_of_unmatched(scan: Scan) -> None:
    """Warn of filters that no entry meets, with ``--json`` too: they may be misspelt."""
    for (field, value), there in scan.unmatched().items():
        others = f"; entries have: {', '.join(there)}" if there else ""
        text = f"--{field} {value}: no entry has it{others}"
        sys.stderr.write(f"s3cache: warning: {printable(text)}\n")


def note_missing(out: Output, scan: Scan) -> int:
    """Note what a scan was to find and did not, and return the exit code."""
    _warn_of_unmatched(scan)
    for name in scan.absent:
        out.note(f"{name}: {_NOT_THERE}")
    return 1 if scan.absent else 0


def finish(out: Output, scan: Scan, tally: BatchResult, summary: str, **more: object) -> int:
    """Show what came of work on many entries, and return the exit code.

    The last line is ``summary``, with names of counts in braces; JSON also has ``more``.
    """
    _warn_of_unmatched(scan)
    for name in scan.absent:
        tally.fail(name, _NOT_THERE)
    if out.json:
        out.record({**more, **vars(tally)})
    else:
        for name, why in tally.failures:
            out.line(f"{name}: {why}")
        if tally.failed > len(tally.failures):
            out.line(f"and {tally.failed - len(tally.failures)} more")
        out.line(summary.format(**{**vars(tally), "size": size_text(tally.size)}))
    return 1 if tally.failed else 0
