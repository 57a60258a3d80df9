"""Share Dynamo's automatic dynamic shapes: what one machine learned, the next one starts with.

Dynamo takes each size for a constant until it sees another one, and compiles again then. So a first
batch of another size than any before would miss on the next machine. What turned out to change is
shared as one entry for a program, under a key made of the code that it compiled first. It only
decides what Dynamo traces as a symbol; guards and keys are as if Dynamo had found out by itself.

A program can need its sizes to be constants: ``math.gcd(x.shape[0], 4)`` does not compile with
``fullgraph=True`` where the size is a symbol. So profiles are off unless a user turns them on, and
never make a symbol of a Python number.

A frame of kind ``shapes`` has one section, ``profile``: msgpack, a list with the fingerprint of a
piece of code, the name of a tensor (``L['x']``), and flags of its sizes and of its strides that
change. It names no values: not the sizes that were seen.
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

#: Which of a tensor's sizes, or strides, change; ``None`` where nothing is known.
Flags: TypeAlias = "tuple[bool, ...] | None"
Changing: TypeAlias = tuple[Flags, Flags]


class Profile:
    """What changes of a tensor from call to call, by the fingerprint of the code and its name."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[str, str], Changing] = {}

    def add(self, code: str, name: str, changing: Changing) -> bool:
        """Add what is known of a tensor; return whether that was news."""
        known = self.inputs.get((code, name), (None, None))
        merged = _merged(known[0], changing[0]), _merged(known[1], changing[1])
        self.inputs[code, name] = merged
        return merged != known

    def encode(self, key: str) -> bytes:
        """Return a frame under ``key``; profiles that say the same are one variant."""
        content: bytes = msgpack.packb([(*one, *self.inputs[one]) for one in sorted(self.inputs)])
        return frame.encode(
            kind="shapes",
            key=key,
            variant=hashlib.sha256(content).hexdigest()[:32],
            schema=SCHEMA,
            sections={"profile": content},
        )

    def update(self, entry: Frame) -> None:
        """Add all that a verified frame says.

        Raises:
            CorruptError: it is of another kind or schema, or holds something else.
        """
        content = section_of(entry, "shapes", "profile")
        try:
            said = [
                (str(code), str(name), (_flags(sizes), _flags(strides)))
                for code, name, sizes, strides in msgpack.unpackb(content)
            ]
        except (TypeError, ValueError, msgpack.UnpackException) as exc:
            raise CorruptError("profile", f"is none ({exc!r})") from None
        for each in said:
            self.add(*each)


def _flags(plain: object) -> Flags:
    if plain is None:
        return None
    if not isinstance(plain, list) or not {*map(type, plain)} <= {bool}:
        raise ValueError(f"{str(plain)[:80]} is not what changes of a tensor")
    return tuple(plain)


def _merged(ours: Flags, theirs: Flags) -> Flags:
    """Return what changes by either; of two numbers of dimensions the larger one counts."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if len(ours) != len(theirs):
        return max(ours, theirs, key=len)
    return tuple(our or their for our, their in zip(ours, theirs, strict=True))


class ShapeProfiles:
    """Gives Dynamo the sizes that changed elsewhere, and saves those that change here."""

    def __init__(self, engine: Engine, bypasses: Bypasses) -> None:
        self._engine = engine
        self._bypasses = bypasses
        self._key = ""
        self._known = Profile()  # from elsewhere and here
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
        # Ranks that compile together tell each other what they know; ours may differ.
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
        """Return the fingerprint of ``code``; the first one names the program, which is fetched."""
        if code not in self._fingerprints:
            first = self._fingerprints[code] = code_fingerprint(code)
            if not self._key:
                tag = internals.cache_key_tag.get()
                parts = "shapes", installed_version(), platform.python_version(), tag, first
                self._key = f"{SHAPE_KEYS}{hashlib.sha256(repr(parts).encode()).hexdigest()}"
                # Not closed: it is no lookup of a graph, and not counted as one.
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
        """Warn of an error in the block, which no compile may fail for."""
        try:
            yield
        except Exception as exc:
            if self._engine.settings.strict:
                raise
            self._bypasses.failed(logger, "what changes is not shared", exc)
