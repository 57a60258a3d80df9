"""Compile torch's own samples of its operators on a machine, and keep the results."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.watch import Watch


def names_of_all() -> list[str]:
    """Return the names of all operators that have samples and take float32 on the CPU."""
    return list(_operators())


def run(names: list[str], folder: str, backward: bool) -> dict[str, dict[str, Any]]:
    """Compile the first sample of each operator.

    Args:
        folder: the directory of the results, where an earlier machine's results are compared.
        backward: whether to run the backward pass too, if the operator has one.

    Returns:
        For each operator the counts of :class:`Watch`, ``status`` (``compiled``, ``no-sample``,
        ``eager-fails``, ``not-compilable`` or ``inaccurate``), ``why``, and ``equal`` (to the
        earlier machine's result, or ``None`` without one).
    """
    watch, operators = Watch(), _operators()
    found = {}
    for index, name in enumerate(names):
        kept = Path(folder, f"{index}.pt")
        found[name] = watch.around(partial(_compiled, operators[name], kept, backward))
    return found


def _operators() -> dict[str, Any]:
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        each.formatted_name: each for each in op_db if torch.float32 in each.supported_dtypes("cpu")
    }


def _compiled(operator: Any, kept: Path, backward: bool) -> dict[str, Any]:
    import torch

    torch.compiler.reset()
    backward = backward and operator.supports_autograd
    call = _caller(operator, backward)
    try:
        expected = call(lambda function: function)
    except StopIteration:
        return _status("no-sample")
    except Exception as exc:
        return _status("eager-fails", exc)
    try:
        with torch._inductor.config.patch(fallback_random=True):
            result = call(torch.compile)
    except Exception as exc:
        return _status("not-compilable", exc)
    equal = None
    if kept.exists():
        equal = not _difference(_read(kept), result, exact=True)
    else:
        _write(kept, result)
    # torch may differ from eager where an operator leaves values undefined, or rounds them.
    why = _difference(expected, result, exact=False)
    return {**_status("inaccurate" if why else "compiled", why), "equal": equal}


def _write(kept: Path, values: list[Any]) -> None:
    """Save each value separately, as torch cannot save tensors of two types with the same bytes."""
    import torch

    written = []
    for value in values:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        written.append(buffer.getvalue())
    kept.write_bytes(pickle.dumps(written))


def _read(kept: Path) -> list[Any]:
    import torch

    written = pickle.loads(kept.read_bytes())
    return [torch.load(io.BytesIO(each), weights_only=False) for each in written]


def _status(status: str, why: object = "") -> dict[str, Any]:
    return {"status": status, "why": str(why)[:300], "equal": None}


def _caller(operator: Any, backward: bool) -> Callable[[Any], list[Any]]:
    """Return a function of ``torch.compile`` that returns outputs, mutated inputs and gradients."""

    def call(compile_it: Any) -> list[Any]:
        import torch
        from torch.utils._pytree import tree_leaves

        _seed()
        sample = next(iter(operator.sample_inputs("cpu", torch.float32, requires_grad=backward)))

        def function(*args: Any, **kwargs: Any) -> Any:
            return operator.op(*args, **kwargs)

        _seed()
        outputs = compile_it(function)(sample.input, *sample.args, **sample.kwargs)
        if "empty" in operator.name.split("_"):
            for each in tree_leaves(outputs):
                each.detach().zero_()  # its shape and strides are defined, its values are not
        inputs = tree_leaves((sample.input, sample.args, sample.kwargs))
        gradients = _gradients(tree_leaves(outputs), inputs) if backward else []
        return [_detached(each) for each in (*tree_leaves(outputs), *inputs, *gradients)]

    return call


def _gradients(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    import torch

    reached = [e for e in outputs if isinstance(e, torch.Tensor) and e.requires_grad]
    leaves = [e for e in inputs if isinstance(e, torch.Tensor) and e.requires_grad and e.is_leaf]
    if not reached or not leaves:
        return []
    ones = [torch.ones_like(each) for each in reached]
    return list(torch.autograd.grad(reached, leaves, ones, allow_unused=True))


def _detached(value: Any) -> Any:
    import torch

    return value.detach() if isinstance(value, torch.Tensor) else repr(value)


def _seed() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)


def _difference(expected: list[Any], found: list[Any], *, exact: bool) -> str:
    import torch

    rtol, atol = (0.0, 0.0) if exact else (1e-3, 1e-4)
    if len(expected) != len(found):
        return f"{len(expected)} values became {len(found)}"
    for wanted, got in zip(expected, found, strict=True):
        if not isinstance(wanted, torch.Tensor):
            if wanted != got and exact:
                return f"{wanted} became {got}"
            continue
        try:
            torch.testing.assert_close(
                got, wanted, rtol=rtol, atol=atol, equal_nan=True, check_stride=exact
            )
        except AssertionError as exc:
            return str(exc)
    return ""
