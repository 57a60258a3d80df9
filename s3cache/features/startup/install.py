"""Wait for the imports that can do less."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from _s3cache_process import COMPILER
from s3cache.features.startup.garbage import without_collections
from s3cache.util.importing import before_import, when_imported

if TYPE_CHECKING:
    from jinja2 import Environment, Template

    from s3cache.hooks import Session
    from s3cache.torch_api.protocols import Function

#: Modules with libraries that they rarely use. Their imports take long.
_USERS = (
    ("torch._functorch._activation_checkpointing.graph_info_provider", "networkx"),
    ("torch._functorch._activation_checkpointing.knapsack_evaluator", "networkx"),
    ("torch._inductor.remote_cache", "redis"),
)


def install(session: Session) -> None:
    """Defer what can be deferred."""
    from s3cache.features.startup.later import import_later

    cancel = without_collections()
    session.undo.callback(cancel)
    session.undo.callback(when_imported(COMPILER, cancel))  # few are left by then
    session.undo.callback(parse_templates_later())
    for importer, name in _USERS:
        session.undo.callback(import_later(importer, name))


def parse_templates_later() -> Callable[[], None]:
    """Parse the templates in torch's compiler at their first use, not at its import.

    They are templates of GPU kernels; parsing them takes longer than most of the import. Returns a
    function that ends this for templates that are created later.
    """
    from s3cache.features.startup.names import TEMPLATES, template_environment

    undo = contextlib.ExitStack()

    def begin() -> None:
        with contextlib.suppress(Exception):  # of another torch
            environment = template_environment.get()()
            if environment is not None:
                names: dict[str, object] = environment.__dict__
                names["from_string"] = _deferring(environment)
                undo.callback(names.pop, "from_string", None)

    undo.callback(before_import(TEMPLATES, begin))
    undo.callback(when_imported(COMPILER, undo.close))
    return undo.close


def _deferring(environment: Environment) -> type[Template]:
    kind = environment.template_class
    parse = cast("Function[Template]", environment.from_string)

    class Later(kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: object, **kwargs: object) -> Later:
            later = object.__new__(cls)
            later.__dict__["parse"] = functools.partial(parse, *args, **kwargs)
            return later

        def __getattr__(self, name: str) -> object:  # for all attributes that are not methods
            names: dict[str, object] = self.__dict__
            if parse_now := cast("Function[Template] | None", names.get("parse")):
                names.update(parse_now().__dict__)
                object.__setattr__(self, "__class__", kind)
                names.pop("parse", None)
            return object.__getattribute__(self, name)

    return Later
