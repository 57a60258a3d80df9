"""``s3cache inspect``: all that an entry says of itself."""

from __future__ import annotations

import datetime as dt
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3cache.cli._options import Where, flattened, open_file, until_done
from s3cache.cli._output import Output, size_text
from s3cache.errors import ConfigError, TruncatedError, UntrustedError
from s3cache.util.words import printable

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

    Nothing is unpickled, and torch is not needed. The header is verified; s3cache verify checks the
    rest.
    """
    from s3cache.manage import open_place, trust_of
    from s3cache.settings import Settings

    if "://" not in target and (os.sep in target or os.path.isfile(target)):
        policy = trust_of(Settings.load()[0])
        _show(out, target, *_read_file(target), policy)
    elif is_object := _OBJECT.fullmatch(target):
        with open_place(is_object[1] + (is_object[3] or "")) as place:
            _show_all(out, place, [is_object[2]], target)
    elif "://" in target:
        fix = "give scheme://.../v1/abc/key.0, or a key and --url"
        raise ConfigError("the URL", "is not that of an entry", fix)
    else:
        with where.open() as place:
            _show_all(out, place, _names_of(place, target), target)


def _names_of(place: Place, key: str) -> list[str]:
    """Return the names of all entries under ``key``, or under the only key that begins so."""
    from s3cache.manage import Selection, scan

    if _KEY.fullmatch(key) and not place.is_local:
        # One request, where the key is whole.
        whole = scan(place.store, Selection(named=frozenset({key})))
        if names := [item.name for item in flattened(whole)]:
            return names
    names, keys = [], set()
    for item in flattened(scan(place.store, Selection(keys=(key,)), is_local=place.is_local)):
        names.append(item.name)
        keys.add(item.key)
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


def _absent(problem: str) -> typer.Exit:
    """Report what is not there, without a pointer: nothing is damaged."""
    sys.stderr.write(f"s3cache: error: {printable(problem)}\n")
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
    from s3cache.trust import unpack

    header, meta = head.header, head.header.meta
    graph = description(header)
    times = meta.get("times_ns")
    created = dt.datetime.fromtimestamp(header.created_ns // 10**9, dt.timezone.utc)
    statements = [each.statement for each in unpack(head.signatures)]
    found: dict[str, Any] = {
        "name": name,
        "size": size,
        "digest": head.digest,
        "kind": header.kind,
        "key": header.key,
        "variant": header.variant,
        "schema": header.schema,
        "created": created.isoformat(),
        "producer": header.producer,
        "made_by": meta.get("made_by"),
        "times_s": [
            ns / 1e9 for ns in (times if isinstance(times, list) else []) if isinstance(ns, int)
        ],
        "guards": meta.get("guards"),
        "relies_on": meta.get("relies_on"),
        "sections": [
            {"name": each.name, "size": each.raw_size, "stored": each.stored_size}
            for each in header.sections
        ],
        "signatures": [
            {
                "signer": each.signer,
                "audience": each.audience,
                "algorithm": each.algorithm.name,
                "issued_s": each.issued_s,
                "expires_s": each.expires_s,
            }
            for each in statements
        ],
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


def _verdict(head: Head, policy: Policy) -> str:
    try:
        signature = policy.check(head.digest, head.signatures)
    except UntrustedError as exc:
        return f"not used here ({exc.cause}): {exc.detail}"
    if signature is not None:
        return f"signed by {signature.statement.signer}, who is trusted here"
    return "not asked for here" if policy.level == "off" else "used, though no known key signed it"


def _print(out: Output, found: Mapping[str, Any]) -> None:
    variant = f", variant {found['variant']}" if found["variant"] else ""
    out.line(f"{found['kind']} entry {found['key']}{variant}")
    made_by = found["made_by"] if isinstance(found["made_by"], Mapping) else {}
    times = ", ".join(f"{s:.2f} s" for s in found["times_s"]) or "not known"
    rows = [
        ("object", f"{found['name']}, {size_text(found['size'])}"),
        ("digest", found["digest"].hex()),
        ("made", f"{found['created']} by {found['producer']}, schema {found['schema']}"),
        *made_by.items(),
        ("compiled in", f"{times} (forward, backward)"),
        ("guards", found["guards"] or "none"),
        ("relies on", found["relies_on"] or "nothing beside its key"),
        ("trust", found["trust"]),
        *(
            ("signed", f"by {each['signer']} for {each['audience']} ({each['algorithm']})")
            for each in found["signatures"]
        ),
    ]
    for name, text in rows:
        out.line(f"  {name:12} {text}")
    sizes = ((s["name"], size_text(s["size"]), size_text(s["stored"])) for s in found["sections"])
    out.table(["section", ">size", ">stored"], sizes)
    if isinstance(found["components"], Mapping):
        pairs = [
            (name, str(pair[1]), str(pair[0]))
            for name, pair in found["components"].items()
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
