"""What a custom operator is made of, as far as it is run or traced while something is compiled.

Its schema and tags, its fake implementation and backward formula, and what the dispatcher has for
keys that are not those of a device.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from s3cache.graph._code import Parts, UntoldError
from s3cache.graph._registered import is_native, kernel_of
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CustomOperator, Operator

__all__ = ["parts_of"]

# Keys under which a kernel runs when the graph runs. What is registered under any other is run,
# or traced, while it is compiled.
_AT_RUN_TIME = re.compile(
    r"(CompositeExplicitAutograd(NonFunctional)?|(Sparse|SparseCsr|Nested\w*?|Quantized)?"
    r"(CPU|CUDA|HIP|XPU|MPS|MTIA|HPU|PrivateUse1))(\[alias\])?"
)


def parts_of(vouched: Callable[[object], str | None]) -> Callable[[Operator], Parts]:
    """What tells of what an operator is made: its schema, and what is traced in its place."""

    def parts(operator: Operator) -> Parts:
        version = vouched(operator)
        if version is not None:
            return [f"version {version}"], []
        return _parts(operator) if operator.namespace != "aten" else ([], [])

    return parts


def _parts(operator: Operator) -> Parts:
    name = operator.name()
    words = [str(operator._schema)]
    functions: list[object] = [*operator.py_kernels.values()]
    definition = internals.custom_operators.get().get(name)
    if definition is not None:
        functions += _traced_functions(definition)
        words += sorted(map(str, internals.autocast_dtypes(definition).items()))
    words += sorted(map(str, operator.tags))
    fakes = internals.fake_registry.get().get(name)
    fake = None
    if fakes is not None:
        fake = fakes.fake_impl.kernel
        functions += [fake.func] if fake else []
        functions += fakes.torch_dispatch_rules._data.values()
        words += [f"effect {fakes.effect.effect}"] if fakes.effect.effect else []
    known = definition is not None or _is_defined_by_torch(name)
    for each in _registered_at(name, fake=fake is not None, known=known):
        (words if isinstance(each, str) else functions).append(each)  # type: ignore[arg-type]
    return words, functions


def _traced_functions(definition: CustomOperator) -> list[object]:
    """What ``torch.library.custom_op`` was given, but for the kernels."""
    single = (
        definition._abstract_fn,
        definition._backward_fn,
        definition._setup_context_fn,
        definition._vmap_fn,
    )
    given = [function for function in single if function is not None]
    return [*given, *definition._torch_dispatch_fns.values()]


def _registered_at(name: str, *, fake: bool, known: bool) -> Iterator[object]:
    """Functions that are registered to be traced, and digests of libraries that register some.

    Args:
        name: of the operator.
        fake: whether it has an implementation for fake tensors.
        known: whether torch, or a definition in Python, accounts for what torch registers for it.
    """
    home = internals.torch_directory()
    registered = internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name))
    meta = any(key == "Meta" for key, _ in registered)
    for key, path in registered:
        # What runs on any device also runs on fake tensors, if there is nothing for those.
        seen = fake or meta or not key.startswith("Composite")
        if key == "debug" or (key == "Meta" and fake) or (seen and _AT_RUN_TIME.fullmatch(key)):
            continue
        if is_native(path):
            if not known:
                for library in _libraries_with(name):
                    yield _file_digest(library)
            continue
        function = kernel_of(name, key)
        of_torch = known and path.startswith(home)
        if function is not None and not of_torch:
            yield function
        elif not of_torch:
            raise UntoldError(
                f"what it has for {key} cannot be told: it was registered before s3cache was "
                "enabled, or by other means than torch.library"
            )


@functools.cache
def _is_defined_by_torch(name: str) -> bool:
    """Whether torch itself defines the operator: its version covers it."""
    defined = internals.DEFINED_AT.search(internals.dispatch_dump.get()(name))
    if defined is None:
        return False
    path = defined[1]
    if path.startswith(internals.torch_directory()):
        definition = internals.custom_operators.get().get(name)
        return definition is None or str(definition._init_fn.__module__).startswith("torch.")
    # C++ that torch was built from: its sources are not here, its binaries hold the name.
    return is_native(path) and not list(_libraries_with(name))


def _libraries_with(name: str) -> Iterator[str]:
    """Paths of native libraries, other than torch's, that mention the operator."""
    import torch

    kernels = internals.loaded_kernels()  # they register nothing
    modules = [module for each, module in list(sys.modules.items()) if each not in kernels]
    files = (getattr(module, "__file__", None) for module in modules)
    candidates = {*torch.ops.loaded_libraries, *(file for file in files if file)}
    home = internals.torch_directory()
    short = name.partition("::")[2].partition(".")[0].encode()
    for path in sorted(candidates):
        if path.endswith((".so", ".pyd", ".dylib")) and not path.startswith(home):
            with open(path, "rb") as file:
                if short in file.read():
                    yield path


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError as exc:
        raise UntoldError(f"what registers it cannot be read: {exc}") from exc
