# The task runner: `make` lists the targets. Everything runs in .venv, which is built once.
# Rarer commands are beside what they run: infra/README.md and tests/README.md list them.

PYTHON ?= python3
# Extra arguments for pytest or a benchmark: make test ARGS="-k retry -x"
ARGS ?=
# Processes that run tests side by side: three on two cores, as many tests wait. 0 runs all tests
# in one process, for debuggers: make test WORKERS=0 ARGS=--pdb
WORKERS ?= 3

BIN := .venv/bin
READY := .venv/.ready
# Separate, as changes of the code do not need them, and few packages should build a release.
DOCS_READY := .venv-docs/.ready
DIST_READY := .venv-dist/.ready
RGW := infra/rgw/run.sh
IF_POSSIBLE := $(RGW) --if-possible

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' Makefile)
export PYTHON

help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## build .venv with the pinned development dependencies

$(READY): pyproject.toml constraints.txt
	@infra/venv.sh .venv -c constraints.txt -e ".[dev]"

$(DOCS_READY): constraints.txt
	@infra/venv.sh .venv-docs -c constraints.txt -r infra/docs/requirements.txt

$(DIST_READY): constraints.txt
	@infra/venv.sh .venv-dist -c constraints.txt -r infra/dist/requirements.txt

lint: $(READY) ## formatting, lint rules, spelling, workflows and strict types, of the tests too
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell s3cache tests docs infra examples benchmarks .github *.md *.py
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest
SHARED = -n $(WORKERS) --no-loadscope-reorder --durations=15
FAST = -m "not slow and not nightly"
THOROUGH = --hypothesis-profile=thorough

triton: $(READY)
	@infra/gpu/triton.sh

# Tests that need Ceph RGW skip if it can neither be found nor installed.
test: triton ## every suite, without slow cases; minutes
	$(IF_POSSIBLE) $(PYTEST) tests $(SHARED) $(FAST) $(ARGS)

test-all: triton ## the slow cases too; some 20 minutes
	$(IF_POSSIBLE) $(PYTEST) tests $(SHARED) $(THOROUGH) -m "not nightly" $(ARGS)

test-slow: triton ## the cases of test-all that test leaves out
	$(IF_POSSIBLE) $(PYTEST) tests $(SHARED) $(THOROUGH) -m "slow and not nightly" $(ARGS)

# All commands run, even if others fail.
test-nightly: triton ## everything: all cases, soak, perturbations, fuzzers, frameworks; hours
	status=0; \
	$(IF_POSSIBLE) $(PYTEST) tests $(SHARED) $(THOROUGH) $(ARGS) || status=1; \
	$(IF_POSSIBLE) $(BIN)/python -m tests.soak --seconds $(SOAK_TIME) || status=1; \
	tests/fuzz/run.sh || status=1; \
	$(MAKE) --keep-going ARGS= test-perturb test-frameworks || status=1; \
	exit $$status

test-rgw: $(READY) ## the tests against a real Ceph RGW; fails without one
	$(RGW) $(PYTEST) tests $(THOROUGH) -m rgw $(ARGS)

TORCH_TESTS ?= tests/torch_api tests/graph tests/hooks tests/artifact tests/equal/test_kinds.py
test-torch: ## the tests of code that touches torch, with another torch: make test-torch TORCH=2.14.1
	-infra/torch.sh python -W ignore -m s3cache.torch_api
	infra/torch.sh python -m pytest $(SHARED) $(FAST) $(TORCH_TESTS) $(ARGS)

# A Python that has torch with CUDA, and s3cache.
GPU_PYTHON ?= $(BIN)/python
test-gpu: ## two machines and a GPU: the second hits and compiles nothing; 9 minutes at most
	@mkdir -p build
	$(GPU_PYTHON) infra/gpu/rehearse.py --json build/gpu.json $(ARGS)

test-frameworks: ## other people's trainers, unmodified, on two machines; an hour
	tests/frameworks/environment.sh
	.venv-frameworks/bin/python -W ignore -m tests.frameworks.checkpoints
	nice .venv-frameworks/bin/python -m tests.frameworks $(ARGS)

# It forks, and torch traces nothing in the fork of a process that has seen a GPU.
test-perturb: $(READY) ## 5,800 pairs of programs: the second must miss or do what a cold compile does; 40 minutes
	CUDA_VISIBLE_DEVICES= $(BIN)/python -W ignore -m tests.equal $(ARGS)

test-fleet: $(READY) ## 500 jobs with a leader that dies, stops, is cut off or slow, and 30 with torch; half an hour
	$(BIN)/python -m tests.fleet.run $(ARGS)

SOAK_TIME ?= 1800
soak: $(READY) ## 8 processes at full rate for SOAK_TIME seconds, under all faults; writes docs/reliability.md
	$(IF_POSSIBLE) $(BIN)/python -m tests.soak --seconds $(SOAK_TIME) --page docs/reliability.md $(ARGS)

dist: $(DIST_READY) ## build sdist and wheel into dist/ and check them for the package index
	rm -rf dist
	.venv-dist/bin/python -m build --no-isolation --outdir dist .
	.venv-dist/bin/python -m twine check --strict dist/*

test-dist: dist ## install the wheel into an empty environment and run the README there; 2 minutes
	.venv-dist/bin/python -m tests.dist dist

docs: $(DOCS_READY) ## build the site of the documentation into build/site; half a minute, then seconds
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html; to search in it: $(PYTHON) -m http.server --directory build/site"

docs-settings: $(READY) ## update the tables of settings, metrics, reasons and events in docs/
	$(BIN)/python -m infra.docs.settings
	$(BIN)/python -m infra.docs.options
	$(BIN)/python -m infra.docs.reasons
	$(BIN)/python -m infra.docs.metrics
	$(BIN)/python -m infra.docs.events
	$(BIN)/python -m infra.docs.asks

commands: $(READY) ## write docs/commands.md from the commands themselves
	@mkdir -p build
	$(BIN)/python -m infra.docs.commands >build/commands.md
	mv build/commands.md docs/commands.md

demo: $(READY) ## three machines train a small GPT; the first compiles it for all of them
	$(BIN)/python -m examples.gpt_demo $(ARGS)

bench: $(READY) ## first training steps with every cache, torch's own and ours; half an hour
	$(RGW) infra/redis/run.sh $(BIN)/python benchmarks/warm_start.py $(ARGS)
bench-signed: $(READY) ## first steps and the import, with unsigned entries refused; 6 minutes
	$(RGW) infra/redis/run.sh $(BIN)/python benchmarks/warm_start.py --signed --rounds 3 \
		--json docs/benchmarks/signed.json $(ARGS)
bench-storage: $(READY) ## latency and throughput of the stores
	S3CACHE_TEST_RGW_MEMORY=$${S3CACHE_TEST_RGW_MEMORY:-6442450944} \
		$(IF_POSSIBLE) $(BIN)/python benchmarks/storage.py $(ARGS)
bench-ranks: $(READY) ## CPU seconds of the first start of a job, all ranks together; 10 minutes
	$(BIN)/python benchmarks/ranks.py --json build/benchmarks/ranks.json $(ARGS)
bench-keys: $(READY) ## the cost of a key, compared with torch's own
	$(BIN)/python benchmarks/key_cost.py --json docs/benchmarks/keys.json $(ARGS)

lines: ## the lines and files of the core, by room, and of each feature
	@$(PYTHON) -m infra.lines

route: $(READY) ## the files that a miss and a hit from the remote run through
	$(BIN)/python benchmarks/route.py
