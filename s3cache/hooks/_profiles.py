"""Shape profiles: share Dynamo's automatic dynamic shapes between machines.

Dynamo treats each size as a constant until it sees another value, and then compiles again. So a new
machine that begins with a new batch size would miss. A program shares the sizes that changed as one
entry, under a key made of the code that it compiled first. The profile only decides which sizes
Dynamo traces as symbols. Guards and keys are the same as if Dynamo had learned this itself.

A program can need its sizes to be constants: ``math.gcd(x.shape[0], 4)`` does not compile with
``fullgraph=True`` if the size is a symbol. So profiles are off unless a user turns them on, and
they never make a Python number a symbol.

A frame of kind ``shapes`` has one section, ``profile``: msgpack, a list with the fingerprint of
code, the name of a tensor (``L['x']``), and flags for its sizes and for its strides that change. It
contains no values, so not the sizes themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, TypeAlias

import msgpack  # type: ignore[import-untyped]

from s3cache import frame
from s3cache.artifact import SCHEMA, section_of
from s3cache.cache import Engine
from s3cache.entries import SHAPE_KEYS
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.graph import code_fingerprint
from s3cache.hooks._keys import around
from s3cache.hooks._watching import Bypasses
from s3cache.torch_api import installed_version, internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Function, ShapeState, Translator

logger = logger_of("saves")

#: Which sizes, or strides, of a tensor change; ``None`` if unknown.
Flags: TypeAlias = "tuple[bool, ...] | None"
Changing: TypeAlias = tuple[Flags, Flags]


class Profile:
    """The sizes and strides that change between calls, by code fingerprint and tensor name."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[str, str], Changing] = {}

    def add(self, code: str, name: str, changing: Changing) -> bool:
        """Add flags of a tensor; return whether the profile changed."""
        known = self.inputs.get((code, name), (None, None))
        merged = _merged(known[0], changing[0]), _merged(known[1], changing[1])
        self.inputs[code, name] = merged
        return merged != known

    def encode(self, key: str) -> bytes:
        """Return a frame under ``key``; equal profiles have equal variants."""
        content: bytes = msgpack.packb([(*one, *self.inputs[one]) for one in sorted(self.inputs)])
        return frame.encode(
            kind="shapes",
            key=key,
            variant=hashlib.sha256(content).hexdigest()[:32],
            schema=SCHEMA,
            sections={"profile": content},
        )

    def update(self, entry: Frame) -> None:
        """Add the profile in a verified frame.

        Raises:
            CorruptError: the frame has another kind or schema, or is malformed.
        """
        content = section_of(entry, "shapes", "profile")
        try:
            said = [
                (str(code), str(name), (_flags(sizes), _flags(strides)))
                for code, name, sizes, strides in msgpack.unpackb(content)
            ]
        except (TypeError, ValueError, msgpack.UnpackException) as exc:
            raise CorruptError("profile", f"is malformed ({exc!r})") from None
        for each in said:
            self.add(*each)


def _flags(plain: object) -> Flags:
    if plain is None:
        return None
    if not isinstance(plain, list) or not {*map(type, plain)} <= {bool}:
        raise ValueError(f"{str(plain)[:80]} is no list of flags")
    return tuple(plain)


def _merged(ours: Flags, theirs: Flags) -> Flags:
    """Return the union of both; if the numbers of dimensions differ, the larger one."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if len(ours) != len(theirs):
        return max(ours, theirs, key=len)
    return tuple(our or their for our, their in zip(ours, theirs, strict=True))


class ShapeProfiles:
    """Gives Dynamo the sizes that changed on other machines, and saves those that change here."""

    def __init__(self, engine: Engine, bypasses: Bypasses) -> None:
        self._engine = engine
        self._bypasses = bypasses
        self._key = ""
        self._known = Profile()  # of this and other machines
        self._fingerprints: dict[CodeType, str] = {}
        self._unsaved = False

    @around(internals.update_automatic_dynamic)
    def _update_automatic_dynamic(
        self,
        original: Function[ShapeState],
        tx: Translator,
        name: str,
        entry: ShapeState,
        *args: object,
        **kwargs: object,
    ) -> ShapeState:
        # Ranks that compile together exchange their own profiles; ours may differ.
        if tx.distributed_state is not None or not internals.automatic_dynamic_shapes.get():
            return original(tx, name, entry, *args, **kwargs)
        code = ""
        with self._guarded():
            code = self._code(tx.f_code)
            known = self._known.inputs.get((code, name))
            if known is not None:
                entry = internals.with_changing(entry, *known)
        result = original(tx, name, entry, *args, **kwargs)
        with self._guarded():
            changing = internals.changing(result)
            if code and any(any(flags or ()) for flags in changing):
                self._unsaved |= self._known.add(code, name, changing)
        return result

    @around(internals.put_code_state)
    def _put_code_state(self, original: Callable[[], None]) -> None:
        original()
        if self._unsaved and self._engine.settings.mode in ("read-write", "write-only"):
            self._unsaved = False
            with self._guarded():
                self._engine.save(self._key, self._known.encode(self._key), level="shapes")

    def _code(self, code: CodeType) -> str:
        """Return the fingerprint of ``code``; on the first call fetch the program's profile."""
        if code not in self._fingerprints:
            first = self._fingerprints[code] = code_fingerprint(code)
            if not self._key:
                tag = internals.cache_key_tag.get()
                parts = "shapes", installed_version(), platform.python_version(), tag, first
                self._key = f"{SHAPE_KEYS}{hashlib.sha256(repr(parts).encode()).hexdigest()}"
                # Not closed, so that it does not count as a lookup of a graph.
                lookup = self._engine.candidates(self._key, "shapes")
                for hit in lookup:
                    try:
                        self._known.update(hit.entry)
                        lookup.accept(hit)
                    except Exception as exc:  # noqa: BLE001 - whatever it holds
                        lookup.reject(hit, exc)
        return self._fingerprints[code]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Warn of an error in the block instead of failing the compile."""
        try:
            yield
        except Exception as exc:
            if self._engine.settings.strict:
                raise
            self._bypasses.failed(logger, "the shape profile is not shared", exc)
