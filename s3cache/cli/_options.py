"""Shared by commands: groups of options, work on many entries, and output."""

from __future__ import annotations

import inspect
import json as json_of
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from typer import Option

from s3cache import manage
from s3cache.errors import ConfigError
from s3cache.records import recorded
from s3cache.seam import features, named
from s3cache.settings import Settings
from s3cache.util.options import size
from s3cache.util.text import printable, printable_lines

_T = TypeVar("_T")
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
NOT_THERE = "there is no such entry"
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

URL: str | None = Option(
    None, "--url", metavar="URL", help="Where the cache is.", show_default="S3CACHE_URL"
)


def option(metavar: str, text: str, default: str | None = None) -> Any:
    """Return an option with a name for its value, and the help ``text``."""
    return Option(default, metavar=metavar, help=text)


# -- results: tables for people, JSON for programs, and nothing that could be a secret


class Output:
    """Standard output of a command: text, or with ``--json`` JSON and nothing else."""

    def __init__(
        self, json: bool = Option(False, "--json", help="JSON on standard output, for programs.")
    ) -> None:
        self.json = json

    def record(self, value: object) -> None:
        """Write one JSON value on one line."""
        sys.stdout.write(f"{json_text(value)}\n")

    def line(self, text: str) -> None:
        """Write one line, with terminal escape sequences escaped."""
        sys.stdout.write(f"{printable(text)}\n")

    def text(self, text: str) -> None:
        """Write several lines of our own; foreign text in them must have passed `printable`."""
        sys.stdout.write(f"{printable_lines(text)}\n")

    def note(self, text: str) -> None:
        """Write a line to standard error; with ``--json`` write nothing."""
        if not self.json:
            sys.stderr.write(f"{printable(text)}\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write aligned rows, below the names of the columns if there are any.

        Columns with names that begin with ``>`` are aligned to the right.
        """
        head = [[name.lstrip(">") for name in columns]] if columns else []
        cells = [[printable(str(cell)) for cell in row] for row in (*head, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = [">" if name.startswith(">") else "<" for name in columns] or ["<"] * len(widths)
        for row in cells:
            shown = map("{:{}{}}".format, row, sides, widths)
            sys.stdout.write("  ".join(shown).rstrip() + "\n")

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[], None]]:
        """Count on standard error, if it is a terminal; yield a function that adds one."""
        done, is_shown = 0, not self.json and sys.stderr.isatty()

        def advance() -> None:
            nonlocal done
            done += 1
            if is_shown:
                sys.stderr.write(f"{done} {what}\r")
                sys.stderr.flush()

        yield advance
        if is_shown:
            sys.stderr.write("\x1b[K")  # clear the line


def json_text(value: object) -> str:
    """Return ``value`` as JSON in one line; values without a JSON type become text."""
    return json_of.dumps(_jsonable(value))


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def size_text(size: float) -> str:
    """Format a size for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# -- values of options


def duration_s(flag: str, text: str) -> float:
    """Parse a duration such as ``90d``, ``12h``, ``30min`` or ``10`` to seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?(\w*)", text)
    unit = _UNITS_S.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        fix = "give one, e.g. 90d, 12h or 30min"
        raise ConfigError(f"option {flag}", f"{text!r} is not a time", fix)
    return float(match[1]) * unit


def size_bytes(flag: str, text: str) -> int:
    """Parse a size such as ``10MB`` or ``1GiB`` to bytes."""
    try:
        return int(size(0).parse(text))
    except ValueError as exc:
        raise ConfigError(f"option {flag}", *exc.args) from None


@contextmanager
def named_file(thing: str, done: str) -> Iterator[None]:
    """Raise ConfigError if the block cannot read or write a file that the user named."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as exc:
        cause = getattr(exc, "strerror", exc)
        raise ConfigError(thing, f"cannot be {done} ({cause})", "give another file") from None


def _named_in(flag: str, manifest: str) -> frozenset[str]:
    """Return the keys and names of objects in a file; ``-`` is standard input."""
    with named_file(f"{flag} {manifest}", "read"):
        lines = sys.stdin if manifest == "-" else Path(manifest).read_text("utf-8").splitlines()
        return manage.read_manifest(manifest, lines)


def _hit_here(*_: object) -> frozenset[str]:
    records = (record for run in recorded(Settings.load()[0].local_dirs) for record in run.records)
    return frozenset(record.key for record in records if record.outcome == "hit")


# -- groups of options


class Where:
    """The remote, or this machine's local tier."""

    def __init__(
        self,
        url: str | None = URL,
        local: bool = Option(False, "--local", help="This machine's local tier, of all remotes."),
    ) -> None:
        self.url = url
        self.local = local

    def open(self) -> manage.EntryLocation:
        """Open the remote, or the local tier with the entries of all remotes."""
        return manage.open_place(self.url, in_tier=self.local, of_all=True)


# Options that select entries, by the field of `Selection` that they set: the parser of the text
# (without one, the option may be repeated), the metavar (empty for a flag), and the help.
_FILTERS: dict[str, tuple[Callable[[str, str], Any] | None, str, str]] = {
    "key": (None, "KEY", "keys with this prefix; may be repeated"),
    "manifest": (_named_in, "FILE", "entries in this file, one key per line; - for stdin"),
    "kind": (None, "KIND", "aot, fx, triton or another kind"),
    "torch": (None, "VERSION", "entries made by this torch: 2.12"),
    "device": (None, "DEVICE", "entries with code for this device: cpu, cuda, xpu, mps"),
    "tag": (None, "TAG", "entries with this cache_key_tag"),
    "signer": (None, "NAME", "entries that name this key as their signer"),
    "never_hit": (_hit_here, "", "entries that the last 128 processes of this machine did not hit"),
    "older": (duration_s, "TIME", "entries not changed for this time: 90d, 12h"),
    "newer": (duration_s, "TIME", "entries changed within this time"),
    "min_size": (size_bytes, "SIZE", "entries of at least this size: 10MB"),
    "max_size": (size_bytes, "SIZE", "entries of at most this size"),
    "unreadable": (None, "", "entries that are damaged or misplaced"),
    "untrusted": (None, "", "entries that the trust settings refuse"),
}
# Options of features that change the environment of a job.
_JOB_OPTIONS = {it.name: it for feature in features() for it in feature.job_options}


class Filters:
    """The conditions on entries that options set, as a ``selection``."""

    def __init__(self, **values: Any) -> None:
        conditions: dict[str, Any] = {}
        for name, (read, _, _) in _FILTERS.items():
            if (value := values[name]) not in (None, False, []):
                value = value if read is None else read(_flag(name), value)
                conditions[name] = tuple(value) if isinstance(value, list) else value
        self.selection = manage.Selection(**conditions)


class JobOptions:
    """What the options of features change in the environment of a job."""

    def __init__(self, **values: str | None) -> None:
        self.environments = [
            named(_JOB_OPTIONS[name].environment)(value)
            for name, value in values.items()
            if value is not None
        ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameter(name: str, kind: Any, metavar: str, text: str) -> inspect.Parameter:
    info = Option(None if metavar else False, _flag(name), metavar=metavar or None, help=text)
    return inspect.Parameter(name, _KEYWORD_ONLY, default=info, annotation=kind)


def _parameters(of: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(of, eval_str=True).parameters.values()
    return [parameter.replace(kind=_KEYWORD_ONLY) for parameter in parameters]


_GROUPS: dict[Any, list[inspect.Parameter]] = {
    Output: _parameters(Output),
    Where: _parameters(Where),
    Filters: [
        _parameter(
            name,
            bool if not metavar else list[str] | None if read is None else str | None,
            metavar,
            f"Only {entries}.",
        )
        for name, (read, metavar, entries) in _FILTERS.items()
    ],
    JobOptions: [_parameter(n, str | None, it.metavar, it.help) for n, it in _JOB_OPTIONS.items()],
}


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``command`` for Typer: a parameter annotated with a group becomes its options."""
    own = _parameters(command)
    groups = {it.name: it.annotation for it in own if it.annotation in _GROUPS}

    def wrapper(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{it.name: values.pop(it.name) for it in _GROUPS[group]})
        return command(**values)

    parameters = [it for it in own if it.name not in groups]
    parameters += [it for group in groups.values() for it in _GROUPS[group]]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {it.name: it.annotation for it in parameters}
    wrapper.__doc__ = command.__doc__
    return wrapper


# -- work on entries


def until_done(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` on the background loop and return its result; Ctrl-C cancels it."""
    from s3cache.tier import background

    return background().wait(work, None)


def items_of(scan: manage.Scan) -> Iterator[manage.Item]:
    """Yield the entries of a scan; a batch is read when it is needed."""
    batches = scan.batches()

    async def step() -> list[manage.Item] | None:
        return await anext(batches, None)

    while (batch := until_done(step())) is not None:
        yield from batch


def work_on(
    out: Output,
    what: str,
    scan: manage.Scan,
    work: Callable[..., Coroutine[Any, Any, manage.BatchResult]],
) -> manage.BatchResult:
    """Call ``work`` on the entries of a scan, and count those that are ``what``."""
    with out.progress(what) as advance:
        return until_done(work(scan, advance=advance))


def note_missing(out: Output, scan: manage.Scan) -> int:
    """Print the names that a scan did not find, and return the exit code."""
    for name in scan.absent:
        out.note(f"{name}: {NOT_THERE}")
    return 1 if scan.absent else 0


def finish(
    out: Output, scan: manage.Scan, result: manage.BatchResult, summary: str, **more: object
) -> int:
    """Show the result of work on many entries, and return the exit code.

    The last line is ``summary``, with names of counts in braces; JSON also has ``more``.
    """
    for name in scan.absent:
        result.fail(name, NOT_THERE)
    if out.json:
        out.record({**more, **vars(result)})
    else:
        for name, why in result.failures:
            out.line(f"{name}: {why}")
        out.line(summary.format(**{**vars(result), "size": size_text(result.size)}))
    return 1 if result.failed else 0
