"""First calls of the code of an entry: on fake tensors, and those that raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from s3cache.errors import CorruptError, is_device_trouble, is_machine_trouble
from s3cache.hooks._rebuild import FirstCall, Inputs, NotSharableError, Outcome, has_storage
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from s3cache.torch_api.protocols import AOTResult, RuntimeMetadata, TracingContext


logger = logger_of("lookups")

# -- on fake tensors
#
# DDPOptimizer compiles a model as several graphs and calls each once on fake tensors
# (``fakify_first_call``). torch makes the fake outputs, with the strides that Inductor chose, from
# the traced graph, so it does not cache such graphs: a hit traces nothing. We describe the outputs
# when the graph is compiled, and a hit makes fake outputs from the description. Sizes may be
# expressions of the graph's symbols, which have equal names under equal keys.


class OutputDescription(TypedDict, total=False):
    """The saved description of one output. Sizes and numbers are expressions.

    It is empty (no output), or has a ``number``, or has ``same`` (the index of an earlier output
    that is the same object), or describes a tensor with all other fields. The tensor begins
    ``offset`` elements into its own storage of ``bytes``, or into the storage of the earlier output
    with index ``within``.
    """

    number: str
    same: int
    size: list[str]
    stride: list[str]
    offset: str
    bytes: str
    within: int
    dtype: str
    device: str
    requires_grad: bool


def undescribed(what: str) -> NotSharableError:
    """Return the error of a graph with outputs that an entry cannot describe."""
    return NotSharableError("fakify-first-call", what)


def describe_outputs(
    outputs: Sequence[object], metadata: RuntimeMetadata
) -> list[OutputDescription]:
    """Return each output as plain data; raise NotSharableError if data cannot express one."""
    import torch

    plain = internals.plain_tensor_meta.get()
    metas = *(metadata.subclass_inp_meta or ()), *(metadata.subclass_fw_graph_out_meta or ())
    is_wrapped = any(not isinstance(meta, plain) for meta in metas)
    if metadata.tokens or metadata.is_rng_op_functionalized or is_wrapped:
        raise undescribed("the graph's outputs are changed before the caller gets them")
    described: list[OutputDescription] = []
    objects: dict[int, int] = {}  # the index of the first output that is this object
    storages: dict[object, int] = {}  # the index of the first output in this storage
    for index, output in enumerate(outputs):
        earlier = objects.setdefault(id(output), index)
        if output is None:
            described.append({})
        elif isinstance(output, (int, torch.SymInt)):
            described.append({"number": _expression(output)})
        elif earlier != index:
            described.append({"same": earlier})
        else:
            described.append(_describe_tensor(index, output, storages))
    return described


def _describe_tensor(index: int, output: object, storages: dict[object, int]) -> OutputDescription:
    import torch

    if (
        not isinstance(output, torch.Tensor)
        or type(output) is not internals.fake_tensor.get()
        or output.layout is not torch.strided
        or output.is_conj()
        or output.is_neg()
        or output.is_quantized
    ):
        raise undescribed(f"output {index} is not a plain tensor")
    described: OutputDescription = {
        "size": [_expression(size) for size in output.size()],
        "stride": [_expression(stride) for stride in output.stride()],
        "offset": _expression(output.storage_offset()),
        "dtype": str(output.dtype).removeprefix("torch."),
        "device": str(output.device),
        "requires_grad": output.requires_grad,
    }
    storage = output.untyped_storage()
    if (first := storages.setdefault(storage._cdata, index)) == index:
        described["bytes"] = _expression(storage.nbytes())
    else:
        described["within"] = first
    return described


def _expression(number: object) -> str:
    import torch

    if not isinstance(number, torch.SymInt):
        return str(number)
    if internals.unbacked_symbols.get()(number):
        raise undescribed(f"{number} is only known once the graph has run")
    return internals.format_expression(number.node.expr)


def fake_first_call(entry: AOTResult, described: Sequence[Mapping[str, object]] | None) -> None:
    """Make the callable of ``entry`` answer its first call with fake outputs.

    Raises CorruptError if the entry does not describe them.
    """
    context = internals.current_tracing_context.get()()
    assert context is not None
    if described is None:
        raise CorruptError("first_call", "is missing")
    # torch keeps it for the backward of each graph, and asserts that it is set.
    context.fw_metadata = entry.runtime_metadata
    outputs: list[object] = []
    try:
        for one in cast("Sequence[OutputDescription]", described):
            outputs.append(_fake_output(context, one, outputs))
    # torch 2.15 raises AssertionError for an unknown symbol.
    except (AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError) as exc:
        raise CorruptError("first_call", f"describes no output: {exc!r}") from exc
    answers = [outputs]
    compiled = entry.compiled_fw
    load = compiled.post_compile

    def post_compile(*args: object, **kwargs: object) -> Function[object]:
        real = load(*args, **kwargs)

        def forward(inputs: list[object]) -> object:
            if not answers:
                return real(inputs)
            # Right before this call torch put the graph on its list of graphs without a backward.
            # A hit has its backward. If the graph stayed on the list, torch would compile the
            # backward of a graph that missed with the metadata of this one.
            split = context.ddp_optimizer_ctx
            if split is not None and split.metadata_per_bucket:
                split.metadata_per_bucket.pop()
                split.curr_bucket -= 1
            return answers.pop()

        return internals.boxed(forward)

    compiled.post_compile = post_compile


def _fake_output(
    context: TracingContext, described: OutputDescription, earlier: Sequence[object]
) -> object:
    import torch

    fake_mode = context.fake_mode

    def number(text: str) -> int:
        return int(text) if text.isdigit() else fake_mode.shape_env.deserialize_symexpr(text)

    if not described:
        return None
    if "number" in described:
        return number(described["number"])
    if "same" in described:
        return earlier[described["same"]]
    dtype, device = getattr(torch, described["dtype"]), described["device"]
    # A compile adds no guards on the bounds of its outputs in storages.
    with fake_mode, fake_mode.shape_env.suppress_guards():
        output = torch.empty(0, dtype=dtype, device=device)
        if "within" in described:
            holder = cast("Tensor", earlier[described["within"]])
        else:
            holder = torch.empty(number(described["bytes"]), dtype=torch.uint8, device=device)
        size, stride = (list(map(number, described[name])) for name in ("size", "stride"))
        output.set_(holder.untyped_storage(), number(described["offset"]), size, stride)
    return output.requires_grad_(described["requires_grad"])


# -- code that raises
#
# The graph is compiled again without a cache, and called with the same inputs. If that works, the
# entry is at fault. If it raises too, the program is: its error passes, and the entry stays. A call
# is only answered if it can be repeated: its inputs are alive and unchanged, and the graph has no
# other effects. Otherwise copies of the inputs show whether the entry is at fault, and the error
# passes with a note.

# Written into generated code where a buffer takes over the memory of an input.
_REUSE = "# reuse"
_CALLS = ("call", "partition_0")


def heal(call: FirstCall, inputs: Inputs, error: Exception, original: Function[object]) -> Outcome:
    """Return the outcome of a first call that raised ``error``."""
    if _is_of_machine(error):
        return None, error, None
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
                return None, error if has_changed else exc, original
            is_proven = True
        finally:
            if has_changed:
                inputs.restore_random()
    text = f"{type(error).__name__}: {error}"
    fate = call.set_aside(text, is_proven=is_proven)
    is_answered = is_proven and not has_changed and not settings.strict
    what = f"the code of entry {call.entry.header.key} raised at its first call ({text}); {fate}"
    then = "The graph was compiled again" if is_answered else "The error is raised"
    logger.warning("%s. %s %s", what, then, pointer("corrupt"))
    if not is_answered:
        note = f"s3cache: {what}; the next call and the next start of this program compile it again"
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.args and isinstance(error.args[0], str):  # before Python 3.11
            error.args = f"{error.args[0]}\n{note}", *error.args[1:]
        return None, error, None
    assert call.again is not None
    assert values is not None
    return result, None, _for_each_shape(call.again, values, code)


def _is_of_machine(error: Exception) -> bool:
    """Return whether the machine or its device is at fault, not code: then nothing can be tried."""
    import torch

    is_torchs = isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
    lacks_memory = is_torchs or "can't allocate memory" in str(error)
    return lacks_memory or is_machine_trouble(error) or is_device_trouble(error)


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
    """Return a function for further calls; ``code`` is for inputs with the shapes of ``values``."""
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
