"""The page of all commands: ``python -m infra.docs.commands`` writes it to standard output."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Literal, get_args, get_origin

from typer.models import OptionInfo

__all__ = ["reference"]

_HEAD = """\
# Commands

<!-- Written by `make commands` from the commands themselves: change those. -->

`pip install 'torch-s3cache[cli]'` installs `s3cache`; `python -m s3cache` is the same program.
`run` alone works without the extra `cli`. `--url` or `S3CACHE_URL` names the cache; `S3CACHE_*`
variables set the rest
([Configuration](configuration.md)). `s3cache COMMAND --help` shows the text of this page, and
`s3cache --install-completion` makes the shell complete commands and options.

With `--json`, output is for programs: one value, or one per line if a command lists things.
Progress is shown on a terminal only. No command unpickles an entry or loads a kernel, and only
`run`, `check`, `warm`, `target` and `doctor` start torch.

| exit code | |
|---|---|
| 0 | success |
| 1 | problems were found (`verify`, `doctor`), an entry is missing, or work is left |
| 2 | the arguments or the settings cannot be used |
| 3 | the store or the disk failed |
| 130 | interrupted |

`run` has the exit code of its program.
"""


def reference() -> str:
    """Return the text of ``docs/commands.md``."""
    from s3cache.cli._app import app

    parts = [_HEAD]
    for command in app.registered_commands:
        assert command.name is not None
        parts.append(_section(command.name, command.callback))
    return "".join(parts)


def _section(name: str, command: Any) -> str:
    parameters = inspect.signature(command).parameters.values()
    infos = [(each, each.default) for each in parameters]
    arguments = [
        (str(info.metavar or each.name.upper()), str(info.help))
        for each, info in infos
        if not isinstance(info, OptionInfo)
    ]
    options = [_option(each, info) for each, info in infos if isinstance(info, OptionInfo)]
    usage = " ".join([f"s3cache {name}", "[OPTION]...", *(shown for shown, _ in arguments)])
    shown_in_rows = ((shown.replace("|", "\\|"), text) for shown, text in arguments)
    rows = [f"| `{shown}` | {text} |" for shown, text in (*shown_in_rows, *options)]
    text = inspect.cleandoc(command.__doc__ or "")
    return f"\n## s3cache {name}\n\n```\n{usage}\n```\n\n{text}\n\n| | |\n|---|---|\n" + "".join(
        f"{row}\n" for row in rows
    )


def _option(parameter: inspect.Parameter, info: OptionInfo) -> tuple[str, str]:
    kind = parameter.annotation
    names = ", ".join(info.param_decls or [f"--{parameter.name.replace('_', '-')}"])
    shown, default = names, info.default
    if kind not in (bool, bool | None):
        literals = (each for each in (kind, *get_args(kind)) if get_origin(each) is Literal)
        choices = "|".join(get_args(next(literals, None)))
        shown = f"{names} {info.metavar or choices or 'NUMBER'}".replace("|", "\\|")
    text = str(info.help)
    if isinstance(info.show_default, str):
        return shown, f"{text} Default: {info.show_default}."
    if default is None or isinstance(default, bool):
        return shown, text
    return shown, f"{text} Default: {default}."


if __name__ == "__main__":
    sys.stdout.write(reference())
