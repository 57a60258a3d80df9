"""Differences between two keys have names that users know."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from s3cache.insight import differences
from s3cache.records import Record

A, B = "a" * 32, "b" * 32


def described(parts: dict[str, dict[str, str]] | None = None, **values: str) -> Record:
    """Return a record with components of these values and parts (``__`` is a dot in a name)."""
    texts = {name.replace("__", "."): value for name, value in values.items()}
    contents = {**texts, **{name: str(each) for name, each in (parts or {}).items()}}
    components = {
        name: (hashlib.sha256(content.encode()).hexdigest()[:32], texts.get(name, ""))
        for name, content in contents.items()
    }
    return Record("aot", "miss", components=components, parts=parts or {})


def texts(old: Record, new: Record) -> list[str]:
    return [each.text for each in differences(old, new)]


def test_equal_keys_have_no_differences() -> None:
    one = described({"gm": {"code": "x"}}, torch__version="2.12.1")
    assert differences(one, one) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("torch__version", "2.12.1", "2.13.0", "torch 2.12.1 → 2.13.0"),
        ("cache_key_tag", "", "blue", "torch.compiler.config.cache_key_tag none → blue"),
        ("torch__backends", "mkldnn=True cudnn.benchmark=False",
         "mkldnn=True cudnn.benchmark=True", "torch.backends.cudnn.benchmark False → True"),
        ("torch__attention", "priority=[0, 1] math=True", "priority=[1, 0] math=True",
         "torch.attention.priority [0, 1] → [1, 0]"),
        ("torch__precision", "='none' mkldnn='tf32'", "='ieee' mkldnn='tf32'",
         "fp32_precision 'none' → 'ieee'"),
        ("machine__isa", "avx avx2 avx512f fma", "avx avx2 fma",
         "CPU lacks avx512f"),
        ("machine__isa", "avx avx2", "avx2 vnni", "CPU lacks avx, also has vnni"),
        ("grad_enabled", "True", "False", "gradients enabled True → False"),
        ("of_tomorrow", "1", "2", "of_tomorrow 1 → 2"),
        ("custom_pass", A, B, "custom_pass has another definition"),
        ("inputs__sharing", "", "0@0 1@4", "inputs.sharing none → 0@0 1@4"),
        ("graph__operators", f"l.f: {A}", f"l.f: {B}",
         "custom operators: l.f has another definition"),
        ("graph__operators", "", f"l.f: {A}", "custom operators: l.f is new"),
        ("graph__operators", f"l.f: {A} l.g: {B}", f"l.g: {B}",
         "custom operators: l.f is missing"),
        ("graph__operators", "l.f version 1", "l.f version 2",
         "custom operators l.f version 1 → l.f version 2"),
    ],
)  # fmt: skip
def test_the_old_and_new_value_are_shown(name: str, old: str, new: str, text: str) -> None:
    assert texts(described(None, **{name: old}), described(None, **{name: new})) == [text]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {"max_autotune": "False → True"}, ["inductor.max_autotune False → True"]),
        ({"max_autotune": "False → True"}, {}, ["inductor.max_autotune True → False"]),
        ({"size": "64 → 7"}, {"size": "64 → 8"}, ["inductor.size 7 → 8"]),
        ({"a": "1 → 2"}, {"b": "None → 'x'"}, ["inductor.a 2 → 1", "inductor.b None → 'x'"]),
    ],
)
def test_missing_options_are_shown_with_their_default(
    old: dict[str, str], new: dict[str, str], expected: list[str]
) -> None:
    pair = (described({"inductor_config": each}) for each in (old, new))
    assert texts(*pair) == expected


@pytest.mark.parametrize("name", ["inductor_config", "gm"])
def test_equal_texts_with_different_digests_are_reported(name: str) -> None:
    old, new = (Record("aot", "miss", components={name: (digest, "words")}) for digest in (A, B))
    (text,) = texts(old, new)
    assert text.endswith("differs in a part that is not shown: words")
    code = {"gm": {"code": "def f(x): ..."}}
    if name == "gm":
        (text,) = texts(replace(old, parts=code), replace(new, parts=code))
        assert text.startswith("graph: the same code")


def tensor(
    shape: str = "4, 64", stride: str = "64, 1", device: str = "'cpu'", grad: bool = False
) -> str:
    return (
        f"TensorMetadata(dtype=torch.float32, shape=torch.Size([{shape}]), stride=({stride}), "
        f"device=device(type={device}), layout=torch.strided, storage_offset=0, "
        f"memory_format=torch.contiguous_format, storage_bytes=None, requires_grad={grad})"
    )


def with_inputs(names: str, *inputs: str) -> Record:
    given = {str(number): each for number, each in enumerate(inputs)}
    sources = {"aot_autograd_arg_pos_to_source": names}
    return described({"aot_config": sources, "example_inputs": given})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (tensor("4, 128", "128, 1"), "(4, 64) → (4, 128), not marked dynamic"),
        (tensor("s0, 64"), "(4, 64) → (s0, 64)"),
        (tensor("64"), "(4, 64) → (64,), not marked dynamic"),
        (tensor(stride="1, 4"), "stride (64, 1) → (1, 4)"),
        (tensor(device="'cuda', index=0"), "cpu → cuda:0"),
        (tensor(grad=True), "requires_grad False → True"),
    ],
)
def test_an_input_is_shown_by_its_name_and_its_difference(changed: str, text: str) -> None:
    names = "[L['self'].weight, L['x']]"
    old, new = (with_inputs(names, tensor(), each) for each in (tensor(), changed))
    assert texts(old, new) == [f"input 1 (L['x']): {text}"]


def test_a_different_number_of_inputs_is_shown() -> None:
    old, new = with_inputs("[L['x']]", tensor()), with_inputs("[L['x'], L['y']]", *2 * [tensor()])
    assert texts(old, new)[0] == "inputs: 1 → 2"


def test_a_graph_is_shown_by_the_lines_that_differ() -> None:
    code = "def f(x):\n    y = x + {}\n    return y\n"
    old, new = (described({"gm": {"code": code.format(number)}}) for number in (1, 2))
    (found,) = differences(old, new)
    assert found.text == "graph: 1 node differs"
    shown = [" def f(x):", "-    y = x + 1", "+    y = x + 2", "     return y"]
    assert found.diff.splitlines()[1:] == shown


def test_differences_that_follow_from_others_come_last_and_are_marked() -> None:
    names = ("torch__version", "torch__build", "inductor_config", "grad_enabled")
    old, new = (described(None, **dict.fromkeys(names, number)) for number in ("1", "2"))
    assert [(each.component, each.follows) for each in differences(old, new)] == [
        ("torch.version", False),
        ("grad_enabled", False),
        ("inductor_config", True),
        ("torch.build", True),
    ]
