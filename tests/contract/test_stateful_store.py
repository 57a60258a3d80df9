"""A store of files compared with a dict, driven by Hypothesis.

https://hypothesis.readthedocs.io/en/latest/stateful.html
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from s3cache.errors import PreconditionError
from s3cache.store import FileStore
from tests.support.contract import listed
from tests.support.marks import examples

_T = TypeVar("_T")

# Few keys, so that rules use the same one, and similar keys, so that confusion shows.
keys = st.sampled_from(["a", "a/b", "a/b/c", "a.b", "ab", "b-c", "b=/1"])
prefixes = st.sampled_from(["", "a", "a/", "a/b", "b", "b=", "none", "a%"])
bodies = st.one_of(st.binary(max_size=32), st.integers(1, 70_000).map(lambda n: b"%d" % n * 2))


class StoreMachine(RuleBasedStateMachine):
    """The store answers like a dict, for any calls in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytes] = {}
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.store = FileStore(self.directory.name)

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        self.run(self.store.aclose())
        self.run(self.loop.shutdown_asyncgens())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()
        self.directory.cleanup()

    @rule(key=keys, body=bodies)
    def put(self, key: str, body: bytes) -> None:
        self.run(self.store.put(key, body))
        self.model[key] = body

    @rule(key=keys, body=bodies)
    def create(self, key: str, body: bytes) -> None:
        try:
            self.run(self.store.put(key, body, mode="create"))
            created = True
        except PreconditionError:
            created = False
        assert created is (key not in self.model)
        self.model.setdefault(key, body)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.run(self.store.delete(key))
        self.model.pop(key, None)

    @rule(key=keys, start=st.integers(0, 40), length=st.integers(0, 40))
    def read(self, key: str, start: int, length: int) -> None:
        body = self.model.get(key)
        assert self.run(self.store.get(key)) == body
        part = self.run(self.store.get_range(key, start, length))
        assert part == (None if body is None else body[start : start + length])
        info = self.run(self.store.head(key))
        assert (info and info.size) == (None if body is None else len(body))

    @rule(prefix=prefixes)
    def list_prefix(self, prefix: str) -> None:
        infos = self.run(listed(self.store, prefix))
        assert {key: info.size for key, info in infos.items()} == {
            key: len(body) for key, body in self.model.items() if key.startswith(prefix)
        }

    @rule(body=bodies, racing=st.lists(keys, min_size=2, max_size=6))
    def put_together(self, body: bytes, racing: list[str]) -> None:
        """Concurrent calls do not disturb each other."""

        async def race() -> None:
            await asyncio.gather(*(self.store.put(key, body) for key in racing))

        self.run(race())
        self.model.update(dict.fromkeys(racing, body))

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert set(self.run(listed(self.store))) == set(self.model)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=examples(0.25), stateful_step_count=25)
