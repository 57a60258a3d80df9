"""What several rooms need and no library has. Here: the version, and names that load when used."""

import sys
from collections.abc import Callable
from importlib import import_module

__version__ = "0.1.0"


def lazy_exports(
    package: str, *modules: str, **names: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of ``package``: what its modules have.

    aioboto3 alone takes half a second to import, and torch several: an import of a package costs
    only what is then used of it. A type checker must see neither function, or every attribute
    exists to it. It reads the imports, each under its own name, as PEP 484 marks an export::

        if TYPE_CHECKING:
            from package import module as module
            from package.other import Name as Name
        else:
            __getattr__, __dir__, __all__ = lazy_exports(__name__, "module", other="Name")

    Args:
        package: its ``__name__``.
        modules: those to export as they are.
        names: what to export of other modules, by module, with spaces between.
    """
    homes = {name: module for module, exported in names.items() for name in exported.split()}

    def load(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    def known() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *homes})

    return load, known, sorted([*modules, *homes])
