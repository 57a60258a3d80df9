"""Custom operators: the parts of them that are compiled into a graph, and so belong in its key.

A graph names an operator and no more. The kernel runs as it is when the graph runs; but its fake
implementation, its backward formula and its decomposition are run or traced while the graph is
compiled. torch's key has none of them: whoever corrects a backward formula would get the old one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from s3cache.graph._code import fingerprint, in_torch
from s3cache.graph._key import Component
from s3cache.graph._safety import Unsafe

__all__ = ["operator_component", "registrations"]

_FIX = "s3cache.register_cacheable(the operator, version=...) if you vouch for it"
# Keys under which a kernel runs when the graph runs. What is registered under any other is run,
# or traced, while it is compiled.
_AT_RUN_TIME = re.compile(
    r"(CompositeExplicitAutograd(NonFunctional)?|(Sparse|SparseCsr|Nested\w*?|Quantized)?"
    r"(CPU|CUDA|HIP|XPU|MPS|MTIA|HPU|PrivateUse1))(\[alias\])?"
)
_REGISTERED = re.compile(r"^(\S+): registered at (.+?):\d+ ", re.MULTILINE)


def operator_component(
    gm: Any, vouched: Callable[[Any], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """A component for the custom operators in ``gm``, if any, and those that have none."""
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for operator, node in _custom(gm).items():
        if vouched(operator) is not None:
            continue
        try:
            texts.append(f"{operator}: {_identity(operator)}")
        except _UnknownError as exc:
            unsafe.append(
                Unsafe("custom-operator", f"calls {operator}: {exc}", _FIX, node, str(operator))
            )
    return (Component.of_text(" ".join(sorted(texts))) if texts else None), unsafe


def _overloads(packet: Any) -> list[str]:
    return list(packet.overloads())


class _UnknownError(Exception):
    pass


def _custom(gm: Any) -> dict[Any, str]:
    import torch

    found: dict[Any, str] = {}
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload):
                operators = [target]
            elif isinstance(target, torch._ops.OpOverloadPacket):
                operators = [getattr(target, name) for name in _overloads(target)]
            else:
                continue
            found.update((each, node.name) for each in operators if each.namespace != "aten")
    return found


def _identity(operator: Any) -> str:
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    name = operator.name()
    whole = hashlib.sha256(str(operator._schema).encode())
    functions = [*operator.py_kernels.values()]
    definition = OPDEFS.get(name)
    entry = singleton._data.get(name)
    if definition is not None:
        functions += _of_definition(definition)
    if entry is not None:
        functions += [entry.fake_impl.kernel.func] if entry.fake_impl.kernel else []
        functions += entry.torch_dispatch_rules._data.values()
    for function in functions:
        whole.update(fingerprint(function).encode())
    for part in _registered_at(name, fake=entry is not None, defined=definition is not None):
        whole.update(part.encode())
    return whole.hexdigest()[:32]


def _of_definition(definition: Any) -> list[Any]:
    """What ``torch.library.custom_op`` was given, but for the kernels."""
    single = ("_abstract_fn", "_backward_fn", "_setup_context_fn", "_vmap_fn")
    found = [getattr(definition, name, None) for name in single]
    found += getattr(definition, "_torch_dispatch_fns", {}).values()
    return [each for each in found if each is not None]


def _registered_at(name: str, *, fake: bool, defined: bool) -> Iterator[str]:
    """Digests of the files that register what is traced."""
    import torch

    home = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    for key, path in _REGISTERED.findall(torch._C._dispatch_dump(name)):
        if key == "debug" or _AT_RUN_TIME.fullmatch(key):
            continue
        if path.startswith(home):
            # torch registers on behalf of others: a fake implementation and custom_op are seen
            # above, and the rest is nowhere to be found.
            if not (defined or (fake and key == "Meta") or _is_torchs(name)):
                raise _UnknownError(f"what it has for {key} cannot be told")
        elif path.endswith(".py"):
            if key != "Meta":  # a formula may be any closure
                raise _UnknownError(f"what it has for {key} cannot be told")
            yield _file_digest(path, name)
        elif not _is_torchs(name):
            yield from _libraries_with(name)


@functools.cache
def _is_torchs(name: str) -> bool:
    """Whether torch itself defines the operator: its version covers it."""
    import torch

    home = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    dump = torch._C._dispatch_dump(name)
    where = re.search(r"^debug: registered at (.+?):\d+$", dump, re.MULTILINE)
    if where is None:
        return False
    path = where[1]
    if path.startswith(home):
        from torch._library.custom_ops import OPDEFS

        definition = OPDEFS.get(name)
        return definition is None or str(definition._init_fn.__module__).startswith("torch.")
    # C++ that torch was built from: its sources are not here, its binaries hold the name.
    return not path.endswith(".py") and not list(_paths_with(name))


def _libraries_with(name: str) -> Iterator[str]:
    for path in _paths_with(name):
        yield _file_digest(path, name)


def _paths_with(name: str) -> Iterator[str]:
    """Native libraries, other than torch's, that mention the operator."""
    import torch
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    kernels = CppPythonBindingsCodeCache._loaded_module_names  # they register nothing
    modules = [each for name, each in list(sys.modules.items()) if name not in kernels]
    extensions = (getattr(each, "__file__", None) for each in modules)
    candidates = {*torch.ops.loaded_libraries, *(each for each in extensions if each)}
    home = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    short = name.partition("::")[2].partition(".")[0].encode()
    for path in sorted(candidates):
        if path.endswith((".so", ".pyd", ".dylib")) and not path.startswith(home):
            with open(path, "rb") as file:
                if short in file.read():
                    yield path


def _file_digest(path: str, name: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError as exc:
        raise _UnknownError(f"what registers it cannot be read: {exc}") from exc


def registrations() -> Component | None:
    """A component for decompositions and lowerings that are not torch's own, if there are any."""
    found = [
        f"{table}.{target}: {fingerprint(function)}"
        for table, entries in _tables()
        for target, function in list(entries.items())
        if function not in _torchs and not _is_torchs_own(function)
    ]
    return Component.of_text(" ".join(sorted(found))) if found else None


def _tables() -> Iterator[tuple[str, dict[Any, Any]]]:
    for name, attribute in (
        ("torch._inductor.decomposition", "decompositions"),
        ("torch._inductor.lowering", "lowerings"),
    ):
        module = sys.modules.get(name)
        if module is not None:
            yield attribute, getattr(module, attribute)


_torchs: set[Any] = set()  # thousands, and they stay


def _is_torchs_own(function: Any) -> bool:
    inner = _unwrapped(function)
    if isinstance(inner, types.FunctionType):
        known = in_torch(inner) or _lowers_builtin(inner)
    else:
        known = str(getattr(inner, "__module__", None)).startswith("torch")
    if known:
        _torchs.add(function)
    return known


def _lowers_builtin(function: types.FunctionType) -> bool:
    """torch's lowering of ``operator.add`` bears the name of what it wraps (before torch 2.13)."""
    wrapped = getattr(function, "__wrapped__", None)
    home = str(function.__globals__.get("__name__"))
    return isinstance(wrapped, types.BuiltinFunctionType) and home.startswith("torch.")


def _unwrapped(function: Any) -> Any:
    """What is inside of partials, and of what wraps a partial and so bears the name functools."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif getattr(function, "__module__", None) == "functools" and hasattr(
            function, "__wrapped__"
        ):
            function = function.__wrapped__
        else:
            return function
