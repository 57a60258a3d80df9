"""Descriptions as entries had them at first: a map in the header, less complete."""

from __future__ import annotations

from collections.abc import Mapping

from s3cache.artifact._metadata import GraphDescription
from s3cache.artifact._plain import from_plain
from s3cache.errors import CorruptError

__all__ = ["modernised"]


def modernised(runtime: Mapping[str, object]) -> GraphDescription:
    """The description that such a map holds.

    Raises:
        CorruptError: it is none.
    """
    try:
        return _modernised(dict(runtime))
    except (AttributeError, KeyError, TypeError) as exc:
        raise CorruptError("runtime", f"is no description ({exc!r})") from None


def _modernised(runtime: dict[str, object]) -> GraphDescription:
    whole: dict[str, object] = {
        "dispatch_wrappers": runtime.pop("wrappers", []),
        "has_backward_module": runtime.pop("has_backward_module", None),
    }
    if runtime.pop("has_backward", False):
        whole["backward"] = {}
    subclasses = _map(runtime.pop("subclasses", {}))
    places = {
        "inputs": "subclass_inp_meta",
        "outputs": "subclass_fw_graph_out_meta",
        "tangents": "subclass_tangent_meta",
    }
    metadata = {
        **{places[place]: [*map(_creation, metas)] for place, metas in subclasses.items()},  # type: ignore[call-overload]
        "input_info": runtime.pop("inputs", []),
        "output_info": [*map(_output, runtime.pop("outputs", []))],  # type: ignore[call-overload]
        **runtime,
    }
    whole["runtime_metadata"] = {name: part for name, part in metadata.items() if part is not None}
    return from_plain(GraphDescription, whole)


def _output(output: object) -> dict[str, object]:
    known = dict(_map(output))
    views = known.pop("view_meta_sequence", None)
    return {**known, "view_meta_sequence": {"sequence": views}} if views else known


def _creation(meta: object) -> dict[str, object]:
    known = dict(_map(meta))
    kind = known.pop("type")
    if kind == "plain":
        return {**known, "kind": "plain"}
    attrs = {name: _creation(inner) for name, inner in _map(known.pop("attrs")).items()}
    return {**known, "kind": "subclass", "original_subclass_type": kind, "attrs": attrs}


def _map(plain: object) -> Mapping[str, object]:
    if not isinstance(plain, Mapping):
        raise CorruptError("runtime", "is no description")
    return plain
