"""Entries that ranks share: find a rank or device index in code, and replace the device index.

A key does not contain the index of the current accelerator (``graph/_key.py``): a graph on
``cuda:0`` in one rank and the same graph on ``cuda:3`` in another rank share an entry. The entry
names the device that it was made for. On another device, its code, kernels and metadata get the
index of that device.

We replace the index only if we know the form of every mention of a device in the code. Otherwise
the code may do anything with the index, and the entry serves that device alone.

The rank of a process can get into code after the key was computed: passes of torch that merge
collectives write the rank's offset in the merged buffer into the graph (pytorch issue 188332). So
code that calls other collectives than the traced graph serves that rank alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict, cast

from s3cache.artifact import unpickle
from s3cache.features.device import names
from s3cache.features.device.kernels import kernel_digest, kernel_sources
from s3cache.features.device.names import REMEMBERED
from s3cache.graph import call_nodes, code_on
from s3cache.hooks import LIMITS, graphs_of
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import device
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import AOTResult, CompiledGraph, Function, TritonBundle


class DeviceConstraint(TypedDict):
    """Limits on where code can run, beyond its key; plain data in an entry.

    ``device`` is the accelerator that the code was made for, such as ``cuda:0``, if all equal
    devices share its key; else nil. ``alone`` says why the code cannot be moved to another device;
    nil if it can. ``rank`` is set if the code may contain the number of a rank: that rank, with a
    digest of all process groups.
    """

    device: str | None
    alone: str | None
    rank: str | None


def misplaced(limits: DeviceConstraint, *, movable: bool = True) -> str | None:
    """Return why this rank cannot use the code of an entry on its device, or None.

    ``movable`` says whether the code can get the index of another device.
    """
    if limits["rank"] is not None and limits["rank"] != (here := rank_of_process()):
        return f"its code may contain the number of {limits['rank']}; this is {here or 'no rank'}"
    if limits["device"] is None:
        return None
    made_for = limits["device"]
    device = str(internals.current_device(made_for.partition(":")[0]))
    if made_for == device:
        return None
    if limits["alone"] is not None:
        return f"its code is for {made_for} only, this is {device}: {limits['alone']}"
    return None if movable else f"it is for {made_for}, this is {device}"


# -- the rank


def collectives_in(gm: GraphModule) -> Counter[str]:
    """Return how often the traced graph calls each collective."""
    targets = (node.target for node in call_nodes(gm))
    return internals.counted_collectives(
        (str(getattr(target, "namespace", "")), str(getattr(target, "_opname", "")))
        for target in targets
    )


def rank_of_process() -> str | None:
    """Return the rank with a digest of all process groups of the job; None outside of a job."""
    if (groups := internals.process_groups()) is None:
        return None
    rank, size, names = groups
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
    return f"rank {rank} of {size} in groups {digest}"


# -- the device

# All forms in which Inductor writes the index of a device; N stands for the index.
_SITES = (
    *(r"(?<=type='cuda', index=)N\b", r"(?<=type='hip', index=)N\b", r"(?<=\bcuda:)N\b"),
    *(r"(?<=\b_DeviceGuard\()N(?=\))", r"(?<=\bset_device\()N(?=\))"),
    *(r"(?<=\bget_raw_stream\()N(?=\))", r"(?<=\bdefault_generators\[)N(?=\])"),
    *(r"(?<=\bstream)N\b", r"(?<=\braw_stream)N\b", r"(?<=\bsemaphores_cuda_)N\b"),
)
# Words about devices that do not depend on the index, and the remainders of known forms. The last
# two are in code that torch generates for every device (``compile_on_one_rank``).
_WORDS = frozenset(
    """cuda hip is_hip device devices device_str DeviceProperties libdevice _DeviceGuard set_device
    set_driver_to_gpu default_generators stream get_raw_stream _cuda_getCurrentRawStream
    empty_strided_cuda _empty_strided_cuda raw_stream semaphores_cuda_
    current_device _coor_device_idx""".split()  # noqa: SIM905 - one word a line is harder to read
)
_ABOUT_DEVICES = re.compile(r"\w*(?:cuda|hip|device|stream)\w*", re.IGNORECASE)
# The body of a kernel, which gets arguments only and does not depend on the device.
_BODY = re.compile(r"^@triton\.jit$.*?^'''", re.MULTILINE | re.DOTALL)


def _index_in(source: str, index: int) -> re.Pattern[str]:
    return re.compile("|".join(_SITES).replace("N", str(index)))


def why_alone(graphs: Iterable[CompiledGraph], on: str) -> str | None:
    """Return why code for the device ``on`` cannot be moved to another one, or None if it can."""
    import torch

    made_for = torch.device(on)
    for graph in graphs:
        if not {*graph.device_types} <= {made_for.type, "cpu", "meta"}:
            return f"it is for {', '.join(sorted(graph.device_types))}"
        if not {*graph.device_idxs} <= {made_for.index}:
            return "it is for several devices"
        code = _BODY.sub("'''", internals.without_comments(graph.source_code))
        code = _index_in(code, made_for.index).sub("", code)
        if unknown := {*_ABOUT_DEVICES.findall(code)} - _WORDS:
            return f"it contains {min(unknown)}, which may use the device in an unknown way"
        if other := re.search(r"\b(?:cuda:|index=)\d", code):
            return f"it names another device ({other[0]})"
    return None


def unpickle_here(content: bytes, limits: DeviceConstraint) -> object:
    """Unpickle the verified bytes of an entry for the current device; or return why not."""
    if why := misplaced(limits):
        return why
    import torch

    if limits["device"] is None:
        return unpickle(content)
    made_for = torch.device(limits["device"])
    here = internals.current_device(made_for.type)
    if made_for == here:
        return unpickle(content)

    def device_of(*args: object) -> device:
        found = torch.device(*args)  # type: ignore[call-overload]
        return here if found == made_for else cast("device", found)

    def storage_of(data: bytes) -> object:
        where = {str(made_for): str(here)}
        return torch.load(io.BytesIO(data), weights_only=True, map_location=where)

    instead: dict[str, Function[object]] = {
        "torch.device": device_of,
        internals.UNPICKLED_STORAGE: storage_of,
    }
    result = unpickle(content, instead)
    for graph in graphs_of(result):
        _move_graph(graph, made_for, here)
    if not isinstance(result, internals.compiled_graph.get()):
        whole = cast("AOTResult", result)
        if whole.serialized_bw_module is not None:
            body = cast("dict[str, object]", whole.serialized_bw_module.args[0])
            for name, value in body.items():
                body[name] = code_on(value, made_for, here) if isinstance(value, str) else value
        metadata = whole.runtime_metadata
        if getattr(metadata, "graphsafe_rng_state_index", None) is not None:
            metadata.graphsafe_rng_state_index = here.index  # of the state of random numbers
    setattr(result, LIMITS, {**limits, "device": str(here)})
    return result


def _move_graph(graph: CompiledGraph, made_for: device, here: device) -> None:
    before, pattern = graph.source_code, _index_in(graph.source_code, made_for.index)
    graph.source_code = pattern.sub(str(here.index), before)
    # A process may have this graph on several devices.
    graph.cache_key = f"{graph.cache_key}_{here.index}"
    graph.device_idxs = type(graph.device_idxs)([here.index])
    boxed = (graph.fx_kwargs or {}).get("boxed_forward_device_index")
    if boxed is not None and boxed.value is not None:  # where CUDA graphs are recorded
        boxed.value = here.index
    bundle: TritonBundle | None = vars(graph)[internals.TRITON_BUNDLE]
    if bundle is None:
        return
    both = zip(kernel_sources(before), kernel_sources(graph.source_code), strict=True)
    sources = [(theirs, ours) for (_, theirs), (_, ours) in both]
    key = names.kernel_key.get()
    keys = {key(theirs): key(ours) for theirs, ours in sources}
    replace = dataclasses.replace
    files = [replace(kernel, device=here.index) for kernel in bundle.kernel_artifacts]
    loaded = [
        replace(static, cache_key=keys.get(static.cache_key, static.cache_key))
        for static in bundle.static_autotuners
    ]
    moved = replace(bundle, kernel_artifacts=files, static_autotuners=loaded)
    setattr(graph, internals.TRITON_BUNDLE, moved)
    if remembered := getattr(graph, REMEMBERED, {}):
        digests = {kernel_digest(theirs): kernel_digest(ours) for theirs, ours in sources}
        winners = [*remembered.items()]
        remembered.update({digests[name]: best for name, best in winners if name in digests})
    for static in bundle.static_autotuners:
        kernel = static.kernel
        if kernel.device_props.index is None:  # it loads onto the current one: compile_on_one_rank
            continue
        kernel.device_props = kernel.device_props._replace(index=here.index)
        kernel.triton_meta = {**kernel.triton_meta, "device": here.index}
        for result in kernel.compile_results:
            result.compile_meta = {**result.compile_meta, "device": here.index}
