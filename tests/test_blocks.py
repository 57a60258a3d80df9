"""Every block of code on the pages is run by a test, or is listed here with what stands for that.

Programs in Python are run as they stand by ``tests/examples/test_readme.py``, files by the tests
that are named below. What is left are commands and data: each is held by a test that runs it, or
what it comes to; or nothing runs it, for a reason. ``infra/README.md`` is held by ``tests/infra``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3cache.records import JOB
from s3cache.settings import Settings
from s3cache.store import STORE_OPTIONS, S3Options, parse_url
from s3cache.trust import parse_trusted

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
    ]
    if path.name != "commands.md"  # made of the command line itself, and held against it
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [(page, *block) for page, text in PAGES.items() for block in BLOCK.findall(text)]

# Files that a page shows, and who runs them.
FILES = {
    "docs/getting-started.md": "tests/examples/test_getting_started.py",
    "docs/testing.md": "tests/testing/test_page.py",
}
# Blocks that are no commands, by how they begin.
PICTURES = {
    ("docs/architecture.md", "torch's compiler"): "a diagram",
    ("docs/compile-cache.md", "torch.compile ── a graph"): "a diagram",
    ("docs/compile-cache.md", "s3cache: a graph is not"): "a message; tests/hooks/test_bypasses.py",
    ("docs/explaining-misses.md", "run 20261123"): "what is printed; tests/insight",
    ("docs/explaining-misses.md", "miss: graph a98"): "the same; tests/hooks/test_rejected.py",
    ("docs/storage.md", "lookup(key)"): "a diagram",
    ("docs/storage.md", "objects/"): "names in a directory",
}
_DIST = "tests/dist/__main__.py, make test-dist"
_REPORT = "tests/cli/test_report.py"
_RUN = "tests/hooks/test_run.py"
_AUTOLOAD = "tests/hooks/test_autoload.py"
_RGW = "tests/rgw/test_faults_rgw.py"
_CONTAINERS = "needs Docker; tests/infra/test_minio_compose.py holds what it reads"
_EXAMPLE = "tests/examples/test_warm_start_ci.py"
# Commands as they stand, but for comments, and who runs them or why nothing does. Those of `make`
# are held against the Makefile; those of AWS are not run.
COMMANDS = {
    "pip install torch-s3cache": _DIST,
    "s3cache check train.py": "tests/cli/test_programs.py",
    "s3cache report": _REPORT,
    "s3cache report --last 8": _REPORT,
    "s3cache report --manifest job.keys": _REPORT,
    "s3cache mirror s3://bucket/main s3://elsewhere/main --manifest job.keys": (
        "tests/cli/test_moving.py"
    ),
    "s3cache report --last 8 --html report.html": _REPORT,
    "pip install 'torch-s3cache[testing]'": f"from the index; the extra is installed by {_DIST}",
    "pip install torch 'torch-s3cache[testing]'": f"from the index; as {_DIST}",
    "python -m pytest": _EXAMPLE,
    "python -m s3cache run --url file:///tmp/s3cache-try/shared train.py": (
        "tests/examples/test_getting_started.py"
    ),
    "S3CACHE_LOCAL_DIR=/tmp/s3cache-try/other TORCHINDUCTOR_CACHE_DIR=/tmp/s3cache-try/inductor "
    "python -m s3cache run --url file:///tmp/s3cache-try/shared train.py": (
        "tests/examples/test_getting_started.py"
    ),
    "S3CACHE_URL=s3://bucket/prefix python train.py": _AUTOLOAD,
    "S3CACHE_URL=s3://bucket/prefix python train.py --epochs 10": _AUTOLOAD,
    "S3CACHE_URL=s3://bucket/prefix torchrun --nproc-per-node 8 train.py": _AUTOLOAD,
    "python -m s3cache run --url s3://bucket/prefix train.py --epochs 10": _RUN,
    "python -m s3cache run -m package.train --epochs 10": _RUN,
    "torchrun --nproc-per-node 8 -m s3cache run train.py": _RUN,
    "S3CACHE_URL=s3://bucket/prefix "
    "S3CACHE_METRICS_FILE=/var/lib/node_exporter/s3cache-{rank}.prom "
    "torchrun --nproc-per-node 8 train.py": "tests/metrics/test_prometheus.py, by hand",
    "s3cache explain": "tests/cli/test_explain.py",
    "s3cache explain custom-operator": "tests/cli/test_explain.py",
    "python -m s3cache keygen ci-main-1": "tests/trust/test_keygen.py",
    ".venv/bin/python benchmarks/render.py": "tests/test_docs.py calls what it calls",
    "make rgw-up && source /tmp/s3cache-rgw/env": f"runs infra/rgw/up.sh, as {_RGW}",
    "cd infra/minio": _CONTAINERS,
    "cp .env.example .env": _CONTAINERS,
    "docker compose up --wait minio": _CONTAINERS,
    "docker compose run --rm init": _CONTAINERS,
    "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...": "to be filled in",
    'S3CACHE_URL="s3://compile-cache/main?endpoint_url=http://127.0.0.1:9000&region=us-east-1" '
    "python train.py": "test_the_url_on_the_page_of_minio_is_that_of_its_compose_file, below",
    'radosgw-admin user create --uid=s3cache-writer --display-name="s3cache writer"': (
        "needs a cluster's administrator; infra/rgw/up.sh makes a user so"
    ),
    'radosgw-admin user create --uid=s3cache-reader --display-name="s3cache reader"': (
        "needs a cluster's administrator; infra/rgw/up.sh makes a user so"
    ),
}


def commands() -> list[tuple[str, str]]:
    """Page and command of each line that is one, without comments; continued lines are one."""
    found = []
    for page, language, text in BLOCKS:
        if language or any(text.strip().startswith(begins) for _, begins in PICTURES):
            continue
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            command = re.sub(r"(^|\s+)# .*", "", line).strip()
            if command:
                found.append((page, command))
    return found


LEFT = [
    (page, command)
    for page, command in commands()
    if not re.fullmatch(r"(make( [\w-]+)?( [A-Z]+=\S+)*|aws .*)", command)
]


def test_each_file_that_is_shown_is_tried() -> None:
    shown = {
        page
        for page, language, text in BLOCKS
        if language == "python" and re.match(r"# \S+\.py\n", text)
    }
    assert shown == FILES.keys()


def test_each_command_is_listed_with_who_runs_it() -> None:
    assert sorted({command for _, command in LEFT} - COMMANDS.keys()) == []


def test_nothing_is_listed_that_is_on_no_page() -> None:
    assert sorted(COMMANDS.keys() - {command for _, command in LEFT}) == []
    pictures = {
        (page, begins)
        for page, begins in PICTURES
        for where, _, text in BLOCKS
        if where == page and text.strip().startswith(begins)
    }
    assert pictures == PICTURES.keys()


@pytest.mark.parametrize("holder", sorted({*COMMANDS.values(), *PICTURES.values()}))
def test_who_is_said_to_run_it_is_there(holder: str) -> None:
    named = re.findall(r"(?:tests|infra|benchmarks)/[\w/]+\.(?:py|sh)", holder)
    assert [path for path in named if not (ROOT / path).exists()] == []


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def test_what_pages_make_is_in_the_makefile() -> None:
    """In blocks and in sentences."""
    made = {
        target
        for text in PAGES.values()
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=[ `\n])", text, re.MULTILINE)
    }
    assert made - targets() == set()
    assert made >= {"demo", "test", "test-rgw", "bench-keys"}, "the pattern finds none"


def test_variables_on_the_pages_are_settings() -> None:
    known = {f"S3CACHE_{name.upper()}" for name in (*Settings.__dataclass_fields__, *STORE_OPTIONS)}
    named = {
        variable
        for text in PAGES.values()
        for variable in re.findall(r"\bS3CACHE_[A-Z0-9_]*[A-Z0-9]\b", text)
    }
    named = {each for each in named if not each.startswith("S3CACHE_TEST_")}
    assert named - known - {"S3CACHE_AUTOLOAD", JOB} == set()


# -- data


def documents(page: str, language: str) -> list[Any]:
    texts = [text for where, kind, text in BLOCKS if (where, kind) == (page, language)]
    return [json.loads(text) if language == "json" else yaml.safe_load(text) for text in texts]


def test_the_machines_own_file_is_one_that_can_be_read() -> None:
    (content,) = documents("docs/trust.md", "json")
    assert set(content) == {"trust", "trusted_keys", "revoked"}
    assert Settings(trust=content["trust"]).trust == "require"
    (key,) = parse_trusted(" ".join(content["trusted_keys"]), audience="main")
    assert key.key.name == "ci-main-1"


def test_the_url_on_the_page_of_minio_is_that_of_its_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "infra/minio/compose.yaml").read_text(encoding="utf-8"))
    (said,) = re.findall(r'S3CACHE_URL="(.+?)"', PAGES["docs/operating/minio.md"])
    assert s3(said).url == s3(compose["services"]["init"]["environment"]["S3CACHE_URL"]).url


def s3(url: str) -> S3Options:
    location = parse_url(url)
    assert isinstance(location, S3Options)
    return location


def variables_are_good(environment: dict[str, str]) -> None:
    """As settings; with GitHub's expressions in the place of values, each of them."""
    for name, value in environment.items():
        if not name.startswith("S3CACHE_"):
            continue
        words = re.findall(r"'([\w-]+)'(?! &&)", value) if "${{" in value else [value]
        setting = name.removeprefix("S3CACHE_").lower()
        for word in words:
            given: dict[str, Any] = {setting: word}
            Settings.load(**given)
        if setting == "url":
            assert s3(value).url.startswith("s3://example-compile-cache/main")


def test_the_workflow_of_github_has_a_role_and_few_rights() -> None:
    (workflow,) = documents("docs/operating/github-actions.md", "yaml")
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}
    (job,) = workflow["jobs"].values()
    variables_are_good(job["env"])
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action)] == []
    # The order in which mode and role are chosen is one.
    chosen = [str(job["env"]["S3CACHE_MODE"])]
    chosen += [step["with"]["role-to-assume"] for step in job["steps"] if "role" in str(step)]
    assert len({text.partition("&&")[0] for text in chosen}) == 1
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs[-1] == "python train.py"
