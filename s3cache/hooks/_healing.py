"""Entries with code that raises at its first call: answer the call, and set the entry aside.

The graph is compiled again without a cache, and called with the same inputs. If that works, the
entry is at fault. If it raises too, the program is: its error passes, and the entry stays. A call
is only answered if it can be repeated: its inputs are alive and unchanged, and the graph has no
other effects. Otherwise copies of the inputs show whether the entry is at fault, and the error
passes with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from s3cache.errors import is_device_trouble, is_machine_trouble
from s3cache.hooks._rebuild import FirstCall, Inputs, Outcome, has_storage
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

logger = logger_of("lookups")

# Written into generated code where a buffer takes over the memory of an input.
_REUSE = "# reuse"
_CALLS = ("call", "partition_0")


def heal(call: FirstCall, inputs: Inputs, error: Exception, original: Function[object]) -> Outcome:
    """Return the outcome of a first call that raised ``error``."""
    if _is_of_machine(error):
        return Outcome(None, error, None)
    settings, values, has_effects = call.engine.settings, inputs.alive(), call.has_effects()
    has_changed = values is None or inputs.have_changed() or has_effects
    has_changed = has_changed or _has_reused(error, call.reusing)
    may_run = not has_effects and settings.on_miss != "error"
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
    is_answered = is_proven and not has_changed and not settings.strict
    what = f"the code of entry {call.key} raised at its first call ({text}); {fate}"
    then = "The graph was compiled again" if is_answered else "The error is raised"
    logger.warning("%s. %s %s", what, then, pointer("corrupt"))
    if not is_answered:
        note = f"s3cache: {what}; the next call and the next start of this program compile it again"
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.args and isinstance(error.args[0], str):  # before Python 3.11
            error.args = f"{error.args[0]}\n{note}", *error.args[1:]
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

    if not isinstance(value, torch.Tensor):
        return value
    if not has_storage(value):
        raise ValueError("an input has no storage")
    return value.detach().clone()


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
