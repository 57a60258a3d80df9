"""Helpers for several packages. This module has the version, and exports that load lazily."""

import sys
from collections.abc import Callable
from importlib import import_module

__version__ = "0.1.0"


def lazy_exports(
    package: str, *modules: str, **names: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for ``package``, with lazy exports.

    aioboto3 alone takes half a second to import, and torch several: importing a package only loads
    the modules that are used. A type checker must not see these functions, or every attribute would
    exist. It reads the imports under their own names, which PEP 484 treats as exports::

        if TYPE_CHECKING:
            from package import module as module
            from package.other import Name as Name
        else:
            __getattr__, __dir__, __all__ = lazy_exports(__name__, "module", other="Name")

    Args:
        package: its ``__name__``.
        modules: modules to export.
        names: names to export, by module, separated by spaces.
    """
    homes = {name: module for module, exported in names.items() for name in exported.split()}

    def load(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # later uses do not come here
        return value

    def known() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *homes})

    return load, known, sorted([*modules, *homes])
