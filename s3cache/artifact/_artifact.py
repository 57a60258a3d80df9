"""One compiled graph as a frame.

Sections of a frame of kind ``aot``::

    entry            torch's own AOTAutograd result (pickle): compiled forward and backward with
                     their source, runtime metadata, wrappers, backward module, Triton bundles
    kernel/<id>      shared library of one native kernel that the compiled code loads

and its ``meta``: ``guards`` (text, or nil), ``times_ns`` (forward, backward), ``runtime`` (what the
entry does to inputs and outputs, as plain data), ``components`` (name to [digest, readable value]
of the key), ``made_by`` (torch, compiler and platform, for people).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.store import Buffer

__all__ = ["KIND", "SCHEMA", "Artifact"]

KIND = "aot"
SCHEMA = 1
_ENTRY = "entry"
_KERNEL = "kernel/"


@dataclass(frozen=True)
class Artifact:
    """What there is to save of a compiled graph.

    Attributes:
        entry: torch's pickled result.
        kernels: images of shared libraries by kernel id.
        guards: expression over the graph's symbolic inputs that must hold for a hit.
        forward_ns, backward_ns: what compiling took.
        runtime, components, made_by: plain data, see the module.
    """

    entry: Buffer
    kernels: Mapping[str, Buffer]
    guards: str | None = None
    forward_ns: int = 0
    backward_ns: int = 0
    runtime: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, Any] = field(default_factory=dict)
    made_by: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """Tells entries under one key apart: those with equal guards are interchangeable."""
        return hashlib.sha256(self.guards.encode()).hexdigest()[:32] if self.guards else ""

    def encode(self, key: str) -> bytes:
        """This artifact as a frame under ``key``."""
        return frame.encode(
            kind=KIND,
            key=key,
            variant=self.variant,
            schema=SCHEMA,
            sections={
                _ENTRY: self.entry,
                **{_KERNEL + name: image for name, image in self.kernels.items()},
            },
            meta={
                "guards": self.guards,
                "times_ns": [self.forward_ns, self.backward_ns],
                "runtime": dict(self.runtime),
                "components": dict(self.components),
                "made_by": dict(self.made_by),
            },
        )

    @staticmethod
    def entry_of(entry: Frame) -> Buffer:
        """The pickled result in a verified frame.

        Raises:
            CorruptError: the frame is of another kind or schema, or lacks the section.
        """
        header = entry.header
        if (header.kind, header.schema) != (KIND, SCHEMA) or _ENTRY not in entry.names:
            raise CorruptError(
                "frame", f"is no compiled graph of schema {SCHEMA}: {header.kind} {header.schema}"
            )
        return entry.section(_ENTRY)

    @staticmethod
    def kernels_of(entry: Frame) -> dict[str, Buffer]:
        """Images of the kernels in a verified frame, by id."""
        return {
            name[len(_KERNEL) :]: entry.section(name)
            for name in entry.names
            if name.startswith(_KERNEL)
        }
