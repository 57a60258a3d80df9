"""Describe the differences between two keys in terms of the user's program."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

#: The component that is the graph itself.
GRAPH = "gm"

_SHOWN_CHARACTERS = 200
_DIFF_LINES = 200


@dataclass(frozen=True)
class KeyDescription:
    """The components of a key.

    Attributes:
        components: the digest and a readable value of each, by name.
        parts: the details of components, where their value does not show them, by name.
    """

    components: Mapping[str, tuple[str, str]]
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def digest(self, name: str) -> str:
        """Return the digest of a component."""
        return self.components.get(name, ("", ""))[0]

    def value(self, name: str) -> str:
        """Return the readable value of a component."""
        return self.components.get(name, ("", ""))[1]

    def details(self, name: str) -> Mapping[str, str]:
        """Return the details of a component."""
        return self.parts.get(name, {})

    def text(self, name: str) -> str:
        """Return the whole text of a component's value."""
        return self.details(name).get("", self.value(name))


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


_Describe: TypeAlias = Callable[[str, KeyDescription, KeyDescription], Iterator[Difference]]


def differences(old: KeyDescription, new: KeyDescription) -> list[Difference]:
    """Return the differences between the key of an entry, ``old``, and that of a lookup.

    Those that another one causes come last: another torch has other options.
    """
    differing = _differing(old, new)
    found = []
    for name in differing:
        follows = any(cause in differing and name in implied for cause, implied in _IMPLIED.items())
        found += [replace(each, follows=follows) for each in _described(name, old, new)]
    return sorted(found, key=lambda each: each.follows)


def likeness(old: KeyDescription, new: KeyDescription) -> tuple[bool, int]:
    """Return whether the graphs are equal, and how many components are: more is nearer."""
    common = sum(digest == old.digest(name) for name, (digest, _) in new.components.items())
    return old.digest(GRAPH) == new.digest(GRAPH), common


def unlikeness(old: KeyDescription, new: KeyDescription) -> tuple[bool, int]:
    """Return how many details of components other than the graph differ: fewer is nearer.

    Before that, whether it is unknown, as one side lacks details that the other has.
    """
    names = [name for name in _differing(old, new) if name != GRAPH]
    is_unknown = any((name in old.parts) != (name in new.parts) for name in names)
    return is_unknown, sum(len([*_described(name, old, new)]) for name in names)


def _differing(old: KeyDescription, new: KeyDescription) -> list[str]:
    names = dict.fromkeys([*_ORDER, *sorted({*old.components, *new.components})])
    return [name for name in names if old.digest(name) != new.digest(name)]


def _described(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    """Describe one component in its own way, else in general."""
    describe = _OWN_WAYS.get(name)
    found = [] if describe is None else [*describe(name, old, new)]
    yield from found or _in_general(name, old, new)


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
_SOURCES = "aot_autograd_arg_pos_to_source"
_DETAIL_LABELS = {_SOURCES: "what the program calls inputs:"}
_DIGEST = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{32})?")


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _arrow(label: str, old: str, new: str) -> str:
    if _DIGEST.fullmatch(old.strip("'")) and _DIGEST.fullmatch(new.strip("'")):
        return f"{label}: the code or value is another"
    return f"{label} {_short(old) or 'none'} → {_short(new) or 'none'}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


# -- the ways to describe a component


def _in_general(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    """Describe a component by details, by ``name=value`` in its text, or as a whole."""
    label = _label(name)
    before, now = old.text(name), new.text(name)
    ours, theirs = dict(old.details(name)), dict(new.details(name))
    if "" in ours or "" in theirs or not (ours or theirs):
        ours, theirs = _fields(before), _fields(now)
    differing = [
        part for part in dict.fromkeys([*ours, *theirs]) if ours.get(part) != theirs.get(part)
    ]
    if ours and theirs and differing:
        for part in differing:
            one, other = ours.get(part, ""), theirs.get(part, "")
            detail = _DETAIL_LABELS.get(part, f"{label}.{part}".rstrip("."))
            yield Difference(name, _arrow(detail, one, other), one, other)
    elif before != now:
        yield Difference(name, _arrow(label, before, now), before, now)
    else:
        yield Difference(name, f"{label} differs in what its words do not show: {_short(now)}")


def _options(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    """Describe options of torch: details are those that differ from a default, ``1 → 2``."""
    before, now = old.details(name), new.details(name)
    differing = [each for each in sorted({*before, *now}) if before.get(each) != now.get(each)]
    for option in differing:
        default = (now.get(option) or before[option]).partition(" → ")[0]
        one, other = (
            options[option].partition(" → ")[2] if option in options else default
            for options in (before, now)
        )
        yield Difference(name, _arrow(f"{_label(name)}.{option}", one, other), one, other)
    if not differing:
        text = f"{_label(name)} options, whose defaults are those of another release or device"
        yield Difference(name, text)


# A name with the digest of its definition: `lib.op.default: 0123…`, `torch.relu=0123…`.
_DIGESTED = re.compile(rf"(\S+?)(?:: |=)({_DIGEST.pattern})(?=[\s;,]|$)")


def _definitions(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    """Describe the user's own functions, operators and classes by their names."""
    before, now = (dict(_DIGESTED.findall(each.text(name))) for each in (old, new))
    for each in dict.fromkeys([*before, *now]):
        if before.get(each) != now.get(each):
            what = "is defined otherwise" if each in before else "is new"
            what = what if each in now else "is not there"
            one, other = before.get(each, ""), now.get(each, "")
            yield Difference(name, f"{_label(name)}: {each} {what}", one, other)


# The instruction sets that a processor is known by, the best first.
_SETS = ("amx_tile", "avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "asimd")


def _instructions(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    before, now = old.text(name).split(), new.text(name).split()
    lacks = " ".join(each for each in before if each not in now)
    has = " ".join(each for each in now if each not in before)
    best = [next((s for s in _SETS if s in flags), "") for flags in (before, now)]
    text = f"CPU: {best[0]} → {best[1]}" if best[0] != best[1] else "CPU"
    details = [f"lacks {_short(lacks)}"] if lacks else []
    details += [f"has {_short(has)} besides"] if has else []
    text = text.replace("avx512f", "avx512") + (f" ({', '.join(details)})" if details else "")
    yield Difference(name, text, lacks, has)


def _code(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    before, now = (each.details(name).get("code", "") for each in (old, new))
    one, other = old.value(name), new.value(name)
    if not (before and now):
        yield Difference(name, _arrow("graph:", one, other), one, other)
        return
    codes = before.strip().splitlines(), now.strip().splitlines()
    lines = [*difflib.unified_diff(*codes, "entry", "here", lineterm="", n=1)][2:]
    count = max(sum(line[:1] == sign for line in lines) for sign in "+-")
    if not count:
        text = "graph: the same code, and functions, constants or attributes that differ"
        yield Difference(name, text, one, other)
        return
    text = f"graph: {count} {'node differs' if count == 1 else 'nodes differ'}"
    yield Difference(name, text, one, other, "\n".join(lines[:_DIFF_LINES]))


def _inputs(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    before, now = old.details(name), new.details(name)
    names_before, names_now = _input_names(old), _input_names(new)
    if not (before and now):
        return
    is_shown = len(before) != len(now)
    by_name = is_shown and bool(names_before and names_now)
    if is_shown:
        counts = str(len(before)), str(len(now))
        yield Difference(name, f"inputs: {counts[0]} → {counts[1]}", *counts)
        before = {names_before.get(number, ""): text for number, text in before.items()}
    for number, text in now.items():
        called = names_now.get(number, "")
        was = before.get(called if by_name else number)
        if was is not None and was != text:
            is_shown = True
            label = f"input {number} ({called}):" if called else f"input {number}:"
            yield from _tensor(name, label, was, text)
    if not is_shown:
        yield Difference(name, "inputs differ in what their words do not show")


def _input_names(of: KeyDescription) -> dict[str, str]:
    """Return the program's name of each input, by its number."""
    text = of.details("aot_config").get(_SOURCES, "")
    is_list = len(text) > 2 and text[0] == "[" and text[-1] == "]"
    sources = _pieces(text[1:-1], ", ") if is_list else ()
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
        yield Difference(name, _arrow(label, before, now), before, now)
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
    if text.startswith("device(type="):
        return text[len("device(type=") : -1].replace("'", "").replace(", index=", ":")
    return text.removeprefix("torch.")


_OF_DEFINITIONS = ("graph.operators", "graph.functions", "graph.subclasses", "torch.overrides")
_OWN_WAYS: dict[str, _Describe] = {
    **dict.fromkeys(_OF_DEFINITIONS, _definitions),
    "inductor_config": _options,
    "autograd_config": _options,
    "machine.isa": _instructions,
    GRAPH: _code,
    "example_inputs": _inputs,
}


# -- texts of details taken to pieces: `name=value` of a mode, of a tensor, of options


def _pieces(text: str, separator: str) -> Iterator[str]:
    """Yield what is between separators that are in no brackets and no quotes."""
    depth, quote, start = 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth == 0 and at >= start and text.startswith(separator, at):
            yield text[start:at]
            start = at + len(separator)
    yield text[start:]


def _fields(text: str, separator: str = " ") -> dict[str, str]:
    """Return values by name, where ``text`` is a list of ``name=value``; else nothing."""
    pairs = [piece.partition("=") for piece in _pieces(text, separator)]
    are_fields = all(equals and re.fullmatch(r"[\w.]*", name) for name, equals, _ in pairs)
    return {name: value for name, _, value in pairs} if are_fields else {}
