"""What differs between two keys is named as users name it."""

from __future__ import annotations

import hashlib

import pytest

from s3cache.insight import KeyDescription, differences

TENSOR = (
    "TensorMetadata(dtype=torch.float32, shape=torch.Size([{shape}]), stride=({stride}), "
    "device=device(type='{device}'), layout=torch.strided, memory_format=torch.contiguous_format, "
    "storage_offset=0, storage_bytes=None, requires_grad={grad})"
)


def tensor(
    shape: str = "4, 64", stride: str = "64, 1", device: str = "cpu", grad: bool = False
) -> str:
    return TENSOR.format(shape=shape, stride=stride, device=device, grad=grad)


def described(parts: dict[str, dict[str, str]] | None = None, **values: str) -> KeyDescription:
    """Components of these values (``__`` is a dot in a name), and of these parts."""
    texts = {name.replace("__", "."): value for name, value in values.items()}
    contents = {**texts, **{name: str(each) for name, each in (parts or {}).items()}}
    components = {
        name: (hashlib.sha256(content.encode()).hexdigest()[:32], texts.get(name, ""))
        for name, content in contents.items()
    }
    return KeyDescription(components, parts or {})


def texts(old: KeyDescription, new: KeyDescription) -> list[str]:
    return [each.text for each in differences(old, new)]


def test_equal_keys_differ_in_nothing() -> None:
    one = described({"gm": {"code": "x"}}, torch__version="2.12.1")
    assert differences(one, one) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("torch__version", "2.12.1", "2.13.0", "torch 2.12.1 → 2.13.0"),
        ("cache_key_tag", "", "blue", "torch.compiler.config.cache_key_tag none → blue"),
        (
            "torch__backends",
            "mkldnn=True cudnn.benchmark=False",
            "mkldnn=True cudnn.benchmark=True",
            "torch.backends.cudnn.benchmark False → True",
        ),
        ("torch__attention", "priority=[0, 1] math=True", "priority=[1, 0] math=True",
         "attention.priority [0, 1] → [1, 0]"),
        ("torch__precision", "='none' mkldnn='tf32'", "='ieee' mkldnn='tf32'",
         "fp32_precision 'none' → 'ieee'"),
        ("machine__isa", "avx avx2 avx512f fma", "avx avx2 fma",
         "CPU: avx512 → avx2 (lacks avx512f)"),
        ("machine__isa", "avx avx2", "avx avx2 vnni", "CPU (has vnni besides)"),
        ("grad_enabled", "True", "False", "gradients enabled True → False"),
        ("of_tomorrow", "1", "2", "of_tomorrow 1 → 2"),
        ("custom_pass", "a" * 32, "b" * 32, "custom_pass: the code or value is another"),
        ("inputs__sharing", "", "0@0 1@4", "inputs that share memory none → 0@0 1@4"),
    ],
)  # fmt: skip
def test_a_value_is_shown_old_and_new(name: str, old: str, new: str, text: str) -> None:
    assert texts(described(None, **{name: old}), described(None, **{name: new})) == [text]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {"max_autotune": "False → True"}, ["inductor.max_autotune False → True"]),
        ({"max_autotune": "False → True"}, {}, ["inductor.max_autotune True → False"]),
        ({"size": "64 → 7"}, {"size": "64 → 8"}, ["inductor.size 7 → 8"]),
        (
            {"a": "1 → 2"},
            {"b": "None → 'x'"},
            ["inductor.a 2 → 1", "inductor.b None → 'x'"],
        ),
    ],
)
def test_options_are_shown_by_name_with_the_default(
    old: dict[str, str], new: dict[str, str], expected: list[str]
) -> None:
    pair = (described({"inductor_config": each}) for each in (old, new))
    assert texts(*pair) == expected


def test_options_with_other_defaults_are_shown_to_differ() -> None:
    old, new = described(inductor_config="defaults"), described(inductor_config="defaults")
    new = KeyDescription({"inductor_config": ("another digest", "defaults")})
    (text,) = texts(old, new)
    assert text.startswith("inductor options, whose defaults")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            tensor("4, 128", "128, 1"),
            "input 1 (L['x']): (4, 64) → (4, 128), not marked dynamic",
        ),
        (tensor("s0, 64"), "input 1 (L['x']): (4, 64) → (s0, 64)"),
        (tensor("64"), "input 1 (L['x']): (4, 64) → (64,), not marked dynamic"),
        (tensor(stride="1, 4"), "input 1 (L['x']): stride (64, 1) → (1, 4)"),
        (tensor(device="cuda"), "input 1 (L['x']): cpu → cuda"),
        (tensor(grad=True), "input 1 (L['x']): requires_grad False → True"),
    ],
)
def test_an_input_is_shown_by_its_name_and_what_differs(changed: str, text: str) -> None:
    sources = {"aot_config": {"aot_autograd_arg_pos_to_source": "[L['self'].weight, L['x']]"}}
    old = described({**sources, "example_inputs": {"0": tensor(), "1": tensor()}})
    new = described({**sources, "example_inputs": {"0": tensor(), "1": changed}})
    assert texts(old, new) == [text]


def test_a_graph_is_shown_by_the_lines_that_differ() -> None:
    old = described({"gm": {"code": "def f(x):\n    y = x + 1\n    return y\n"}})
    new = described({"gm": {"code": "def f(x):\n    y = x + 2\n    return y\n"}})
    (found,) = differences(old, new)
    assert found.text == "graph: 1 node differs"
    assert found.diff.splitlines()[1:] == [
        " def f(x):",
        "-    y = x + 1",
        "+    y = x + 2",
        "     return y",
    ]


def test_a_graph_with_the_same_code_differs_in_its_attributes() -> None:
    code = {"gm": {"code": "def f(x): ..."}}
    (text,) = texts(KeyDescription({"gm": ("a", "graph of 3 nodes")}, code),
                    KeyDescription({"gm": ("b", "graph of 3 nodes")}, code))  # fmt: skip
    assert text.startswith("graph: the same code")


def test_what_follows_from_another_difference_comes_last_and_says_so() -> None:
    old = described(
        torch__version="2.12.1", torch__build="a", inductor_config="x", grad_enabled="True"
    )
    new = described(
        torch__version="2.13.0", torch__build="b", inductor_config="y", grad_enabled="False"
    )
    found = [(each.component, each.follows) for each in differences(old, new)]
    assert found == [
        ("torch.version", False),
        ("grad_enabled", False),
        ("inductor_config", True),
        ("torch.build", True),
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (f"l.f: {'a' * 32}", f"l.f: {'b' * 32}", "custom operators: l.f is defined otherwise"),
        (f"l.f: {'a' * 32}", f"l.f: {'a' * 32} l.g: {'b' * 32}", "custom operators: l.g is new"),
        (f"l.f: {'a' * 32} l.g: {'b' * 32}", f"l.g: {'b' * 32}",
         "custom operators: l.f is not there"),
        ("l.f version 1", "l.f version 2", "custom operators l.f version 1 → l.f version 2"),
    ],
)  # fmt: skip
def test_definitions_are_shown_by_name(old: str, new: str, expected: str) -> None:
    before, now = described(graph__operators=old), described(graph__operators=new)
    assert texts(before, now) == [expected]


def test_inputs_of_another_count_are_compared_by_name() -> None:
    def of(names: str, *inputs: str) -> KeyDescription:
        given = {str(number): each for number, each in enumerate(inputs)}
        sources = {"aot_autograd_arg_pos_to_source": names}
        return described({"aot_config": sources, "example_inputs": given})

    found = texts(
        of("[L['x'], L['y']]", tensor("4, 64"), tensor("8, 64")),
        of("[L['n'], L['x'], L['y']]", tensor("3, 3"), tensor("4, 64"), tensor("9, 64")),
    )
    assert found[:2] == ["inputs: 2 → 3", "input 2 (L['y']): (8, 64) → (9, 64), not marked dynamic"]
