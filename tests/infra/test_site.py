"""The site of the documentation has every page, and its pages need nothing from elsewhere.

``make docs`` builds it, and finds links that lead nowhere; this finds most of it without MkDocs.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.docs.site import ADDED, fetched, on_config, relinked, source_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ADDED.values(), *(str(each.relative_to(DOCS)) for each in DOCS.rglob("*.md"))])


class _Loader(yaml.SafeLoader):
    """Reads what MkDocs lets its file say beside YAML."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation() -> list[Any]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav: list[Any] = yaml.load(text, _Loader)["nav"]
    return nav


def names(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for item in nav:
            yield from names(item)
    elif isinstance(nav, dict):
        yield from names([*nav.values()])


class Config:
    def __init__(self, nav: object) -> None:
        self.nav = nav


def test_every_page_is_in_the_navigation_once() -> None:
    found = Counter(names(on_config(Config(navigation())).nav))
    assert sorted(found) == PAGES
    assert set(found.values()) == {1}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_pages_of_the_site_or_are_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROJECT_URL", raising=False)
    text = relinked((ROOT / source_of(name)).read_text(encoding="utf-8"), name)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", text)
    places = [posixpath.normpath(posixpath.join(posixpath.dirname(name), each)) for each in targets]
    assert [place for place in places if place not in PAGES and not (DOCS / place).is_file()] == []


def test_links_out_of_the_site_lead_to_the_project_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "[the frame](../s3cache/frame.py), [keys](keys.md#threads), [here](#a), `[x](y)`"
    monkeypatch.delenv("PROJECT_URL", raising=False)
    assert relinked(text, "storage.md").startswith(
        "the frame (`s3cache/frame.py`), [keys](keys.md#"
    )
    monkeypatch.setenv("PROJECT_URL", "https://example.com/owner/name")
    link = "[the frame](https://example.com/owner/name/blob/HEAD/s3cache/frame.py)"
    assert relinked(text, "storage.md").startswith(link)
    assert relinked("[c](../../CONTRIBUTING.md#where)", "operating/aws.md") == (
        "[c](../contributing.md#where)"
    )


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://example.com/x.js"></script>',
        "<script src=//example.com/x.js></script>",
        '<link rel="stylesheet" href="https://example.com/x.css">',
        '<link href="https://example.com" rel="preconnect" crossorigin>',
        '<img alt="" src="https://example.com/x.png">',
        '@import "https://example.com/x.css";',
        "body { background: url(https://example.com/x.png) }",
    ],
)
def test_what_is_fetched_from_elsewhere_is_found(text: str) -> None:
    assert len(fetched(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://example.com">there</a>',
        '<link rel="canonical" href="https://example.com/page.html">',
        '<script src="assets/x.js"></script><img src="x.svg">',
        "body { background: url(data:image/png;base64,AA) }",
    ],
)
def test_what_a_reader_follows_or_the_site_has_is_not(text: str) -> None:
    assert fetched(text) == []
