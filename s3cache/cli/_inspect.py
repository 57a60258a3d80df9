"""``s3cache inspect``: all that an entry says of itself."""

from __future__ import annotations

import datetime as dt
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3cache._words import printable
from s3cache.cli._options import Where, grouped, open_file, until_done, whole_batches
from s3cache.cli._output import Output, size_text
from s3cache.errors import ConfigError, TruncatedError, UntrustedError

if TYPE_CHECKING:
    from s3cache.artifact import GraphDescription
    from s3cache.frame import Head
    from s3cache.manage import Place
    from s3cache.trust import Policy

__all__ = ["inspect"]

# An object of a store: its URL up to where its entries begin, the rest, and options.
_OBJECT = re.compile(r"(\w+://[^?]*?)/(v1/[0-9a-f]{3}/[^/?]+)(\?.*)?")
_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")
_ENTRIES_AT_MOST = 100


@grouped(where=Where, out=Output)
def inspect(
    where: Where,
    out: Output,
    target: Annotated[
        str,
        typer.Argument(
            metavar="KEY|FILE|URL",
            help="A key or the beginning of one, a file, or the URL of an object.",
        ),
    ],
) -> None:
    """Show what an entry says of itself: key, guards, kernels, times, signatures, its graph.

    Nothing is unpickled, and torch is not needed. The header is verified; s3cache verify checks
    the rest.
    """
    from s3cache.manage import open_place

    is_found = _OBJECT.fullmatch(target)
    if "://" not in target and (os.sep in target or os.path.isfile(target)):
        policy = _policy()
        head, size = _read_file(target)
        _show(out, target, head, size, policy)
    elif is_found:
        url = is_found[1] + (is_found[3] or "")
        with open_place(url) as place:
            _show_all(out, place, [is_found[2]], target)
    elif "://" in target:
        raise ConfigError(
            "the URL",
            "is not that of an entry",
            "give scheme://.../v1/abc/key.0, or a key and --url",
        )
    else:
        with where.open() as place:
            _show_all(out, place, _names_of(place, target), target)


def _policy() -> Policy:
    from s3cache.manage import trust_of
    from s3cache.settings import Settings

    return trust_of(Settings.load()[0])


def _names_of(place: Place, key: str) -> list[str]:
    """Of all entries under a key, or of the only one that begins so."""
    from s3cache.manage import Selection, scan

    names: list[str] = []
    keys: set[str] = set()
    if _KEY.fullmatch(key) and not place.is_local:
        # One request, where the key is whole.
        for batch in whole_batches(scan(place.store, Selection(named=frozenset({key})))):
            names += (item.name for item in batch)
        if names:
            return names
    batches = scan(place.store, Selection(keys=(key,)), is_local=place.is_local)
    for batch in whole_batches(batches):
        names += (item.name for item in batch)
        keys |= {item.key for item in batch}
        if len(names) > _ENTRIES_AT_MOST:
            break
    if key in keys:
        return [name for name in names if name.rpartition("/")[2].startswith(f"{key}.")]
    if len(keys) > 1:
        raise ConfigError(f"key {key!r}", "is the beginning of several", "give more of it")
    return names


def _show_all(out: Output, place: Place, names: list[str], target: str) -> None:
    from s3cache.manage import read_head

    if not names:
        raise _absent(f"key {target!r}: there is no entry")
    for name in sorted(names):
        head = until_done(read_head(place.store, name))
        if head is None:
            raise _absent(f"object {name}: there is none")
        _show(out, name, head, head.size, place.policy)


def _absent(what: str) -> typer.Exit:
    """Says so, and how it ends: nothing is damaged, so no page on errors is of any use."""
    sys.stderr.write(f"s3cache: error: {printable(what)}\n")
    return typer.Exit(1)


def _read_file(path: str) -> tuple[Head, int]:
    from s3cache import frame

    with open_file(f"file {path}", path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(frame.HEADER_HINT_BYTES)
        try:
            return frame.decode_head(start), size
        except TruncatedError as exc:
            start += file.read(exc.needed - len(start))
            return frame.decode_head(start), size


def _show(out: Output, name: str, head: Head, size: int, policy: Policy) -> None:
    from s3cache.artifact import description, to_plain

    header = head.header
    graph = description(header)
    meta = header.meta
    times = meta.get("times_ns")
    times = times if isinstance(times, list) else []
    found: dict[str, Any] = {
        "name": name,
        "size": size,
        "digest": head.digest,
        "kind": header.kind,
        "key": header.key,
        "variant": header.variant,
        "schema": header.schema,
        "created": dt.datetime.fromtimestamp(
            header.created_ns // 10**9, dt.timezone.utc
        ).isoformat(),
        "producer": header.producer,
        "made_by": meta.get("made_by"),
        "times_s": [ns / 1e9 for ns in times if isinstance(ns, int)],
        "guards": meta.get("guards"),
        "relies_on": meta.get("relies_on"),
        "sections": [
            {"name": each.name, "size": each.raw_size, "stored": each.stored_size}
            for each in header.sections
        ],
        "signatures": _signatures(head),
        "trust": _verdict(head, policy),
        "components": meta.get("components"),
        "graph": None if graph is None else to_plain(graph),
    }
    if out.json:
        out.record(found)
        return
    _print(out, found)
    if graph is not None:
        _print_graph(out, graph)


def _signatures(head: Head) -> list[dict[str, Any]]:
    from s3cache.trust import unpack

    return [
        {
            "signer": each.statement.signer,
            "audience": each.statement.audience,
            "algorithm": each.statement.algorithm.name,
            "issued_s": each.statement.issued_s,
            "expires_s": each.statement.expires_s,
        }
        for each in unpack(head.signatures)
    ]


def _verdict(head: Head, policy: Policy) -> str:
    try:
        signature = policy.check(head.digest, head.signatures)
    except UntrustedError as exc:
        return f"not used here ({exc.cause}): {exc.detail}"
    if signature is None:
        return (
            "not asked for here" if policy.level == "off" else "used, though nobody known signed it"
        )
    return f"signed by {signature.statement.signer}, who is trusted here"


def _print(out: Output, found: Mapping[str, Any]) -> None:
    variant = f", variant {found['variant']}" if found["variant"] else ""
    out.line(f"{found['kind']} entry {found['key']}{variant}")
    made_by = found["made_by"] if isinstance(found["made_by"], Mapping) else {}
    times = ", ".join(f"{s:.2f} s" for s in found["times_s"]) or "not known"
    rows = [
        ("object", f"{found['name']}, {size_text(found['size'])}"),
        ("digest", found["digest"].hex()),
        ("made", f"{found['created']} by {found['producer']}, schema {found['schema']}"),
        *((name, str(text)) for name, text in made_by.items()),
        ("compiled in", f"{times} (forward, backward)"),
        ("guards", str(found["guards"] or "none")),
        ("relies on", str(found["relies_on"] or "nothing beside its key")),
        ("trust", found["trust"]),
        *(
            ("signed", f"by {each['signer']} for {each['audience']} ({each['algorithm']})")
            for each in found["signatures"]
        ),
    ]
    for name, text in rows:
        out.line(f"  {name:12} {text}")
    sections = [
        (s["name"], size_text(s["size"]), size_text(s["stored"])) for s in found["sections"]
    ]
    out.table(["section", ">size", ">stored"], sections)
    components = found["components"]
    if isinstance(components, Mapping):
        pairs = [
            (name, str(pair[1]), str(pair[0]))
            for name, pair in components.items()
            if isinstance(pair, list) and len(pair) == 2
        ]
        out.table(["key component", "value", "digest"], pairs)


def _print_graph(out: Output, graph: GraphDescription) -> None:
    runtime = graph.runtime_metadata
    inputs = []
    for name, info in zip(graph.input_names, runtime.input_info, strict=False):
        what = [
            str(info.mutation_type).replace("_", " ").lower() if info.mutates_data else "",
            "metadata mutated" if info.mutates_metadata else "",
            "requires grad" if info.requires_grad else "",
        ]
        inputs.append((name, ", ".join(filter(None, what)) or "read"))
    out.table(["input", "what the graph does to it"], inputs)
    outputs = [
        (
            str(index),
            str(info.output_type or "").replace("_", " "),
            "" if info.base_idx is None else str(info.base_idx),
            "requires grad" if info.requires_grad else "",
        )
        for index, info in enumerate(runtime.output_info)
    ]
    out.table([">output", "what it is", ">of", ""], outputs)
