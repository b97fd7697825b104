# Each target does the set-up that it needs, in the virtual environment of $(VENV), once, and again when a pyproject
# changes.
#
#   PYTHON=python3.12   the interpreter that makes the environment (3.11 or newer)
#   ARGS='--seed 1'     arguments of the quickstart
#   PYTEST_ARGS='-x'    arguments of pytest, instead of three processes

VENV ?= .venv
ARGS ?=
# Three processes for two cores: the tests that use Ray stay together in one of them, so that there is one Ray a session,
# and mostly wait.
PYTEST_ARGS ?= -n 3 --dist loadgroup
SELECTED = -m "not thorough"

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.14 python,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))

# Bytecode is kept, whatever the caller's environment says: the tests start some thousand processes, and each would
# compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml examples/*/pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help quickstart check fast test thorough recipes soak conformance gpu vllm release changelog outside lint format types imports docs clean

help:  ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

quickstart: $(VENV)/.installed  ## the main job: supervised warm-up, then GRPO, on two-digit addition
	$(BIN)/python examples/quickstart/run.py $(ARGS)

# Types are checked while the fast tests run: together they keep two cores busy.
check: lint imports  ## style, import rules, types and fast tests, in under 3 minutes
	$(MAKE) --no-print-directory -j2 --output-sync=target types fast

fast: PYTEST_ARGS = -n 2 --dist loadgroup -q
fast: SELECTED = -m "not slow"
fast: test

test: $(VENV)/.installed-dev  ## the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SELECTED) $(PYTEST_ARGS)

# `make test` leaves out tests marked `thorough`, cases of some others, and tests of suites that several parts run: see
# tests/fixtures/left_out_cases.py and left_out_suites.py.
thorough: SELECTED = --thorough
thorough: test  ## what `make test` leaves out too: hours

recipes: $(VENV)/.installed-dev  ## examples/recipes: each fits its hardware, and runs on a CPU with a tiny model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --thorough tests/examples/test_recipes.py

# The short form of the same attacks is part of `make test`. SOAK_SEED=N repeats a run.
soak: export SOAK_FILE = $(abspath $(VENV))/soak.jsonl
soak: PYTEST_ARGS = -n 2 --dist loadgroup -o timeout=900 --thorough
soak: $(VENV)/.installed-dev  ## attack it: faults, fuzzed inputs, leaks, secrets, in 25 minutes; writes docs/results/soak.*
	rm -f $(SOAK_FILE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/soak; status=$$?; \
	test -f $(SOAK_FILE) || { echo "nothing was run, so docs/results is as it was" >&2; exit $$status; }; \
	$(BIN)/python docs/tools/soak_page.py $(SOAK_FILE) && exit $$status

# The page is made from the JSON, also where something does not conform; the exit code is pytest's. A run that could not
# start leaves both as they were.
conformance: PYTEST_ARGS = -n 2 --dist loadgroup # layouts have up to four workers
conformance: $(VENV)/.installed-dev  ## all parts in all their layouts; writes docs/results/conformance.json and .md
	rm -f $(VENV)/conformance.json $(VENV)/conformance_vllm.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) -o timeout=900 plugins/conformance/tests/all_parts.py \
		--conformance-layout all --conformance-json $(VENV)/conformance.json; status=$$?; \
	test -f $(VENV)/conformance.json || { echo "nothing was run, so docs/results is as it was" >&2; exit $$status; }; \
	if test -x $(VLLM_ENV)/bin/rlframework; then \
		OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/rlframework conformance vllm --json $(VENV)/conformance_vllm.json || status=1; \
	else echo "vllm is not tested: \`make vllm\` makes its environment" >&2; fi; \
	for report in conformance.json conformance_vllm.json; do \
		test ! -f $(VENV)/$$report || \
		$(BIN)/python -m rlframework_conformance.markdown --shorten $(VENV)/$$report docs/results/$$report || exit 1; \
	done; \
	$(BIN)/python -m rlframework_conformance.markdown docs/results/conformance*.json docs/results/conformance.md && \
	exit $$status

# Each command runs whatever the others found; OUT has their logs and figures. Tests that measure rates run alone.
gpu: OUT ?= build/gpu
gpu: $(VENV)/.installed-dev  ## on a machine with a GPU: its tests, the suites of each backend on it, its benchmark
	mkdir -p $(OUT); status=0; \
	$(BIN)/python -m pytest -q -m "gpu and not slow" -n 4 --dist loadgroup > $(OUT)/tests.log 2>&1 || status=1; \
	$(BIN)/python -m pytest -q -m "gpu and slow" > $(OUT)/rates.log 2>&1 || status=1; \
	for backend in dtensor deepspeed megatron; do \
		$(BIN)/rlframework conformance $$backend --device cuda > $(OUT)/$$backend.log 2>&1 || status=1; \
	done; \
	$(BIN)/python benchmarks/gpu.py --json $(OUT)/gpu.json --page $(OUT)/gpu.md > $(OUT)/benchmark.log 2>&1 || status=1; \
	tail -n 3 $(OUT)/*.log; exit $$status

# An environment of its own: vLLM takes 3 GB and a transformers of its own. The driver and the engines need the same
# versions of Python and Ray; `generation.workers.python` is $(VLLM_ENV)/bin/python. docs/vllm.md says what is removed.
VLLM_ENV ?= .venv-vllm
VLLM_EXTRA ?= cpu
VLLM_PIP = $(VLLM_ENV)/bin/python -m pip --disable-pip-version-check --quiet
vllm: $(VENV)/.installed-dev  ## the environment of vLLM in .venv-vllm (3 GB), and the tests that need it
	test -d $(VLLM_ENV) || $(BIN)/python -m venv $(VLLM_ENV)
	$(VLLM_PIP) install -e . -e plugins/dtensor -e plugins/transformers -e plugins/ray -e plugins/conformance -e 'plugins/vllm[$(VLLM_EXTRA)]' \
		"ray==$$($(BIN)/python -c 'import ray; print(ray.__version__)')" 'pytest>=8.3,<9.2' pytest-timeout
	test $(VLLM_EXTRA) != cpu || \
		$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton opencv-python-headless
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest plugins/vllm/tests
	VLLM_PYTHON=$(abspath $(VLLM_ENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest plugins/vllm/tests/test_vllm_faults.py \
		plugins/vllm/tests/test_vllm_image_runs.py

release: $(VENV)/.installed-dev  ## wheels of the commit, checksums, notes, in dist/VERSION; KEY=~/.ssh/id_ed25519 signs
	$(BIN)/python tools/release.py $(if $(KEY),--key $(KEY))

changelog: $(VENV)/.installed-dev  ## moves the files of changes/ into CHANGELOG.md, as the section of the version
	$(BIN)/towncrier build --yes --version "$$($(BIN)/python -c 'import rlframework; print(rlframework.__version__)')"

outside: $(VENV)/.installed-dev  ## wheels alone, in empty environments without a network: the example's suite, the quickstart on each backend
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rP tests/packaging/outside.py

lint: $(VENV)/.installed-dev  ## style: ruff check, ruff format --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev  ## put the code into the form that lint asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The template of a backend too, as `rlframework new-backend` writes it; mypy's cache makes that a matter of seconds.
types: $(VENV)/.installed-dev  ## mypy, strict
	$(BIN)/mypy
	rm -rf $(VENV)/blank && $(BIN)/rlframework new-backend blank --directory $(VENV)/blank >/dev/null
	$(BIN)/rlframework new-backend blank_engine --kind generation_engine --directory $(VENV)/blank/engine >/dev/null
	MYPYPATH=$(VENV)/blank:$(VENV)/blank/engine $(BIN)/mypy -p rlframework_blank -p rlframework_blank_engine

imports: $(VENV)/.installed-dev  ## import-linter: which room may import which
	$(BIN)/lint-imports

# Warnings are errors. The variable keeps the theme from advertising its successor on every build.
docs: $(VENV)/.installed-dev  ## the pages that are made, and the site, into build/site
	$(BIN)/python docs/tools/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build/site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "rlframework needs Python 3.11 or newer, and none is on the PATH." \
		"Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "rlframework needs Python 3.11 or newer, and PYTHON=$(PYTHON) is not:" \
		"$$($(PYTHON) --version 2>&1 | head -n 1)." \
		"Name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made $(PROJECTS)
	@echo "Installing rlframework and its packages into $(VENV): this takes a few minutes the first time."
	$(PIP) install -e . -e plugins/dtensor -e plugins/transformers -e plugins/preferences -e plugins/distillation -e plugins/report -e plugins/tools
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made $(PROJECTS) requirements-dev.txt
	@echo "Installing rlframework, its plugins and the developers' tools into $(VENV): a few minutes the first time."
	$(PIP) install -r requirements-dev.txt
	@touch $@
