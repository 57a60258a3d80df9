"""The documentation site has every page, and its pages load nothing from other servers.

``make docs`` builds the site, and finds broken links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import yaml

from infra.docs.site import ADDED, fetched, on_config
from tests.support.pages import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ADDED.values(), *(str(each.relative_to(DOCS)) for each in DOCS.rglob("*.md"))])


def navigation() -> list[Any]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav: list[Any] = yaml.load(text, yaml.BaseLoader)["nav"]
    return nav


def names(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for item in nav:
            yield from names(item)
    elif isinstance(nav, dict):
        yield from names([*nav.values()])


def test_every_page_is_in_the_navigation_once() -> None:
    found = Counter(names(on_config(SimpleNamespace(nav=navigation())).nav))
    assert sorted(found) == PAGES
    assert set(found.values()) == {1}


def test_resources_from_other_servers_are_found() -> None:
    place = '"https://example.com/x"'
    for text in (f"<script src={place}>", f'<img alt="" src={place}>', f"url({place[1:-1]})"):
        assert len(fetched(text)) == 1
    assert fetched(f'<a href={place}>there</a><script src="assets/x.js"></script>') == []
