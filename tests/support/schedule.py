"""How pytest-xdist shares the tests out: file by file, those that may take longest first.

Tests of a file share what is costly to make, so a file stays together. So do the files whose tests
share an entry that takes long to compile (the fixture ``written``), and whatever uses the gateway:
some of those tests kill it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer

__all__: list[str] = []

_TOGETHER = {
    "rgw": "rgw",
    "tests/artifact/test_describe": "written",
    "tests/hooks/test_portability": "written",
}


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((name for part, name in _TOGETHER.items() if part in file), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    config.option.loadscopereorder = False  # the number of tests says little about their time
    return _ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("rgw") and "rgw" not in str(
            item.path.relative_to(config.rootpath)
        ):
            raise pytest.UsageError(f"{item.nodeid} uses the gateway: its file has to say rgw")
    if hasattr(config, "workerinput"):
        patience = {item.path: 0.0 for item in items}
        for item in items:
            patience[item.path] = max(patience[item.path], _timeout_s(item))
        items.sort(key=lambda item: -patience[item.path])


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0
