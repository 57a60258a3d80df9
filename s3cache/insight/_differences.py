"""Say what differs between two keys, in terms of the user's program."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["GRAPH", "Difference", "KeyDescription", "differences", "likeness", "unlikeness"]

#: The component that is the graph itself.
GRAPH = "gm"

_SHOWN_CHARACTERS = 200
_DIFF_LINES = 200


@dataclass(frozen=True)
class KeyDescription:
    """What a key is made of.

    Attributes:
        components: the digest and a readable value of each, by name.
        parts: what they consist of, of those whose value does not say it.
    """

    components: Mapping[str, tuple[str, str]]
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def text_of(self, component: str) -> str:
        """All that there is of its value."""
        value = self.components.get(component, ("", ""))[1]
        return self.parts.get(component, {}).get("", value)


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        component: of the key.
        text: what differs, in one line.
        old, new: that of the entry, and that of the lookup.
        diff: lines of code that differ, as ``diff -u`` has them.
        follows: whether something else that differs brings it about.
    """

    component: str
    text: str
    old: str = ""
    new: str = ""
    diff: str = ""
    follows: bool = False

    def as_dict(self) -> dict[str, object]:
        """The attributes that are not empty."""
        return {name: value for name, value in vars(self).items() if value}


def differences(old: KeyDescription, new: KeyDescription) -> list[Difference]:
    """Each thing in which the key of an entry, ``old``, and that of a lookup differ.

    What another difference brings about comes last: another torch has other options.
    """
    names = dict.fromkeys([*_ORDER, *sorted({*old.components, *new.components})])
    differing = [name for name in names if _digest(old, name) != _digest(new, name)]
    found: list[Difference] = []
    for name in differing:
        follows = any(cause in differing and name in implied for cause, implied in _IMPLIED.items())
        for each in _WORDS.get(name, _in_general)(name, old, new):
            found.append(
                Difference(
                    each.component, each.text, each.old, each.new, each.diff, follows=follows
                )
            )
    return sorted(found, key=lambda each: each.follows)


def likeness(old: KeyDescription, new: KeyDescription) -> tuple[bool, int]:
    """How near two keys are: the same graph before all, then the most components in common."""
    common = sum(digest == _digest(old, name) for name, (digest, _) in new.components.items())
    return _digest(old, GRAPH) == _digest(new, GRAPH), common


def unlikeness(old: KeyDescription, new: KeyDescription) -> tuple[bool, int]:
    """In how many of their parts components other than the graph differ.

    Before that whether it is not known, as one side lacks the parts that the other has.
    """
    differing = [
        name
        for name in {*old.components, *new.components} - {GRAPH}
        if _digest(old, name) != _digest(new, name)
    ]
    is_unknown = any((name in old.parts) != (name in new.parts) for name in differing)
    counts = (len([*_WORDS.get(name, _in_general)(name, old, new)]) for name in differing)
    return is_unknown, sum(counts)


def _digest(of: KeyDescription, name: str) -> str:
    return of.components.get(name, ("", ""))[0]


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


_PARTS = {"aot_autograd_arg_pos_to_source": "what the program calls inputs:"}


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _arrow(label: str, old: str, new: str) -> str:
    if _is_digest(old) and _is_digest(new):
        return f"{label}: the code or value is another"
    return f"{label} {_short(old) or 'none'} → {_short(new) or 'none'}"


def _is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text.strip("'")) is not None


def _in_general(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    """By parts, by ``name=value`` in a text, or as a whole."""
    label = _label(name)
    before, now = old.text_of(name), new.text_of(name)
    ours, theirs = dict(old.parts.get(name, {})), dict(new.parts.get(name, {}))
    if "" in ours or "" in theirs or not (ours or theirs):
        ours, theirs = fields_of(before), fields_of(now)
    differing = [
        part for part in dict.fromkeys([*ours, *theirs]) if ours.get(part) != theirs.get(part)
    ]
    if not (ours and theirs and differing):
        if before != now:
            yield Difference(name, _arrow(label, before, now), before, now)
        else:
            yield Difference(name, f"{label} differs in what its words do not show: {_short(now)}")
        return
    for part in differing:
        one, other = ours.get(part, ""), theirs.get(part, "")
        called = _PARTS.get(part, f"{label}.{part}".rstrip("."))
        yield Difference(name, _arrow(called, one, other), one, other)


def _options(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    """Options of torch: their parts are those that are not the default, with the default."""
    before, now = old.parts.get(name, {}), new.parts.get(name, {})
    is_described = False
    for option in sorted({*before, *now}):
        if before.get(option) != now.get(option):
            default, _, _ = (now.get(option) or before[option]).partition(" → ")
            one = before[option].partition(" → ")[2] if option in before else default
            other = now[option].partition(" → ")[2] if option in now else default
            is_described = True
            yield Difference(name, _arrow(f"{_label(name)}.{option}", one, other), one, other)
    if not is_described:
        text = f"{_label(name)} options, whose defaults are those of another release or device"
        yield Difference(name, text)


_DIGEST = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{32})?")
# A name with the digest of what it stands for: `lib.op.default: 0123…`, `torch.relu=0123…`.
_DIGESTED = re.compile(rf"(\S+?)(?:: |=)({_DIGEST.pattern})(?=[\s;,]|$)")


def _definitions(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    """Names with digests of what they stand for: people's own functions, operators, classes."""
    label = _label(name)
    before, now = (dict(_DIGESTED.findall(each.text_of(name))) for each in (old, new))
    is_described = False
    for each in dict.fromkeys([*before, *now]):
        if before.get(each) != now.get(each):
            is_described = True
            what = "is defined otherwise" if each in before else "is new"
            what = what if each in now else "is not there"
            one, other = before.get(each, ""), now.get(each, "")
            yield Difference(name, f"{label}: {each} {what}", one, other)
    if not is_described:
        yield from _in_general(name, old, new)


_SETS = ("amx_tile", "avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "asimd")


def _instructions(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    before, now = old.text_of(name).split(), new.text_of(name).split()
    lacks = [each for each in before if each not in now]
    has = [each for each in now if each not in before]
    best = [next((s for s in _SETS if s in flags), "") for flags in (before, now)]
    text = (
        f"CPU: {best[0]} → {best[1]}".replace("avx512f", "avx512") if best[0] != best[1] else "CPU"
    )
    details = []
    if lacks:
        details.append(f"lacks {_short(' '.join(lacks))}")
    if has:
        details.append(f"has {_short(' '.join(has))} besides")
    yield Difference(
        name, f"{text} ({', '.join(details)})" if details else text, " ".join(lacks), " ".join(has)
    )


def _code(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    before, now = (each.parts.get(name, {}).get("code", "") for each in (old, new))
    one, other = old.components.get(name, ("", ""))[1], new.components.get(name, ("", ""))[1]
    if not (before and now):
        yield Difference(name, _arrow("graph:", one, other), one, other)
        return
    lines = list(
        difflib.unified_diff(
            before.strip().splitlines(), now.strip().splitlines(), "entry", "here", lineterm="", n=1
        )
    )
    changed = [line for line in lines[2:] if line[:1] in "+-"]
    count = max(sum(line[0] == sign for line in changed) for sign in "+-") if changed else 0
    if not count:
        text = "graph: the same code, and functions, constants or attributes that differ"
        yield Difference(name, text, one, other)
        return
    nodes = "node differs" if count == 1 else "nodes differ"
    yield Difference(
        name, f"graph: {count} {nodes}", one, other, "\n".join(lines[2 : 2 + _DIFF_LINES])
    )


def _input_names(of: KeyDescription) -> dict[str, str]:
    """What the program calls each input, by its number."""
    sources = of.parts.get("aot_config", {}).get("aot_autograd_arg_pos_to_source", "")
    return {str(number): source for number, source in enumerate(items_of(sources))}


# What follows from the shape of a tensor.
_OF_SHAPE = ("stride", "storage_bytes", "memory_format")
_OF_TENSORS = "TensorMetadata("


def _inputs(name: str, old: KeyDescription, new: KeyDescription) -> Iterator[Difference]:
    before, now = old.parts.get(name, {}), new.parts.get(name, {})
    if not (before and now):
        yield from _in_general(name, old, new)
        return
    is_described = False
    names_before, names_now = _input_names(old), _input_names(new)
    by_name = False
    if len(before) != len(now):
        is_described = True
        counts = str(len(before)), str(len(now))
        yield Difference(name, f"inputs: {counts[0]} → {counts[1]}", *counts)
        by_name = bool(names_before and names_now)
        before = {names_before.get(number, ""): text for number, text in before.items()}
    for number, text in now.items():
        called = names_now.get(number, "")
        was = before.get(called if by_name else number)
        if was is not None and was != text:
            is_described = True
            label = f"input {number} ({called}):" if called else f"input {number}:"
            yield from _tensor(name, label, was, text)
    if not is_described:
        yield Difference(name, "inputs differ in what their words do not show")


def _tensor(name: str, label: str, before: str, now: str) -> Iterator[Difference]:
    ours, theirs = _metadata(before), _metadata(now)
    if not (ours and theirs):
        yield Difference(name, _arrow(label, before, now), before, now)
        return
    differing = [part for part in theirs if ours.get(part) != theirs[part]]
    if "shape" in differing:
        differing = [part for part in differing if part not in _OF_SHAPE]
    for part in differing:
        one, other = _plain(ours.get(part, "")), _plain(theirs[part])
        kind = "" if part in ("shape", "dtype", "device") else f" {part}"
        text = f"{label}{kind} {one} → {other}"
        if part == "shape" and _is_fixed(one) and _is_fixed(other):
            text += ", not marked dynamic"
        yield Difference(name, text, one, other)


def _metadata(text: str) -> dict[str, str]:
    if not text.startswith(_OF_TENSORS):
        return {}
    return fields_of(text[len(_OF_TENSORS) : -1], ", ")


def _plain(text: str) -> str:
    if text.startswith("torch.Size([") and text.endswith("])"):
        inner = text[len("torch.Size([") : -2]
        return f"({inner},)" if inner and "," not in inner else f"({inner})"
    if text.startswith("device(type="):
        return text[len("device(type=") : -1].replace("'", "").replace(", index=", ":")
    return text.removeprefix("torch.")


def _is_fixed(shape: str) -> bool:
    return all(size.strip().isdigit() for size in shape.strip("()").split(",") if size.strip())


_OF_DEFINITIONS = ("graph.operators", "graph.functions", "graph.subclasses", "torch.overrides")
_WORDS: dict[str, Callable[[str, KeyDescription, KeyDescription], Iterator[Difference]]] = {
    **dict.fromkeys(_OF_DEFINITIONS, _definitions),
    "inductor_config": _options,
    "autograd_config": _options,
    "machine.isa": _instructions,
    GRAPH: _code,
    "example_inputs": _inputs,
}


# -- texts of parts taken to pieces: `name=value` of a mode, of a tensor, of options


_OPEN, _CLOSE = "([{", ")]}"


def pieces(text: str, separator: str) -> Iterator[str]:
    """``text`` between separators that are in no brackets and no quotes."""
    depth, quote, start = 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif depth == 0 and at >= start and text.startswith(separator, at):
            yield text[start:at]
            start = at + len(separator)
    yield text[start:]


def fields_of(text: str, separator: str = " ") -> dict[str, str]:
    """Values by name, where ``text`` is ``name=value`` with separators between; else nothing."""
    found: dict[str, str] = {}
    for piece in pieces(text, separator):
        name, equals, value = piece.partition("=")
        is_name = not name or name.replace(".", "").replace("_", "").isalnum()
        if not (equals and is_name):
            return {}
        found[name] = value
    return found


def items_of(text: str) -> list[str]:
    """The items of a list in brackets."""
    if not (text.startswith("[") and text.endswith("]")) or len(text) < 3:
        return []
    return list(pieces(text[1:-1], ", "))
