"""Describe the program that runs, without any knowledge of Dynamo.

The record of a frame lists what Dynamo read. This is the second, coarse look that has to agree
before a frame is recalled: the sources of the user's modules, their names, plain constants and
objects, the installed distributions and libraries, ``builtins``, the hooks that are registered with
torch, settings of torch and logging, names of environment variables, and the flags of the
interpreter. It holds no rank, host name, time, port or address of its own. Where a program keeps
such a value in a constant, two processes that traced the same differ in it, and from then on the
difference does not count; see :func:`difference`.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import hashlib
import itertools
import logging
import os
import re
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from s3cache.features.recall import dynamo, names
from s3cache.features.recall.content import NOT_COMPARED
from s3cache.graph import code_digest, is_as_installed, origin_of
from s3cache.util.snapshot import are_identical

#: Digests of facts, each under a label such as ``source of train``.
Facts: TypeAlias = Mapping[str, bytes]

_SOURCE, _MODULE = "source of ", "module "
#: Facts that always count: code, and what decides how it runs.
_FIRM = (_SOURCE, "distribution ", "interpreter")
#: The first counts where both programs have it: a process may import a library later. The second
#: counts once two processes had the same: many objects differ between all processes.
_LIBRARY, _CONTENT = "files of ", "content of "
_FUNCTION = types.FunctionType
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_WITHOUT_CONTENT = {*_PLAIN, _FUNCTION, type, types.ModuleType, types.BuiltinFunctionType}
_MAX_PARTS = 64  # of an object
_MAX_LENGTH = 256  # of a text or a container in an object
_MAX_DEPTH = 6
_SIZED = (str, bytes, list, tuple, set, frozenset, dict)
# Classes of Python that hold settings.
_HOLDERS = frozenset({"argparse", "collections", "configparser", "types"})
# Modules with more constants have one fact for all of them.
_MAX_CONSTANTS = 64
# Names that Python, Dynamo, this package or an interactive shell put into modules.
_IGNORED = re.compile(
    r"__(compiled_fn|resume_at|import|builtins_dict|s3cache)_.*|_{3,}.*|_s3cache.*|_|_i*\d*"
    r"|__(builtins|cached|file|loader|path|spec|warningregistry|annotations|doc|name|package)__"
)
# Names of modules with code of Inductor, which are digests.
_GENERATED = re.compile(r"c[a-z2-7]{51}(\.|$)")
_digests: dict[tuple[str, int], bytes] = {}  # of files, by path and time of the last change


class Program:
    """The facts of this process; looking again is cheap.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._modules: dict[str, _UserModule | None] = {}
        self._libraries: dict[str, list[str]] = {}  # the package of each module, and its files
        self._of_libraries: Facts = {}
        # What each name is in ``sys.modules``; another specification means a reload.
        self._loaded: dict[str, tuple[object, object]] = {}
        self._paths: tuple[str, ...] | None = None
        self._distributions: dict[str, bytes] = {}

    def facts(self) -> dict[str, bytes]:
        """Return the facts now."""
        facts = {"interpreter": _digest([*sys.flags, sys.version])}
        facts |= self._installed()
        has_new = False
        for name, module in [*sys.modules.items()]:
            loaded = module, getattr(module, "__dict__", {}).get("__spec__")
            is_new = not are_identical(loaded, self._loaded.get(name, ()))
            if is_new and isinstance(module, types.ModuleType):
                self._loaded[name], has_new = loaded, True
                is_users = _is_users(name, module)
                self._modules[name] = _UserModule(name, module) if is_users else None
                self._libraries[name] = [] if is_users else _files_of_library(name, module)
            user_module = self._modules.get(name)
            if user_module is not None:
                facts |= user_module.facts()
        if has_new:
            self._of_libraries = self._files()
        facts |= self._of_libraries
        added = {name: each for name, each in vars(builtins).items() if not _is_own(name, each)}
        facts["builtins"] = _digest(_texts(added))
        # Those that are registered for all modules and calls, and modes.
        hooks = [f"{[*map(_name_of, each.values())]}" for each in dynamo.global_hooks()]
        modes = f"{names.function_modes.get()()} {names.dispatch_modes.get()()}"
        facts["hooks of torch"] = _digest([*hooks, modes])
        facts["state of torch"] = _digest(_state_of_torch())
        facts["state of logging"] = _digest([logging.root.level, logging.root.manager.disable])
        # Their values may be secret, or hold ports and names of hosts.
        variables = (name for name in os.environ if not NOT_COMPARED.match(name))
        facts["names of environment variables"] = _digest(sorted(variables))
        return facts

    def _files(self) -> dict[str, bytes]:
        libraries: dict[str, set[str]] = {}
        for library in filter(None, self._libraries.values()):
            libraries.setdefault(library[0], set()).update(library[1:])
        return {f"{_LIBRARY}{name}": _digest(sorted(texts)) for name, texts in libraries.items()}

    def _installed(self) -> dict[str, bytes]:
        """Return the installed distributions, by the names of their directories."""
        # Packages in packages, such as those of setuptools, are on the path once it is imported.
        paths = tuple(path for path in sys.path if f"-packages{os.sep}" not in path)
        if self._paths != paths:
            self._paths, self._distributions = paths, {}
            for path in reversed(paths):
                with contextlib.suppress(OSError):
                    for entry in os.listdir(path or "."):
                        stem, _, ending = entry.rpartition(".")
                        if ending in ("dist-info", "egg-info", "egg-link"):
                            name, _, version = stem.partition("-")
                            self._distributions[f"distribution {name}"] = version.encode()
        return self._distributions


def difference(here: Facts, recorded: Sequence[Facts]) -> str:
    """Return in words what differs from the programs that traced a frame; ``""`` if nothing does.

    Constants, names and the presence of modules that differ among recorded processes of the same
    code do not count: they traced the same. The content of objects counts once two have
    traced.
    """
    shortest: list[str] | None = None
    for facts in recorded:
        others = [_differing(facts, peer) for peer in recorded]
        # Among processes of the same code.
        alike = [each for each in others if not any(x.startswith(_FIRM) for x in each)]
        varying = {label for each in alike for label in each}
        if len(alike) < 2:  # itself
            varying = {label for label in {*here, *facts} if label.startswith(_CONTENT)}
        labels = [label for label in _differing(here, facts) if label not in varying]
        if not labels:
            return ""
        if shortest is None or len(labels) < len(shortest):
            shortest, nearest = labels, facts
    if shortest is None:
        return "no process has recorded its program"
    label = min(shortest, key=lambda x: (not x.startswith(_FIRM), not x.startswith(_MODULE)))
    source_label = label.replace(_MODULE, _SOURCE, 1)
    if source_label not in nearest:
        return f"{label} is new"
    return f"{label} is missing" if source_label not in here else f"{label} has changed"


def digest_of_facts(facts: Facts) -> bytes:
    """Return a digest of all facts."""
    return _digest(f"{label} {facts[label].hex()}" for label in sorted(facts))


def _differing(some: Facts, others: Facts) -> list[str]:
    """Return the labels of the facts that differ; ``module NAME`` for a module in only one."""
    labels = [
        label
        for label in sorted({*some, *others})
        if some.get(label) != others.get(label)
        and not (label.startswith(_LIBRARY) and (label not in some or label not in others))
    ]
    return [
        label.replace(_SOURCE, _MODULE, 1)
        if label.startswith(_SOURCE) and (label not in some or label not in others)
        else label
        for label in labels
    ]


class _UserModule:
    """A module of the user; its facts are computed again if its names or constants change."""

    def __init__(self, name: str, module: types.ModuleType) -> None:
        self._name, self._scope = name, vars(module)
        self._source = b""  # without a file that can be read
        if isinstance(file := getattr(module, "__file__", None), str):
            with contextlib.suppress(OSError):
                self._source = _digest_of_file(file)
        self._seen: tuple[object, ...] = ()
        self._facts: dict[str, bytes] = {}
        self._objects: list[str] = []  # names of objects that may have plain values

    def facts(self) -> dict[str, bytes]:
        scope = self._scope.copy()
        kinds = [*map(type, scope.values())]
        constants = {
            name: each
            for (name, each), kind in zip(scope.items(), kinds, strict=True)
            if kind in _PLAIN
        }
        seen = (*scope, *constants.values(), *kinds)
        if self._seen != seen or not self._facts:
            self._seen = seen
            members = [name for name in scope if not _IGNORED.fullmatch(str(name))]
            objects = [x for x in members if type(scope[x]) not in _WITHOUT_CONTENT]
            self._objects = [x for x in objects if not str(x).startswith("__")][:_MAX_CONSTANTS]
            self._facts = {
                f"{_SOURCE}{self._name}": self._source or _digest(_codes(scope)),
                f"names of {self._name}": _digest(sorted(map(str, members))),
            }
            if len(constants) > _MAX_CONSTANTS:
                self._facts[f"constants of {self._name}"] = _digest(_texts(constants))
            else:
                for name in filter(constants.__contains__, members):
                    text = f"{type(constants[name]).__name__} {constants[name]!r}"
                    self._facts[f"{name} of {self._name}"] = _digest([text])
        contents = {}
        for name in self._objects:  # they change without the module's knowledge
            with contextlib.suppress(Exception):  # whatever the objects of the user do
                if parts := [*itertools.islice(_plain_parts(scope[name], set()), _MAX_PARTS)]:
                    contents[f"{_CONTENT}{name} in {self._name}"] = _digest(parts)
        return {**self._facts, **contents} if contents else self._facts


def _plain_parts(value: Any, seen: set[int], where: str = "") -> Iterator[str]:
    """Yield texts of the plain values in an object: a container, or one with attributes."""
    kind = type(value)
    is_long = issubclass(kind, _SIZED) and len(value) > _MAX_LENGTH
    if is_long:
        yield f"{where} {kind.__name__} of {len(value)}"
    if kind in _PLAIN:
        yield f"{where} {kind.__name__} {value[:_MAX_LENGTH] if is_long else value!r}"
    if kind in _PLAIN or is_long:
        return
    # ``isinstance`` would ask a proxy, which may do anything.
    is_code = issubclass(kind, (type, types.ModuleType))
    if kind in _WITHOUT_CONTENT or is_code or id(value) in seen or where.count(".") > _MAX_DEPTH:
        return
    seen.add(id(value))
    if issubclass(kind, enum.Enum):
        yield f"{where} {value.name}"
    elif issubclass(kind, (list, tuple)):
        for number, part in enumerate([*value]):
            yield from _plain_parts(part, seen, f"{where}.{number}")
    elif issubclass(kind, (set, frozenset)):
        yield f"{where} {sorted(map(repr, (part for part in value if type(part) in _PLAIN)))}"
    elif issubclass(kind, dict):
        for name, part in [*dict.items(value)]:
            if type(name) in _PLAIN:
                yield from _plain_parts(part, seen, f"{where}.{name!r}")
    root = kind.__module__.partition(".")[0]
    if root not in _HOLDERS and (root == "torch" or root in sys.stdlib_module_names):
        return
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict:
        yield from _plain_parts(attributes, seen, f"{where}.")


def _files_of_library(name: str, module: types.ModuleType) -> list[str]:
    """Return the package of a library's module, what is installed, and its text if it is edited."""
    origin = origin_of(module)
    if origin.kind != "library" or origin.is_built_on:
        return []
    texts = [origin.name.partition(" ")[0], origin.name]
    file = getattr(module, "__file__", None)
    if isinstance(file, str) and not is_as_installed(file):
        with contextlib.suppress(OSError):
            texts.append(f"{name} {_digest_of_file(file).hex()}")
    return texts


def _digest_of_file(path: str) -> bytes:
    """Return the digest of the file of a module that this process has imported.

    If the file was changed after the process began, the module may be from the former one: then no
    other process has the digest.

    Raises:
        OSError: it cannot be read.
    """
    changed_ns = os.stat(path).st_mtime_ns
    digest = _digests.get((path, changed_ns))
    if digest is None:
        with open(path, "rb") as file:
            is_newer = _BEGAN < changed_ns / 1e9 < time.time()
            content = os.urandom(16) if is_newer else file.read()
        digest = _digests[path, changed_ns] = hashlib.blake2b(content, digest_size=8).digest()
    return digest


# When this process began, or later, in seconds since 1970.
_BEGAN: Final = time.time() - time.process_time()


def _state_of_torch() -> Iterator[object]:
    """Yield settings of torch for the whole process."""
    import torch
    from torch import backends, distributed

    yield from (torch.get_default_dtype(), torch.get_float32_matmul_precision())
    yield from (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    yield from (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield from (torch.is_anomaly_enabled(), torch.get_deterministic_debug_mode())
    for part in (backends.mkldnn, backends.opt_einsum):  # not all in each release
        yield from (getattr(part, name, None) for name in ("enabled", "deterministic"))
    cudnn = backends.cudnn
    yield from (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
    yield distributed.is_available() and distributed.is_initialized()


def _is_users(name: str, module: types.ModuleType) -> bool:
    """Return whether a module may have code of the user.

    Compilers load modules too, so a process that compiles has others than one that hits: those
    that torch writes, namespaces without a file, and native ones that are loaded by their path.
    Modules in C have parts without a file.
    """
    is_known = name == "__mp_main__" or name.startswith(("torch.", "_s3cache_"))
    # torch's directory may be in that of the program.
    if is_known or _GENERATED.match(name) or origin_of(module).kind != "user":
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        is_part = name.partition(".")[0] in sys.stdlib_module_names
        return not (is_part or hasattr(module, "__path__"))
    on_path = any(path and file.startswith(path + os.sep) for path in sys.path)
    return on_path or not file.endswith((".so", ".pyd"))


def _is_own(name: str, value: object) -> bool:
    """Return whether a name in ``builtins`` is Python's."""
    if name in ("_", "None", "True", "False") or name.startswith("__"):
        return True
    module = getattr(value, "__module__", None)
    is_code = isinstance(value, (type, types.BuiltinFunctionType))
    is_constant = any(value is constant for constant in (Ellipsis, NotImplemented))
    return (is_code and module == "builtins") or name in _BY_SITE or is_constant


_BY_SITE = frozenset({"copyright", "credits", "exit", "quit", "license", "help", "open"})


def _codes(scope: Mapping[str, object]) -> Iterator[str]:
    """Yield texts of the functions and classes in a module without a file, as of a notebook."""
    module = scope.get("__name__")
    for name, value in sorted(scope.items(), key=lambda item: str(item[0])):
        if getattr(value, "__module__", None) != module:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        codes = [code_digest(each.__code__) for each in members if isinstance(each, _FUNCTION)]
        if codes:
            yield f"{name} {codes}"


def _texts(values: Mapping[str, object]) -> Iterator[str]:
    for name, value in sorted(values.items()):
        if not _IGNORED.fullmatch(name):
            yield f"{name} {value!r}" if type(value) in _PLAIN else f"{name} {_name_of(value)}"


def _name_of(value: Any) -> str:
    kind = type(value)
    name = getattr(value, "__qualname__", "")
    return f"{kind.__qualname__} {getattr(value, '__module__', '')}.{name}"


def _digest(parts: Iterable[object]) -> bytes:
    text = "\n".join(map(str, parts))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
