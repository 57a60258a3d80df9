"""What each process that imports torch does for s3cache, even if it names no cache.

It copies what torch has at its import, and reads whether the environment asks for a cache. It
imports nothing, so that it takes a few milliseconds.
"""

import atexit
import os
import sys

TYPE_CHECKING = False  # to mypy it is true; typing would be one more import
if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

#: What ``import torch`` itself has put where programs may put something else and torch looks while
#: it compiles: namespaces, classes and tables by their names with dots, each as a copy.
baseline: dict[str, dict[object, object]] = {}

# Here and not with the other names of torch's: to import those takes longer than all of this.
_MODULES = """
    torch torch.functional torch.nn.functional torch._VF torch._C._nn torch._C._linalg
    torch._C._fft torch._C._special torch._C._sparse torch._C._nested torch.linalg torch.fft
    torch.special torch.sparse torch.nested torch._tensor torch._decomp.decompositions
    torch._decomp torch._refs torch._refs.nn.functional torch._refs.linalg torch._refs.fft
    torch._refs.special torch._refs._conversions torch._prims torch._prims.rng_prims
    torch._prims_common torch._prims_common.wrappers torch._meta_registrations
    torch._subclasses.fake_impls cmath math operator
"""
_OTHERS = """
    torch:Tensor torch.nn:Parameter torch._decomp:decomposition_table torch._decomp:meta_table
    torch._decomp:pre_autograd_decomposition_table
    torch._subclasses.fake_impls:op_implementations_dict
"""
#: Operators and keys for which torch has a kernel in Python.
KERNELS = "torch.library._impls"
IMPORT_POINTS = (*_MODULES.split(), *_OTHERS.split())
#: How deep tables lie in each other that hold constants.
MAX_DEPTH = 3
_TABLES: "set[type]" = {dict, list, set}

# Prefixes of modules that trace and lower graphs. Not Dynamo's: what it makes of a program is in
# the key.
_MAKING_CODE = tuple(
    """
    torch._decomp torch._functorch torch._higher_order_ops torch._inductor torch._library
    torch._numpy torch._ops torch._prims torch._refs torch._subclasses torch.distributed.tensor
    torch.fx torch.nested._internal torch.utils._python_dispatch torch.utils._sympy
    torch.utils.checkpoint
    """.split()  # noqa: SIM905 - as all of these
)
# These keep what was made, or run it.
_KEEPING_CODE = tuple(
    """
    torch._functorch._aot_autograd.autograd_cache torch._inductor.codecache
    torch._inductor.remote_cache torch._inductor.runtime.
    """.split()  # noqa: SIM905
)

# A module that puts its own values into tables of another, while it is imported.
_FILLING, _FILLED = "torch._inductor.lowering", "torch._inductor.utils"

#: The modules of which the first import means that something will be compiled, or that a program
#: loads artifacts into torch's own caches, which a policy may forbid.
COMPILER, CODE_CACHES = "torch._inductor.compile_fx", "torch._inductor.codecache"
#: Where Triton decides how its files are kept; programs may use it without torch's compiler.
TRITON = "triton.runtime.cache"

_WORDS = {"": None, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def is_asked() -> bool:
    """Return whether the environment asks for a cache.

    ``S3CACHE_URL`` asks for it; ``S3CACHE_AUTOLOAD`` turns it off, or on without a URL.
    """
    switch = os.environ.get("S3CACHE_AUTOLOAD", "").lower()
    if switch in _WORDS:
        wanted = _WORDS[switch]
        return bool(os.environ.get("S3CACHE_URL")) if wanted is None else wanted
    from s3cache.util.logs import logger_of  # shows warnings where no logging is set up

    logger_of().warning(
        "not enabled: environment variable S3CACHE_AUTOLOAD: "
        "%r is not a truth value: use true or false",
        switch,
    )
    return False


def makes_code(module: str) -> bool:
    """Return True if functions of the module of that name trace or lower graphs."""
    return module.startswith(_MAKING_CODE) and not module.startswith(_KEEPING_CODE)


def take_baseline() -> None:
    """Copy what torch has at all points that are imported by now. Takes 4 ms."""
    for place in (*IMPORT_POINTS, "torch.library:_impls"):
        module, _, name = place.partition(":")
        owner = sys.modules.get(module)
        found = getattr(owner, name, None) if name else owner
        if found is not None:
            _copy(place, found if isinstance(found, (dict, set)) else vars(found))
    for module in [*sys.modules]:
        if makes_code(module):
            _copy_module(module)


def note_imports() -> None:
    """Copy each module that makes code right after its import, from now to the process's end."""
    if not any(isinstance(each, _Noting) for each in sys.meta_path):
        sys.meta_path.insert(0, _Noting())
        atexit.register(baseline.clear)  # what torch takes apart at exit must not outlive that


class _Noting:
    """Wait on the import path for modules that make code, and leave finding them to the others."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: object = None, target: "ModuleType | None" = None, /
    ) -> "ModuleSpec | None":
        if not makes_code(name) or name in self._finding or name in sys.modules:
            return None
        from importlib.util import find_spec

        self._finding.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            _note_after(spec.loader)
        return spec


def _note_after(loader: "Loader") -> None:
    execute = loader.exec_module

    def execute_and_note(module: "ModuleType") -> None:
        loader.exec_module = execute  # type: ignore[method-assign]
        before = _tables_to_fill(module.__name__)
        execute(module)
        _note_module(module.__name__)
        for place, table in _tables_to_fill(module.__name__).items():
            own = {each: table[each] for each in table if each not in before.get(place, {})}
            baseline.get(place, {}).update(own)

    loader.exec_module = execute_and_note  # type: ignore[method-assign]


def _note_module(name: str) -> None:
    """Copy a module that has just been imported, and record its functions. Never raises."""
    try:
        copies = _copy_module(name)
        if "s3cache.util.snapshot" in sys.modules:  # else no cache has been named so far
            for each in copies:
                sys.modules["s3cache.util.snapshot"].FUNCTIONS.add(each.values())
    except Exception:  # noqa: BLE001, S110 - the key then includes a digest of the module
        pass


def _copy_module(name: str) -> "list[dict[object, object]]":
    """Copy a module, its classes and their tables; return the copies of all but the tables."""
    if "torch.utils._ordered_set" in sys.modules:
        _TABLES.add(sys.modules["torch.utils._ordered_set"].OrderedSet)
    members = getattr(sys.modules.get(name), "__dict__", {})
    copies = [_copy(name, members, "{}.{}")]
    for attribute, value in copies[0].items():
        if isinstance(value, type) and value.__module__ == name:
            copies.append(_copy(f"{name}.{attribute}", vars(value), "{}.{}"))
    return copies


def _tables_to_fill(module: str) -> "dict[str, dict[object, object]]":
    """Return copies of the tables that ``module`` fills, by their places."""
    found = getattr(sys.modules.get(_FILLED if module == _FILLING else ""), "__dict__", {})
    return {
        f"{_FILLED}.{name}": _items(table)
        for name, table in found.items()
        if type(table) in _TABLES and not name.startswith("__")
    }


def _copy(place: str, found: object, form: str = "", depth: int = 0) -> "dict[object, object]":
    """Copy a container, and the tables in it if there is a ``form`` of their places."""
    copied = baseline.setdefault(place.replace(":", "."), _items(found))
    for name, table in copied.items() if form and depth <= MAX_DEPTH else ():
        if type(table) in _TABLES and not (inner := form.format(place, name)).endswith("__"):
            _copy(inner, table, "{}[{}]", depth + 1)
    return copied


def _items(found: "Any") -> "dict[object, object]":
    """Return a copy of a table by name; of a set, by its members."""
    if isinstance(found, list):
        return dict(enumerate(found))
    return dict(found) if hasattr(found, "items") else {each: each for each in found}
