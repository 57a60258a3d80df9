"""Store files of another compiler as one entry under one key.

A frame of kind ``triton``, ``torch``, ``helion`` or ``torchtitan`` has one section per file, with
the name of the file. ``name`` in its ``meta`` is the compiler's own name for the entry. The key is
the kind and a digest of the parts that the adapter gives. A compiler gets files only after the
whole frame has been verified, signatures included.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from s3cache.errors import CorruptError
from s3cache.features.ports import PortOptions
from s3cache.util.logs import logger_of
from s3cache.util.options import INERT_DEVICE

# The rest is imported at the first lookup: a program may import a compiler and never use it.
if TYPE_CHECKING:
    from s3cache.cache import CandidateLookup, Engine, Hit, Retry, Work
    from s3cache.entries import LabelledKey

logger = logger_of("storage")

SCHEMA = 1
_WAIT_S = 60.0  # the longest wait for a kernel that another process of this machine compiles
_warned: set[str] = set()


def running_engine() -> Engine | None:
    """Return the enabled cache; the first call enables it if the environment asks for it."""
    from s3cache.cache import current_cache

    if (cache := current_cache()) is None:
        from s3cache.hooks import active

        active()
        cache = current_cache()
    return None if cache is None else cache.engine


class Files:
    """The entries of one kind. Errors are raised in strict mode, and logged otherwise.

    Args:
        newest: compare all variants under a key, and use the newest. Otherwise they are equivalent.
    """

    def __init__(self, kind: str, *, newest: bool = False) -> None:
        self._kind, self._newest = kind, newest

    def key(self, **parts: str) -> LabelledKey:
        """Return the key for these parts."""
        from s3cache.entries import labelled_key

        return labelled_key(f"{self._kind}-", parts.items())

    def get(
        self, key: LabelledKey, hold: Callable[[Work], object] | None = None
    ) -> dict[str, bytes] | None:
        """Return the verified files under ``key``, or ``None``.

        With ``hold``, wait while another process of this machine compiles them. If no process does,
        this one compiles them, and ``hold`` is called with what to end then.
        """
        with self.guarded("nothing is looked up"):
            if (engine := self._engine()) is not None:
                return self._look_up(engine, key, hold)
        return None

    def _look_up(
        self, engine: Engine, key: LabelledKey, hold: Callable[[Work], object] | None
    ) -> dict[str, bytes] | None:
        from s3cache.records import Record

        def wait() -> Retry | None:
            retry = engine.events.missed.ask(key, self._kind, _WAIT_S)
            if retry is not None and retry.work is not None and hold is not None:
                hold(retry.work)
            return retry

        best: Hit | None = None
        files: dict[str, bytes] | None = None
        with engine.candidates(key, self._kind, retry=hold and wait) as lookup:
            for hit, content in self._readable(lookup):
                if best is None or _age(hit) > _age(best):
                    best, files = hit, content
                if not self._newest:
                    break
            if best is not None:
                lookup.accept(best)
        outcome = lookup.close()
        ended, reason = ("miss", outcome.reason) if best is None else ("hit", best.tier)  # type: ignore[union-attr]
        about = (self._kind, ended, key, str(reason), time.time(), outcome.elapsed_s)
        engine.record(Record(*about, components=key.components))
        return files

    def newest(self, key: LabelledKey, limit: int) -> list[dict[str, bytes]]:
        """Return the verified files of the newest entries under ``key``, newest first.

        Entries on this machine are read. At most ``limit + 2`` others are fetched, those that were
        uploaded last.
        """
        newest: list[tuple[Hit, dict[str, bytes]]] = []
        with self.guarded("nothing is looked up"):
            if (engine := self._engine()) is None or limit < 1:
                return []
            from s3cache.stats import Counters

            fetched = 0
            # Not counted as hits or misses: the search still runs.
            with engine.candidates(key, self._kind, counters=Counters()) as lookup:
                for new in self._readable(lookup):
                    newest.append(new)
                    newest = sorted(newest, key=lambda both: _age(both[0]), reverse=True)[:limit]
                    fetched += new[0].tier == "remote"
                    # Those of the remote come as they were uploaded, after the very first one.
                    if fetched > limit or (fetched > 1 and all(each is not new for each in newest)):
                        break
        return [files for _, files in newest]

    def _readable(self, lookup: CandidateLookup) -> Iterator[tuple[Hit, dict[str, bytes]]]:
        """Yield the hits of a lookup with their files."""
        for hit in lookup:
            header = hit.entry.header
            if (header.kind, header.schema) == (self._kind, SCHEMA):
                yield hit, {name: bytes(hit.entry.section(name)) for name in hit.entry.names}
            else:
                problem = f"is of kind {header.kind}, schema {header.schema}"
                lookup.reject(hit, CorruptError("frame", problem))

    def put(
        self,
        key: LabelledKey,
        name: str,
        files: Mapping[str, bytes],
        *,
        instead_of: str | None = None,
        at_once: bool = False,
    ) -> str | None:
        """Save files under ``key``, to be uploaded; return their variant, or ``None``.

        They replace the variant ``instead_of`` if it was not uploaded yet. To allow that, uploads
        of variants wait a minute or for the next flush, unless ``at_once`` is set.
        """
        engine = self._engine()
        if engine is None:
            return None
        from s3cache import frame
        from s3cache.cache import Saved
        from s3cache.torch_api import installed_version

        variant, is_saved = "", False
        if self._newest:
            digests = [(file, hashlib.sha256(files[file]).hexdigest()) for file in sorted(files)]
            variant = hashlib.sha256(repr(digests).encode()).hexdigest()[:32]
        with self.guarded("an entry is not shared"):
            data = frame.encode(
                kind=self._kind,
                key=str(key),
                variant=variant,
                schema=SCHEMA,
                meta={"name": name, "torch": installed_version(), "components": key.about},
                sections=files,
            )
            if instead_of is not None and instead_of != variant:
                engine.withdraw(key, instead_of)
            is_delayed = self._newest and not at_once
            outcome = engine.save(key, data, kind=self._kind, delayed=is_delayed)
            is_saved = isinstance(outcome, Saved)
        return variant if is_saved else None

    @contextlib.contextmanager
    def guarded(self, otherwise: str) -> Iterator[None]:
        """Log the first error of a block, so that no compile fails; in strict mode, raise it."""
        try:
            yield
        except Exception as exc:
            engine = running_engine()
            if engine is not None and engine.settings.strict:
                raise
            if self._kind not in _warned:
                _warned.add(self._kind)
                logger.warning("%s: %s: %s", self._kind, otherwise, exc)

    def _engine(self) -> Engine | None:
        engine = running_engine()
        if engine is None or not engine.settings.of(PortOptions).wants_port(self._kind):
            return None
        return engine


def _age(hit: Hit) -> int:
    return hit.entry.header.created_ns


def device_here() -> str | None:
    """Return what measurements depend on: device, driver, CUDA or ROCm; ``None`` without a GPU.

    Measurements on other accelerators, or that mean nothing, are not shared.
    """
    torch = sys.modules.get("torch")
    if torch is None or os.environ.get(INERT_DEVICE) or not torch.cuda.is_available():
        return None
    from s3cache.torch_api import internals

    properties, driver = internals.shared_properties(internals.current_device("cuda")), ""
    for module in ("amdgpu", "nvidia"):
        with (
            contextlib.suppress(OSError),
            open(f"/sys/module/{module}/version", encoding="utf-8") as file,
        ):
            driver = f"{module} {file.read(200).strip()}"
    return repr((*properties.items(), torch.version.cuda, torch.version.hip, driver))
