"""``s3cache explain``: why lookups missed, and what was not cached at all; and what codes mean."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from s3cache import _pages
from s3cache.cli._choosing import Url
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output
from s3cache.errors import ConfigError

if TYPE_CHECKING:
    from s3cache._pages import Section

__all__ = ["explain"]

# ruff: noqa: UP045 - Typer reads annotations while the program runs, in Python 3.10 too

# Keys are hexadecimal, after a letter for their level. No code is (tests/test_pages.py).
_KEY = re.compile(r"[a-z]?[0-9a-f]*")


def _codes(incomplete: str) -> list[str]:
    """For the shell: the codes that begin so."""
    there = (section.code for section in _pages.sections())
    return [code for code in dict.fromkeys(there) if code.startswith(incomplete)]


@grouped(out=Output)
def explain(
    out: Output,
    words: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[CODE...|KEY|SCRIPT]",
            help="What messages name, such as untrusted, custom-operator or ConfigError; what was "
            "looked up, or the beginning of it; or the program whose last run is meant.",
            show_default=False,
            autocompletion=_codes,
        ),
    ] = None,
    run: Annotated[
        Optional[str],
        typer.Option(metavar="ID", help="A run, as this prints it. Default: the last one."),
    ] = None,
    module: Annotated[
        Optional[str],
        typer.Option("-m", metavar="MODULE", help="The last run of that module, which -m ran."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Ask the remote for nothing.")] = False,
    url: Url = None,
) -> int:
    """Say why lookups missed: the nearest entry, and what its key differs in; or what a code means.

    Of the last process on this machine that looked something up, unless told otherwise. What was
    looked up is recorded in the local tier (S3CACHE_RECORD=0: it is not). It is compared with what
    was looked up before, and with what hints in the remote lead to, which nobody has signed. Exits
    with 1 if anything missed or was bypassed.

    Of a code (a reason, that of a bypass, the name of an error, a check of doctor) it shows,
    offline, the section that the documentation has on it. What is a code, or on record as the
    beginning of a key, is taken as such; a file of that name is given as ./NAME then.
    """
    words = words or []
    target = _target(words[0]) if len(words) == 1 else {}
    if words and not target:
        for section in [section for word in words for section in _sections_on(word)]:
            _show(out, section)
        return 0
    from s3cache.explaining import explain as explained

    found = explained(
        run,
        key=target.get("key"),
        script=target.get("script"),
        module=module,
        url=url,
        remote=not local,
    )
    if out.json:
        out.record(found.as_dict())
    else:
        out.text(str(found))
    return 1 if found.explanations else 0


def _target(word: str) -> dict[str, str]:
    """What a word is, if it is no code: a ``key`` or a ``script``."""
    if _pages.sections_on(word):
        return {}
    from s3cache.explaining import meaning

    return meaning(word) or ({"key": word} if _KEY.fullmatch(word) else {})


def _sections_on(word: str) -> list[Section]:
    """What the documentation says of a code.

    Raises:
        ConfigError: nothing. The codes that it may be meant to be are named.
    """
    from difflib import get_close_matches

    if found := _pages.sections_on(word):
        return found
    there = {section.code.casefold(): section.code for section in _pages.sections()}
    if not there:
        problem = "the pages are neither in the package nor beside it"
        raise ConfigError("documentation", problem, "install s3cache from its wheel")
    near = get_close_matches(word.casefold().replace("_", "-"), there, n=3)
    fix = "give a code, as s3cache explain untrusted, a script, the beginning of a key, or --run ID"
    if near:
        fix = f"did you mean {' or '.join(_pages.command(there[each]) for each in near)}?"
    raise ConfigError(f"word {word!r}", "the documentation has no section on it", fix)


def _show(out: Output, section: Section) -> None:
    if out.json:
        out.record(asdict(section))
        return
    text, codes, places = section.without_links()
    out.markdown(f"{section.code}: {section.title}", text)
    if footer := _pages.footer(codes):
        out.line(footer)
    if places:
        out.line(f"see also: {', '.join(places)}")
