"""Describe the differences between two keys in terms of the user's program."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from s3cache.records import Record

#: The component that is the graph itself.
GRAPH = "gm"

_SHOWN_CHARACTERS = 200
_DIFF_LINES = 200


@dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        component: of the key.
        text: the difference, in one line.
        old, new: the value of the entry, and that of the lookup.
        diff: lines of code that differ, as ``diff -u`` has them.
        follows: whether another difference causes this one.
    """

    component: str
    text: str
    old: str = ""
    new: str = ""
    diff: str = ""
    follows: bool = False

    def as_dict(self) -> dict[str, object]:
        """Return the attributes that are not empty."""
        return {name: value for name, value in vars(self).items() if value}


def differences(old: Record, new: Record) -> list[Difference]:
    """Return the differences between the key of an entry, ``old``, and that of a lookup.

    Those that another one causes come last: another torch has other options.
    """
    differing = _differing(old, new)
    found = []
    for name in differing:
        follows = any(cause in differing and name in implied for cause, implied in _IMPLIED.items())
        found += [replace(each, follows=follows) for each in _described(name, old, new)]
    return sorted(found, key=lambda each: each.follows)


def likeness(old: Record, new: Record) -> tuple[bool, int]:
    """Return whether the graphs are equal, and how many components are: more is nearer."""
    common = sum(digest == _digest(old, name) for name, (digest, _) in new.components.items())
    return _digest(old, GRAPH) == _digest(new, GRAPH), common


def unlikeness(old: Record, new: Record) -> tuple[bool, int]:
    """Return how many details of components other than the graph differ: fewer is nearer.

    Before that, whether it is unknown, as one side lacks details that the other has.
    """
    names = [name for name in _differing(old, new) if name != GRAPH]
    is_unknown = any((name in old.parts) != (name in new.parts) for name in names)
    return is_unknown, sum(len([*_described(name, old, new)]) for name in names)


def _differing(old: Record, new: Record) -> list[str]:
    names = dict.fromkeys([*_ORDER, *sorted({*old.components, *new.components})])
    return [name for name in names if _digest(old, name) != _digest(new, name)]


def _digest(of: Record, name: str) -> str:
    return of.components.get(name, ("", ""))[0]


def _parts(of: Record, name: str) -> Mapping[str, str]:
    return of.parts.get(name, {})


def _text(of: Record, name: str) -> str:
    """Return the whole text of a component's value."""
    return _parts(of, name).get("", of.components.get(name, ("", ""))[1])


_ORDER = (
    "s3cache.schema",
    "torch.version",
    "python.abi",
    "machine.os",
    "machine.arch",
    "machine.isa",
    "torch.cpu_capability",
    "inductor_config",
    "autograd_config",
    GRAPH,
    "example_inputs",
)
_IMPLIED = {
    "torch.version": {
        *("torch.build", "torch.cxx_abi", "torch_version", "system_info", "torch.overrides"),
        *("inductor_config", "autograd_config", "dynamo.config", "shapes.config"),
    },
    "machine.isa": {"torch.cpu_capability"},
    "machine.arch": {"machine.isa", "torch.cpu_capability", "torch.build", "python.abi"},
}
_LABELS = {
    GRAPH: "graph",
    "torch.version": "torch",
    "torch.build": "build of torch",
    "torch_version": "sources of torch",
    "python.abi": "Python",
    "machine.arch": "processor architecture",
    "machine.os": "operating system",
    "machine.accelerator": "accelerator and its driver",
    "triton.environment": "environment variables of Triton",
    "torch.cpu_capability": "CPU capability (ATEN_CPU_CAPABILITY)",
    "torch.num_threads": "number of threads (torch.set_num_threads, OMP_NUM_THREADS)",
    "cpp_runtime_thread_count": "number of threads of C++ code",
    "inductor_config": "inductor",
    "inductor_config_comms": "inductor.aten_distributed_optimizations",
    "autograd_config": "functorch",
    "aot_config": "AOTAutograd",
    "cache_key_tag": "torch.compiler.config.cache_key_tag",
    "s3cache.schema": "format of entries (the release of s3cache)",
    "grad_enabled": "gradients enabled",
    "deterministic_algorithms_settings": "torch.use_deterministic_algorithms",
    "graph.operators": "custom operators",
    "graph.functions": "functions that the graph calls",
    "graph.subclasses": "tensor subclasses",
    "graph.constants": "tensors that the graph holds itself",
    "graph.annotations": "annotations of nodes",
    "graph.vouched": "versions given to register_cacheable",
    "graph.values": "sizes, strides and types of the values in the traced graph",
    "graph.fakes": "fake implementations that Inductor calls again",
    "torch.overrides": "functions of torch that were replaced",
    "inputs.sharing": "inputs that share memory",
    "inputs.places": "where inputs begin in their storages",
    "inputs.bounds": "bounds of dynamic sizes",
    "torch.attention": "attention",
    "torch.precision": "fp32_precision",
}


# -- the ways to describe a component


def _described(name: str, old: Record, new: Record) -> Iterator[Difference]:
    """Describe one component in its own way, else by its details, else as a whole."""
    describe = _OWN_WAYS.get(name)
    own = [] if describe is None else [*describe(name, old, new)]
    yield from own or _in_general(name, old, new)


def _in_general(name: str, old: Record, new: Record) -> Iterator[Difference]:
    label = _LABELS.get(name, name)
    before, now = _text(old, name), _text(new, name)
    ours, theirs = _parts(old, name), _parts(new, name)
    if name in _OPTIONS:
        ours, theirs = _with_defaults(ours, theirs), _with_defaults(theirs, ours)
    elif "" in ours or "" in theirs or not (ours or theirs):
        ours, theirs = _fields(before), _fields(now)
    is_known = (ours or not before) and (theirs or not now)
    found = [
        _arrow(name, _joined(label, part), ours.get(part, ""), theirs.get(part, ""))
        for part in ({**ours, **theirs} if is_known else ())
        if ours.get(part) != theirs.get(part)
    ]
    if found:
        yield from found
    elif before != now:
        yield _arrow(name, label, before, now)
    else:
        yield Difference(name, f"{label} differs in what its words do not show: {_short(now)}")


def _joined(label: str, part: str) -> str:
    return f"{label}: {part}" if " " in label else f"{label}.{part}".rstrip(".")


def _arrow(name: str, label: str, old: str, new: str) -> Difference:
    text = f"{label} {_short(old)} → {_short(new)}"
    if all(re.fullmatch(_DIGEST, each.strip("'")) for each in (old or new, new or old)):
        how = "is defined otherwise" if old and new else "is not there" if old else "is new"
        text = f"{label} {how}"
    return Difference(name, text, old, new)


def _short(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return cut or "none"


# Their details are those that differ from a default: `1 → 2`.
_OPTIONS = ("inductor_config", "autograd_config")


def _with_defaults(options: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the values of options, with the default of each that only ``others`` have set."""
    return {
        each: options[each].partition(" → ")[2]
        if each in options
        else others[each].partition(" → ")[0]
        for each in sorted({*options, *others})
    }


# The instruction sets that a processor is known by, the best first.
_SETS = ("amx_tile", "avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "asimd")


def _instructions(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = _text(old, name).split(), _text(new, name).split()
    lacks = " ".join(each for each in before if each not in now)
    has = " ".join(each for each in now if each not in before)
    best = [next((s for s in _SETS if s in flags), "") for flags in (before, now)]
    text = f"CPU: {best[0]} → {best[1]}" if best[0] != best[1] else "CPU"
    details = [f"lacks {_short(lacks)}"] if lacks else []
    details += [f"has {_short(has)} besides"] if has else []
    text = text.replace("avx512f", "avx512") + (f" ({', '.join(details)})" if details else "")
    yield Difference(name, text, lacks, has)


def _code(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = _parts(old, name).get("code", ""), _parts(new, name).get("code", "")
    if not (before and now):
        return
    codes = before.strip().splitlines(), now.strip().splitlines()
    lines = [*difflib.unified_diff(*codes, "entry", "here", lineterm="", n=1)][2:]
    count = max(sum(line[:1] == sign for line in lines) for sign in "+-")
    text = f"graph: {count} {'node differs' if count == 1 else 'nodes differ'}"
    if not count:
        text = "graph: the same code, and functions, constants or attributes that differ"
    diff = "\n".join(lines[:_DIFF_LINES])
    yield Difference(name, text, _text(old, name), _text(new, name), diff)


def _inputs(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = _parts(old, name), _parts(new, name)
    names_before, names_now = _input_names(old), _input_names(new)
    if not (before and now):
        return
    has_other_count = len(before) != len(now)
    if has_other_count:
        yield _arrow(name, "inputs:", str(len(before)), str(len(now)))
        before = {names_before.get(number, ""): text for number, text in before.items()}
    by_name = has_other_count and bool(names_before and names_now)
    for number, text in now.items():
        called = names_now.get(number, "")
        was = before.get(called if by_name else number)
        if was is not None and was != text:
            label = f"input {number} ({called}):" if called else f"input {number}:"
            yield from _tensor(name, label, was, text)


def _input_names(of: Record) -> dict[str, str]:
    """Return the program's name of each input, by its number."""
    text = _parts(of, "aot_config").get("aot_autograd_arg_pos_to_source", "")
    sources = _pieces(text[1:-1], ", ") if text.startswith("[") else ()
    return {str(number): source for number, source in enumerate(sources)}


_TENSOR = "TensorMetadata("
# Follow from the shape of a tensor.
_OF_SHAPE = ("stride", "storage_bytes", "memory_format")


def _tensor(name: str, label: str, before: str, now: str) -> Iterator[Difference]:
    ours, theirs = (
        _fields(text[len(_TENSOR) : -1], ", ") if text.startswith(_TENSOR) else {}
        for text in (before, now)
    )
    if not (ours and theirs):
        yield _arrow(name, label, before, now)
        return
    differing = [part for part in theirs if ours.get(part) != theirs[part]]
    for part in differing:
        if "shape" in differing and part in _OF_SHAPE:
            continue
        one, other = _plain(ours.get(part, "")), _plain(theirs[part])
        kind = "" if part in ("shape", "dtype", "device") else f" {part}"
        is_fixed = part == "shape" and not re.search(r"[^\d\s,()]", one + other)
        text = f"{label}{kind} {one} → {other}{', not marked dynamic' if is_fixed else ''}"
        yield Difference(name, text, one, other)


def _plain(text: str) -> str:
    if size := re.fullmatch(r"torch\.Size\(\[(.*)\]\)", text):
        return f"({size[1]},)" if size[1] and "," not in size[1] else f"({size[1]})"
    if device := re.fullmatch(r"device\(type='(\w+)'(?:, index=(\d+))?\)", text):
        return ":".join(filter(None, device.groups()))
    return text.removeprefix("torch.")


_OWN_WAYS: dict[str, Callable[[str, Record, Record], Iterator[Difference]]] = {
    "machine.isa": _instructions,
    GRAPH: _code,
    "example_inputs": _inputs,
}


# -- texts taken to pieces: `name=value` of a mode, of a tensor; `operator: digest`


_DIGEST = r"[0-9a-f]{32}(?:[0-9a-f]{32})?"
_DIGESTED = re.compile(rf"(\S+?)(?:: |=)({_DIGEST})(?=[\s;,]|$)")
_ENCLOSED = r"""'[^']*'|"[^"]*"|\((?:[^()]|\([^()]*\))*\)|\[(?:[^][]|\[[^][]*\])*\]|\{[^{}]*\}"""


def _pieces(text: str, separator: str) -> list[str]:
    """Return what is between separators that are in no brackets and no quotes."""
    pieces = re.findall(rf"(?:{_ENCLOSED}|(?!{separator}).)+", text, re.DOTALL)
    return [piece.strip() for piece in pieces]


def _fields(text: str, separator: str = " ") -> dict[str, str]:
    """Return values or digests by name, where ``text`` is a list of such pairs; else nothing."""
    pairs = [piece.partition("=") for piece in _pieces(text, separator)]
    are_fields = all(equals and re.fullmatch(r"[\w.]*", name) for name, equals, _ in pairs)
    return {one: value for one, _, value in pairs} if are_fields else dict(_DIGESTED.findall(text))
