"""What jobs of several processes need: first calls on fake tensors, and hits that ranks agree on.

DDPOptimizer compiles a model as several graphs, one after the other. To learn the layout of what
the next one gets, it calls each compiled graph once on fake tensors (``fakify_first_call``), and
the code answers with fake outputs in the strides that Inductor chose. torch takes those outputs
from the graph that it has traced, and does not cache such graphs: a hit has traced nothing. Here
they are described when the graph is compiled, and a hit makes its outputs from that. Sizes may be
expressions of the graph's symbols, which have the same names wherever the key is the same.

Some options of torch have ranks exchange data while they compile (``internals.ranks_must_agree``).
A rank that hits does not take part, and one that misses would wait for it for ever. So a hit is
only used there if all ranks hit. Each rank says what it has in the store of the default process
group, which needs no collective: a rank that never comes does not stop the others.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from s3cache.errors import CorruptError
from s3cache.graph import graph_modules
from s3cache.hooks._conditions import NotSharableError
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import (
        AOTResult,
        Function,
        RuntimeMetadata,
        SharedStore,
        TracingContext,
    )

logger = logger_of("ranks")

# -- first calls on fake tensors


class OutputDescription(TypedDict, total=False):
    """One output, as it is saved. Sizes and numbers are expressions.

    Either empty (no output), or a ``number``, or ``same`` (the index of an earlier output that is
    the same object), or all the rest (a tensor). It begins ``offset`` elements inside of a storage
    of its own of so many ``bytes``, or of that of the earlier output with index ``within``.
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


def _undescribed(what: str) -> NotSharableError:
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
        raise _undescribed("what the graph returns is changed before its caller sees it")
    described: list[OutputDescription] = []
    storages: dict[object, int] = {}  # the first output in each
    for index, output in enumerate(outputs):
        earlier = next((i for i in range(index) if outputs[i] is output), None)
        if output is None:
            described.append({})
        elif isinstance(output, (int, torch.SymInt)):
            described.append({"number": _expression(output)})
        elif not isinstance(output, torch.Tensor):
            raise _undescribed(f"output {index} is a {type(output).__name__}")
        elif earlier is not None:
            described.append({"same": earlier})
        else:
            described.append(_describe_tensor(index, output, storages))
    return described


def _describe_tensor(index: int, output: Tensor, storages: dict[object, int]) -> OutputDescription:
    import torch

    if type(output) is not internals.fake_tensor.get() or output.layout is not torch.strided:
        raise _undescribed(f"output {index} is no plain tensor")
    if output.is_conj() or output.is_neg() or output.is_quantized:
        raise _undescribed(f"output {index} stands for other values than it holds")
    described: OutputDescription = {
        "size": [_expression(size) for size in output.size()],
        "stride": [_expression(stride) for stride in output.stride()],
        "offset": _expression(output.storage_offset()),
        "dtype": str(output.dtype).removeprefix("torch."),
        "device": str(output.device),
        "requires_grad": output.requires_grad,
    }
    storage = output.untyped_storage()
    first = storages.setdefault(storage._cdata, index)
    if first == index:
        described["bytes"] = _expression(storage.nbytes())
    else:
        described["within"] = first
    return described


def _expression(number: object) -> str:
    import torch

    if not isinstance(number, torch.SymInt):
        return str(number)
    if internals.unbacked_symbols.get()(number):
        raise _undescribed(f"{number} is only known once the graph has run")
    return internals.written(number.node.expr)


def fake_first_call(entry: AOTResult, described: Sequence[Mapping[str, object]] | None) -> None:
    """Have the callable that ``entry`` is about to become answer its first call with fake outputs.

    Raises CorruptError if they are not described.
    """
    context = internals.current_tracing_context.get()()
    assert context is not None
    if described is None:
        raise CorruptError("first_call", "is not there")
    # torch keeps it for the backward of each graph, and asserts that it is there.
    context.fw_metadata = entry.runtime_metadata
    outputs: list[object] = []
    try:
        for one in cast("Sequence[OutputDescription]", described):
            outputs.append(_fake_output(context, one, outputs))
    except _MALFORMED as exc:
        raise CorruptError("first_call", f"describes no output: {exc!r}") from exc
    answers = [outputs]
    compiled = entry.compiled_fw
    load = compiled.post_compile

    def post_compile(*args: object, **kwargs: object) -> Function[object]:
        real = load(*args, **kwargs)

        def forward(inputs: list[object]) -> object:
            if not answers:
                return real(inputs)
            # Right before this first call torch has put the graph on its list of graphs to compile
            # a backward for, last first. A hit brings its backward along; were it left there, the
            # backward of a graph that missed would be compiled with its metadata.
            split = context.ddp_optimizer_ctx
            if split is not None and split.metadata_per_bucket:
                split.metadata_per_bucket.pop()
                split.curr_bucket -= 1
            return answers.pop()

        return internals.boxed(forward)

    compiled.post_compile = post_compile


# What a wrong description ends in; torch 2.15 asserts that it knows a symbol.
_MALFORMED = (AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)


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
    with fake_mode:
        output = torch.empty(0, dtype=dtype, device=device)
        if "within" in described:
            holder = cast("Tensor", earlier[described["within"]])
        else:
            holder = torch.empty(number(described["bytes"]), dtype=torch.uint8, device=device)
        size, stride = (list(map(number, described[name])) for name in ("size", "stride"))
        output.set_(holder.untyped_storage(), number(described["offset"]), size, stride)
    return output.requires_grad_(described["requires_grad"])


# -- hits that ranks agree on

# How long a rank that hits waits for the others. They trace the same program; what differs is
# mostly how long each waits for its bucket, and how busy its machine is.
TIMEOUT_S = 60.0
_POLL_S = (0.001, 0.05)
_HIT, _MISS = "hit", "miss"
# Twice: the entry is there and fits; it is a callable. torch adds what an entry guards to what it
# knows of shapes when it loads it, so most misses have to be known before that.
_ROUNDS = ("found", "loaded")

_mutex = threading.Lock()
# Never forgotten, for the store outlives a session, and a process group.
_occurrences: Counter[str] = Counter()
# Stores in which ranks ran out of time: some rank takes no part. Others wait for it once.
_timed_out: weakref.WeakSet[SharedStore] = weakref.WeakSet()


class RankConsensus:
    """What all ranks say about one graph, in a ``store`` that they share; without it, always no.

    The outcome is the same on all ranks, whichever of them is late, and each rank knows it in
    bounded time: the first to write a round's outcome decides it, and a rank only writes "hit" once
    all have said so. ``name`` is the same on all of them for the same graph, and for no other one.
    """

    def __init__(
        self, store: SharedStore | None, name: str, ranks: int, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._store = store
        self._name = name
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._rounds = [] if store is None else list(_ROUNDS)

    def all_hit(self) -> bool:
        """Say that this rank hits so far; return whether all others do. To be called twice."""
        if not self._rounds:
            return False
        place = f"{self._name}/{self._rounds.pop(0)}"
        try:
            outcome = self._outcome(place)
        except Exception:
            logger.warning(
                "ranks could not decide together: a miss %s", pointer("ranks"), exc_info=True
            )
            outcome = _MISS
        if outcome != _HIT:
            self._rounds.clear()
        return outcome == _HIT

    def close(self) -> None:
        """Say that this rank does not hit, unless it has said so in all rounds."""
        if self._rounds and self._store is not None:
            place = f"{self._name}/{self._rounds[0]}"
            self._rounds.clear()
            try:
                self._store.compare_set(place, "", _MISS)
            except Exception:
                logger.warning("other ranks do not learn of a miss", exc_info=True)

    def _outcome(self, place: str) -> str:
        assert self._store is not None
        proposed = _MISS
        if self._store.add(f"{place}/hits", 1) == self._ranks:
            proposed = _HIT
        else:
            timeout_s = 0.0 if self._store in _timed_out else self._timeout_s
            deadline, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
            while not (is_decided := self._store.check([place])) and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S[1])
            if not is_decided and timeout_s:
                _timed_out.add(self._store)
                logger.warning(
                    "not all %d ranks have looked a graph up within %.0f s: hits that they have to "
                    "agree on are misses from now on %s",
                    self._ranks, timeout_s, pointer("ranks"),
                )  # fmt: skip
        # Sets it where no rank has; returns what there is.
        return str(self._store.compare_set(place, "", proposed).decode())


def consensus_for(gm: GraphModule, inputs: Sequence[object]) -> RankConsensus:
    """Return the consensus on the graph that is looked up now, where ranks have to agree."""
    import torch.distributed as dist

    try:
        # Not the key: it may name this rank's device, or its place in a mesh.
        graph = hashlib.sha256("\n".join(_lines(gm, inputs)).encode()).hexdigest()[:32]
        with _mutex:
            _occurrences[graph] += 1
            name = f"s3cache/{graph}/{_occurrences[graph]}"
        return RankConsensus(internals.default_store.get()(), name, dist.get_world_size())
    except Exception:
        logger.warning("ranks cannot decide together: a miss %s", pointer("ranks"), exc_info=True)
        return RankConsensus(None, "", 0)


def _lines(gm: GraphModule, inputs: Sequence[object]) -> list[str]:
    """Return lines that are equal on all ranks that compile the same graph, and on no others."""
    import torch

    lines = [f"grad {torch.is_grad_enabled()}"]
    for name, module in graph_modules(gm):
        for node in module.graph.nodes:
            target = node.target if isinstance(node.target, str) else internals.name_of(node.target)
            lines.append(f"{name} {node.op} {target}")
    for value in inputs:
        if isinstance(value, torch.Tensor):
            lines.append(f"{value.dtype} {[str(size) for size in value.shape]}")
        else:
            lines.append(type(value).__name__)
    return lines
