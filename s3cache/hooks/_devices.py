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
from typing import TYPE_CHECKING, cast

from s3cache.artifact import unpickled
from s3cache.graph import call_nodes, code_on
from s3cache.hooks._conditions import PLACE, REMEMBERED, Place, graphs_of
from s3cache.torch_api import internals
from s3cache.torch_api.kernels import kernel_digest, kernel_sources

if TYPE_CHECKING:
    from torch import device
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import AOTResult, CompiledGraph, Function, TritonBundle


_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


def misplaced(place: Place, *, movable: bool = True) -> str | None:
    """Return why this rank cannot use the code of an entry on its device, or None.

    ``movable`` says whether the code can get the index of another device.
    """
    if place["rank"] is not None and place["rank"] != (here := rank_of_process()):
        return f"its code may contain the number of {place['rank']}; this is {here or 'no rank'}"
    if place["device"] is None or place["device"] == (device := str(_here(place["device"]))):
        return None
    if place["alone"] is not None:
        return f"its code is for {place['device']} only, this is {device}: {place['alone']}"
    return None if movable else f"it is for {place['device']}, this is {device}"


def _here(made_for: str) -> device:
    """Return the current device, of the kind that the code was made for."""
    import torch

    kind = torch.device(made_for).type
    return torch.device(kind, torch.get_device_module(kind).current_device())


# -- the rank


def collectives_in(gm: GraphModule) -> Counter[str]:
    """Return how often the traced graph calls each collective."""
    targets = (node.target for node in call_nodes(gm))
    return _counted(
        (str(getattr(target, "namespace", "")), str(getattr(target, "_opname", "")))
        for target in targets
    )


def collectives_of(source: str) -> Counter[str]:
    """Return how often generated code calls each collective."""
    return _counted(re.findall(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.\w+)?\(", _COMMENT.sub("", source)))


def _counted(operators: Iterable[tuple[str, str]]) -> Counter[str]:
    # Variants that write into the input or into a buffer count as the same collective.
    names = (
        name.removesuffix("_out").removesuffix("_")
        for namespace, name in operators
        if namespace in internals.COLLECTIVES
    )
    return Counter(name for name in names if not name.startswith("wait_tensor"))


def rank_of_process() -> str | None:
    """Return the rank with a digest of all process groups of the job; None outside of a job."""
    groups = internals.groups_of_ranks()
    if groups is None:
        return None
    rank, size, names = groups
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
    return f"rank {rank} of {size} in groups {digest}"


# -- the device

# All forms in which Inductor writes the index of a device; N stands for the index.
_SITES = (
    r"(?<=type='cuda', index=)N\b",
    r"(?<=type='hip', index=)N\b",
    r"(?<=\bcuda:)N\b",
    r"(?<=\b_DeviceGuard\()N(?=\))",
    r"(?<=\bset_device\()N(?=\))",
    r"(?<=\bget_raw_stream\()N(?=\))",
    r"(?<=\bdefault_generators\[)N(?=\])",
    r"(?<=\bstream)N\b",
    r"(?<=\braw_stream)N\b",
    r"(?<=\bsemaphores_cuda_)N\b",
)
# Words about devices that do not depend on the index.
_WORDS = frozenset(
    {
        *(
            "cuda",
            "hip",
            "is_hip",
            "device",
            "devices",
            "device_str",
            "DeviceProperties",
            "libdevice",
        ),
        *("_DeviceGuard", "set_device", "set_driver_to_gpu", "default_generators"),
        *("stream", "get_raw_stream", "_cuda_getCurrentRawStream"),
        *("empty_strided_cuda", "_empty_strided_cuda"),
        # In code that torch generates for every device (``compile_on_one_rank``).
        *("current_device", "_coor_device_idx"),
    }
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
        code = _BODY.sub("'''", _COMMENT.sub("", graph.source_code))
        code = _index_in(code, made_for.index).sub("", code)
        marks = {"cuda:", "stream", "raw_stream", "semaphores_cuda_"}  # remainders of known forms
        unknown = {*_ABOUT_DEVICES.findall(code)} - _WORDS - marks
        if unknown:
            return f"it contains {min(unknown)}, which may use the device in an unknown way"
        if other := re.search(r"\b(?:cuda:|index=)\d", code):
            return f"it names another device ({other[0]})"
    return None


def moved_here(content: bytes, place: Place) -> object:
    """Unpickle the verified bytes of an entry for the current device.

    Call it only if :func:`misplaced` returned None.
    """
    import torch

    if place["device"] is None:
        return unpickled(content)
    made_for, here = torch.device(place["device"]), _here(place["device"])
    if made_for == here:
        return unpickled(content)

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
    result = unpickled(content, instead)
    for graph in graphs_of(result):
        _move_graph(graph, made_for, here)
    if not isinstance(result, internals.compiled_graph.get()):
        whole = cast("AOTResult", result)
        if whole.serialized_bw_module is not None:
            body = cast("dict[str, object]", whole.serialized_bw_module.args[0])
            body.update(
                {
                    name: code_on(value, made_for, here)
                    for name, value in body.items()
                    if isinstance(value, str)
                }
            )
        internals.move_random_state(whole.runtime_metadata, here.index)
    setattr(result, PLACE, {**place, "device": str(here)})
    return result


def _move_graph(graph: CompiledGraph, made_for: device, here: device) -> None:
    before, pattern = graph.source_code, _index_in(graph.source_code, made_for.index)
    graph.source_code = pattern.sub(str(here.index), before)
    # A process may have this graph on several devices.
    graph.cache_key = f"{graph.cache_key}_{here.index}"
    graph.device_idxs = type(graph.device_idxs)([here.index])
    internals.move_boxed_index(graph, here.index)
    bundle: TritonBundle | None = vars(graph)[internals.TRITON_BUNDLE]
    if bundle is None:
        return
    sources = [*zip(kernel_sources(before), kernel_sources(graph.source_code), strict=True)]
    key = internals.kernel_key.get()
    keys = {key(theirs): key(ours) for theirs, ours in sources}
    bundle_here = dataclasses.replace(
        bundle,
        kernel_artifacts=[
            dataclasses.replace(kernel, device=here.index) for kernel in bundle.kernel_artifacts
        ],
        static_autotuners=[
            dataclasses.replace(each, cache_key=keys.get(each.cache_key, each.cache_key))
            for each in bundle.static_autotuners
        ],
    )
    setattr(graph, internals.TRITON_BUNDLE, bundle_here)
    known = getattr(graph, REMEMBERED, {})
    digests = (
        {kernel_digest(theirs): kernel_digest(ours) for theirs, ours in sources} if known else {}
    )
    known.update({digests[each]: best for each, best in [*known.items()] if each in digests})
    for each in bundle.static_autotuners:
        internals.move_kernel(each.kernel, here.index)
