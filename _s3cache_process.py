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
# A class or a table after a colon.
_OTHERS = """
    torch:Tensor torch.nn:Parameter torch._decomp:decomposition_table torch._decomp:meta_table
    torch._decomp:pre_autograd_decomposition_table
    torch._subclasses.fake_impls:op_implementations_dict
    torch._inductor.decomposition torch._inductor.decomposition:decompositions
    torch._inductor.decomposition:extra_random_decomps torch._inductor.lowering
    torch._inductor.lowering:lowerings torch._inductor.lowering:user_lowerings
    torch._inductor.lowering:_maybe_layout_constraints
    torch._higher_order_ops.utils:registered_hop_fake_fns
    torch._subclasses.fake_tensor:_DISPATCH_META_HANDLERS
"""
#: Places where programs may replace functions, by name: the module, and a class or table in it.
LISTED = {
    place.replace(":", "."): place.partition(":")[::2]
    for place in (*_MODULES.split(), *_OTHERS.split())
}
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

# A class into which torch puts the code of every graph that it loads.
_EXCHANGED = "torch.fx.graph_module._CodeOnlyModule"
# A module that puts its own values into tables of others, while it is imported.
_FILLING, _FILLED = "torch._inductor.lowering", "torch._inductor."

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


class Copy:
    """A namespace, a class or a table of torch, with a copy of its content.

    Attributes:
        home: of a table: the namespace, class or table that it is in.
        is_original: whether no program can have changed the content before.
    """

    def __init__(
        self, place: str, module: str, inside: "Any", *, is_original: bool, home: "Any" = None
    ) -> None:
        self.place, self.module, self.inside, self.home = place, module, inside, home
        self.is_original, self.content = is_original, items_of(inside)


#: What ``import torch`` itself has put where programs may put something else and torch looks while
#: it compiles, by place.
copies: "dict[str, Copy]" = {}
#: The modules that make code.
modules: "dict[str, ModuleType]" = {}
#: Operators and keys for which torch itself has a kernel in Python.
kernels: "set[object]" = set()
_examined: "dict[str, int]" = {}  # ids of all imported modules, by name


def take_baseline() -> None:
    """Copy what torch has at the end of its import. Takes 4 ms."""
    if not kernels:
        kernels.update(getattr(sys.modules.get("torch.library"), "_impls", ()))
    copy_torch(is_original=True)


def copy_torch(*, is_original: bool) -> None:
    """Copy what torch has in all modules that are imported by now, and that were not copied."""
    for place, (module, name) in LISTED.items():
        owner = None if place in copies or makes_code(module) else sys.modules.get(module)
        home = getattr(owner, name, None) if name else owner
        if home is not None and (is_original or not _is_starting(owner)):
            copies[place] = Copy(place, module, vars(home), is_original=is_original)
    for name, imported in sys.modules.copy().items():
        if _examined.get(name) != id(imported):
            if name not in modules and makes_code(name):
                if _is_starting(imported) and not is_original:
                    continue
                _copy_module(name, is_original=is_original)
            _examined[name] = id(imported)


def _is_starting(module: object) -> bool:
    """Return True if the code of a module has not run to its end yet."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def note_imports() -> None:
    """Copy each module that makes code right after its import, from now to the process's end."""
    if not any(isinstance(each, _Noting) for each in sys.meta_path):
        sys.meta_path.insert(0, _Noting())
        atexit.register(copies.clear)  # what torch takes apart at exit must not outlive that


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
        before = {copy.place: items_of(copy.inside) for copy in _filled_by(module)}
        execute(module)
        try:
            new = _copy_module(module.__name__, is_original=True)
            if "s3cache.util.snapshot" in sys.modules:  # else no cache has been named so far
                for copy in new:
                    sys.modules["s3cache.util.snapshot"].FUNCTIONS.add(copy.content.values())
        except Exception:  # noqa: BLE001, S110 - the next look then finds it
            pass
        for copy in _filled_by(module):
            old, now = before.get(copy.place, copy.content), items_of(copy.inside)
            copy.content.update({name: now[name] for name in now if name not in old})

    loader.exec_module = execute_and_note  # type: ignore[method-assign]


def _copy_module(name: str, *, is_original: bool) -> "list[Copy]":
    """Copy a module, its classes and their tables; return the copies of all but the tables."""
    module, file = sys.modules.get(name), getattr(sys.modules.get(name), "__file__", None)
    torch = os.path.dirname(os.path.abspath(sys.modules["torch"].__file__ or "")) + os.sep
    # Code that Inductor generated has such names, too.
    if module is None or type(module) is not type(sys) or not str(file).startswith(torch):
        return []
    if "torch.utils._ordered_set" in sys.modules:
        _TABLES.add(sys.modules["torch.utils._ordered_set"].OrderedSet)
    new = [Copy(name, name, vars(module), is_original=is_original)]
    for attribute, value in new[0].content.items():
        place = f"{name}.{attribute}"
        if isinstance(value, type) and value.__module__ == name and place != _EXCHANGED:
            new.append(Copy(place, name, vars(value), is_original=is_original))
    for copy in new:
        copies.setdefault(copy.place, copy)
        for attribute, value in copy.content.items():
            is_listed = isinstance(value, dict) and f"{copy.place}.{attribute}" in LISTED
            if is_listed or (type(value) in _TABLES and not str(attribute).startswith("__")):
                _copy_table(f"{copy.place}.{attribute}", copy, value)
    modules.setdefault(name, module)
    return new


def _copy_table(place: str, home: Copy, table: "Any", depth: int = 0) -> None:
    """Copy a table, and the tables in it."""
    copy = Copy(place, home.module, table, is_original=home.is_original, home=home)
    copies.setdefault(place, copy)
    for name, value in copy.content.items() if depth < MAX_DEPTH else ():
        if type(value) in _TABLES:
            _copy_table(f"{place}[{name}]", copy, value, depth + 1)


def _filled_by(module: "ModuleType") -> "list[Copy]":
    """Return the tables into which a module puts its own values while it is imported."""
    now = list(copies.values()) if module.__name__ == _FILLING else []
    return [copy for copy in now if copy.module.startswith(_FILLED) and copy.home]


def items_of(inside: "Any") -> "dict[object, object]":
    """Return a copy of a container by key or index; of a set, by its members."""
    if isinstance(inside, (list, tuple)):
        return dict(enumerate(inside))
    return dict(inside) if hasattr(inside, "items") else {item: item for item in list(inside)}
