"""Entries with code that raises at its first call: answer the call, and set the entry aside.

The graph is compiled again without a cache, and called with the same inputs. If that works, the
entry is at fault. If it raises too, the program is: its error passes, and the entry stays. A call
is only answered if it can be repeated: its inputs are alive and unchanged, and the graph has no
other effects. Otherwise copies of the inputs show whether the entry is at fault, and the error
passes with a note.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from s3cache.errors import is_device_trouble, is_machine_trouble
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from types import CodeType

    from torch import Tensor

    from s3cache.cache import Engine
    from s3cache.frame import Frame
    from s3cache.torch_api.protocols import Function

logger = logger_of("lookups")

# Written into generated code where a buffer takes over the memory of an input.
_REUSE = "# reuse"
_CALLS = ("call", "partition_0")
# How many bytes of inputs that a graph writes to are copied at the first call of an entry.
_MAX_COPIED = 64 << 20


class Outcome(NamedTuple):
    """The result of a call or its error, and the code of the next calls; None to try it again."""

    result: object
    error: Exception | None
    code: Function[object] | None


class Inputs:
    """The inputs of a first call: tells whether they have changed, and keeps none alive."""

    def __init__(self, values: Sequence[object], mutated: Sequence[int] | None) -> None:
        import torch

        self._tensors = {i: each for i, each in enumerate(values) if isinstance(each, torch.Tensor)}
        fake = internals.fake_tensor.get()
        self.are_fake = any(isinstance(each, fake) for each in self._tensors.values())
        self._values: list[Callable[[], object]] = [
            weakref.ref(each) if isinstance(each, torch.Tensor) else partial(_same, each)
            for each in values
        ]
        self._before = {i: _state_of(each) for i, each in self._tensors.items()}
        written = {i: self._tensors[i] for i in self._tensors if mutated is None or i in mutated}
        size = sum(each.numel() * each.element_size() for each in written.values())
        self._written = set(written)
        self._copies = {}
        if not self.are_fake and size <= _MAX_COPIED:
            self._copies = {i: each.detach().clone() for i, each in written.items()}
        self._random = torch.random.get_rng_state()
        self._of_cuda = None
        if torch.cuda.is_initialized() and any(  # type: ignore[no-untyped-call]
            each.is_cuda for each in self._tensors.values()
        ):
            self._of_cuda = torch.cuda.get_rng_state()
        del self._tensors

    def alive(self) -> list[object] | None:
        """Return the inputs; None if one was freed."""
        values = [value() for value in self._values]
        return None if any(values[i] is None for i in self._before) else values

    def have_changed(self) -> bool:
        """Return whether an input was written to, as far as can be known."""
        import torch

        for i, before in self._before.items():
            value = cast("Tensor", self._values[i]())
            if i not in self._written:
                if _state_of(value) != before:
                    return True
            elif i not in self._copies or not torch.allclose(
                value.detach(), self._copies[i], rtol=0, atol=0, equal_nan=True
            ):
                return True
        return False

    def restore_random(self) -> None:
        """Restore the state of random numbers."""
        import torch

        torch.random.set_rng_state(self._random)
        if self._of_cuda is not None:
            torch.cuda.set_rng_state(self._of_cuda)


def _same(value: object) -> object:
    return value


def _state_of(tensor: Tensor) -> object:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.shape, tensor.dtype


@dataclass(eq=False, kw_only=True)
class FirstCall:
    """What answers the first call of an entry's code if it raises; see the module.

    Attributes:
        key: of the entry.
        again: compiles the graph for real inputs, without a cache; None if it is not at hand.
        mutated: the indices of inputs that the code writes to; None if it may be any.
        effects: whether the code has effects that must not be repeated.
        reusing: the code, if it may write into inputs that are not needed after it.
        code: of the frame that calls it, if Dynamo compiles that.
        built: entries of whole graphs that were saved with this code.
    """

    engine: Engine
    entry: Frame
    key: str
    take_back: Callable[[str], None]  # counts the hit as a miss
    again: Callable[[Sequence[object]], Function[object]] | None
    mutated: Sequence[int] | None
    sources: Sequence[str]
    effects: bool = False
    reusing: str = ""
    code: CodeType | None = None
    built: list[Frame] = field(default_factory=list)

    def watched(
        self, function: Function[object], finish: Callable[[Function[object]], None]
    ) -> Callable[[list[object]], object]:
        """Return ``function`` for its first call; ``finish`` puts another in its place then."""
        chosen: Function[object] | None = None

        def first(args: list[object]) -> object:
            if chosen is not None:
                return chosen(args)
            inputs = Inputs(args, self.mutated)
            if inputs.are_fake:
                return function(args)
            try:
                result = function(args)
            except Exception as exc:
                hidden = internals.disable_dynamo.get()(heal)
                outcome = cast("Outcome", hidden(self, inputs, exc, function))
                settle(outcome.code)
                if outcome.error is exc:
                    raise
                if outcome.error is not None:
                    raise outcome.error from None
                return outcome.result
            settle(function)
            return result

        def settle(code: Function[object] | None) -> None:
            nonlocal chosen
            if code is not None:
                chosen = code
                finish(code)

        return internals.boxed(first)

    def has_effects(self) -> bool:
        """Return whether a repeated call would repeat more than the computation."""
        return self.effects or any(map(internals.collectives_of, self.sources))

    def set_aside(self, why: str, *, is_proven: bool) -> str:
        """Set the entry aside; return what becomes of it. Dynamo compiles the frame again."""
        fate = self.engine.set_aside(self.entry, why, is_proven=is_proven)
        for entry in self.built:
            self.engine.set_aside(entry, why, is_proven=is_proven)
        self.take_back(why)
        if self.code is not None:
            internals.reset_code.get()(self.code)
        return fate


def heal(call: FirstCall, inputs: Inputs, error: Exception, original: Function[object]) -> Outcome:
    """Return the outcome of a first call that raised ``error``."""
    if _is_of_machine(error):
        return Outcome(None, error, None)
    engine = call.engine
    values = inputs.alive()
    has_changed = values is None or inputs.have_changed() or call.has_effects()
    has_changed = has_changed or _has_reused(error, call.reusing)
    may_run = not call.has_effects() and engine.settings.on_miss != "error"
    result, is_proven = None, False
    if call.again is not None and values is not None and may_run:
        inputs.restore_random()
        try:
            code = call.again(values)
            copies = [_copy(value) for value in values] if has_changed else [*values]
        except Exception as exc:
            logger.debug("a graph could not be compiled again", exc_info=exc)
        else:
            try:
                result = code(copies)
            except Exception as exc:  # noqa: BLE001 - the program's own error
                return Outcome(None, error if has_changed else exc, original)
            is_proven = True
        finally:
            if has_changed:
                inputs.restore_random()
    text = f"{type(error).__name__}: {error}"
    fate = call.set_aside(text, is_proven=is_proven)
    is_answered = is_proven and not has_changed and not engine.settings.strict
    what = f"the code of entry {call.key} raised at its first call ({text}); {fate}"
    logger.warning(
        "%s. %s %s", what, "The graph was compiled again" if is_answered else "The error is raised",
        pointer("corrupt"),
    )  # fmt: skip
    if not is_answered:
        note = f"s3cache: {what}; the next call and the next start of this program compile it again"
        _add_note(error, note)
        return Outcome(None, error, None)
    assert call.again is not None
    assert values is not None
    return Outcome(result, None, _for_each_shape(call.again, values, code))


def _is_of_machine(error: Exception) -> bool:
    """Return whether the machine or its device is at fault, not code: then nothing can be tried."""
    import torch

    kinds = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
    lacks_memory = "can't allocate memory" in str(error)
    return (
        isinstance(error, kinds)
        or lacks_memory
        or is_machine_trouble(error)
        or is_device_trouble(error)
    )


def _has_reused(error: Exception, source: str) -> bool:
    """Return whether generated code may have written into inputs that it may reuse."""
    lines, trace = source.splitlines(), error.__traceback__
    while trace is not None and lines:
        code = trace.tb_frame.f_code
        if code.co_filename.endswith(".py") and code.co_name in _CALLS:
            ran = lines[code.co_firstlineno - 1 : trace.tb_lineno - 1]
            if any(_REUSE in line or "partition_" in line for line in ran):
                return True
        trace = trace.tb_next
    return False


def _copy(value: object) -> object:
    import torch

    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # before Python 3.11
        error.args = f"{error.args[0]}\n{note}", *error.args[1:]


def _for_each_shape(
    again: Callable[[Sequence[object]], Function[object]],
    values: Sequence[object],
    code: Function[object],
) -> Callable[[list[object]], object]:
    """Return a function for further calls of a frame that Dynamo does not compile again.

    ``code`` is for inputs with the shapes of ``values``.
    """
    compiled = {tuple(map(_shape_of, values)): code}

    def call(args: list[object]) -> object:
        key = tuple(map(_shape_of, args))
        if key not in compiled:
            compiled[key] = again(args)
        return compiled[key](args)

    return internals.boxed(call)


def _shape_of(value: object) -> object:
    import torch

    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, int) else id(value)
    place = value.dtype, value.device, value.storage_offset(), value.requires_grad
    return type(value), value.shape, value.stride(), *place
