"""Share Dynamo's automatic dynamic shapes: what one machine learned, the next one starts with.

Dynamo takes each size for a constant until it sees another one, and compiles again then. So a first
batch of another size than any before would miss on the next machine. What turned out to change is
shared as one entry for a program, under a key made of the code that it compiled first. It only
decides what Dynamo traces as a symbol; guards and keys are as if Dynamo had found out by itself.

A program can need its sizes to be constants: ``math.gcd(x.shape[0], 4)`` does not compile with
``fullgraph=True`` where the size is a symbol. So profiles are off unless a user turns them on, and
never make a symbol of a Python number.

A program that begins as the first one did is left alone: all graphs on its way are there, the one
of constants too, while a graph that began with symbols may differ from what was made of constants
later (sizes that are equal when a graph is traced share a symbol).
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from types import CodeType
from typing import TYPE_CHECKING

from s3cache.artifact import Changing, ShapeProfile
from s3cache.cache import Engine
from s3cache.graph import code_fingerprint
from s3cache.hooks._state import around
from s3cache.torch_api import installed_version, internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from s3cache.torch_api.protocols import Function, ShapeState, Translator

logger = logger_of("saves")

# A program learns a little with each compile, and then no more.
_MAX_SAVES = 16
_MAX_VARIANTS = 16


class ShapeProfiles:
    """Gives Dynamo the sizes that changed elsewhere, and saves those that change here."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._key = ""
        self._known = ShapeProfile()  # from elsewhere
        self._learned = ShapeProfile()
        self._fingerprints: dict[CodeType, str] = {}
        self._begun: dict[tuple[str, str], str] = {}  # by code and input; "" where more was known
        self._unsaved = False
        self._saves = 0
        self._warned = False

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
        with self._failing_once():
            code = self._code(tx.f_code)
            known = self._known.get(code, name)
            begun = self._begin(code, name, entry, known)
            if known is not None and not begun:
                entry = internals.with_changing(entry, known.sizes, known.strides)
        result = original(tx, name, entry, *args, **kwargs)
        if code:
            with self._failing_once():
                self._learn(code, name, result)
        return result

    def _begin(self, code: str, name: str, seen: ShapeState, known: Changing | None) -> str:
        """Return a digest of what was seen first, if that began as the graph of constants did."""
        if (code, name) not in self._begun:
            text = repr((seen.scalar, seen.size, seen.stride))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            alike = known is None or digest in known.begun
            self._begun[code, name] = digest if alike else ""
        return self._begun[code, name]

    def _learn(self, code: str, name: str, state: ShapeState) -> None:
        sizes, strides = internals.changing(state)
        if any(sizes or ()) or any(strides or ()):
            begun = self._begun.get((code, name))
            changing = Changing(sizes, strides, (begun,) if begun else ())
            self._unsaved |= self._learned.add(code, name, changing)

    @around(internals.put_code_state)
    def _put_code_state(self, original: Callable[[], None]) -> None:
        original()
        if self._unsaved and self._saves < _MAX_SAVES:
            self._unsaved = False
            with self._failing_once():
                self._save()

    def _save(self) -> None:
        if self._key and self._engine.settings.mode in ("read-write", "write-only"):
            self._saves += 1
            self._engine.save(self._key, self._learned.encode(self._key), level="shapes")

    def _code(self, code: CodeType) -> str:
        """Return the fingerprint of ``code``; the first one names the program, which is fetched."""
        if code not in self._fingerprints:
            self._fingerprints[code] = code_fingerprint(code)
            if not self._key:
                self._key = _key(self._fingerprints[code])
                self._fetch()
        return self._fingerprints[code]

    def _fetch(self) -> None:
        # Not closed: it is no lookup of a graph, and not counted as one.
        lookup = self._engine.candidates(self._key, "shapes")
        for count, hit in enumerate(lookup, 1):
            try:
                self._known.update(ShapeProfile.of(hit.entry))
            except Exception as exc:  # noqa: BLE001 - whatever it holds
                lookup.reject(hit, exc)
            if count == _MAX_VARIANTS:
                break
        self._learned.update(self._known)

    @contextlib.contextmanager
    def _failing_once(self) -> Iterator[None]:
        """Warn of the first error in the block, which no compile may fail for."""
        try:
            yield
        except Exception as exc:
            if self._engine.settings.strict:
                raise
            if not self._warned:
                self._warned = True
                logger.warning("what changes is not shared", exc_info=exc)


def _key(first: str) -> str:
    """Return the key of a program's profile."""
    whole = hashlib.sha256()
    tag = internals.cache_key_tag.get()
    for part in ("shapes", installed_version(), platform.python_version(), tag, first):
        whole.update(f"{len(part)}:{part}".encode())
    return f"p{whole.hexdigest()}"
