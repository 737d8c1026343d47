# Everything sets itself up: on a fresh machine with Python ≥ 3.11 and make, `make up` and `make test` work.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
SEEDS  ?= 20
# A test may run on any worker, three for each core (tests/conftest.py). The one that has nothing left to do
# takes over.
PARALLEL := -n auto --dist worksteal
# Tests flush their ledgers a hundred thousand times. They run in memory where there is enough of it: a sixth of
# the processor time. `make proof` runs on the disk.
IN_MEMORY := $(shell [ -z "$$TMPDIR" ] && [ "$$(df -Pk /dev/shm 2> /dev/null | awk 'END { print $$4 }')" -gt 4000000 ] 2> /dev/null && echo TMPDIR=/dev/shm)
# What only computes runs beside the tests, and takes what they leave of the processors while they wait for
# servers, disks and timers.
BESIDE := nice -n 19
# Without bytecode each worker compiles all tests, and each program all of duly: a third of the time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("duly needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.user: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.user
	$(PIP) install -c constraints.txt -e '.[all,dev]'
	@! command -v npm > /dev/null || npm install --silent --no-save --prefix $(VENV)/npm @asyncapi/specs@6.11.1 || echo "one test will miss @asyncapi/specs"
	@touch $@

$(VENV)/.bench: $(VENV)/.user
	$(PIP) install -c constraints.txt -e '.[all,bench]'
	@touch $@

setup: $(VENV)/.user ## make a working .venv/bin/duly

up: setup ## run a hub
	$(BIN)/duly up

servers: ## on Debian as root: install the servers the tests need
	@bash tools/install-servers

test: $(VENV)/.dev servers ## lint, types, import rules, simulation and all tests, but what 'make proof' is for
	@$(MAKE) --no-print-directory -j3 tests types simulate

check: lint types ## lint, types, import rules

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev
	$(BESIDE) $(BIN)/mypy

tests: lint compile
	$(IN_MEMORY) $(BIN)/pytest $(PARALLEL)

compile: $(VENV)/.dev # the tests, once: otherwise all workers begin with it at the same time
	@said=$$($(BIN)/pytest --collect-only -qq -p no:xdist) || { echo "$$said"; false; }
	@! command -v go > /dev/null || $(BIN)/python -m tests.go_programs

simulate: $(VENV)/.dev ## the simulation, SEEDS of each world
	$(BESIDE) $(BIN)/duly sim --seeds $(SEEDS)

proof: $(VENV)/.dev servers ## what is long by nature, counted: all seeds, kills, power losses (SHORT=1: minutes, not hours)
	$(BIN)/python -m proof $(if $(SHORT),--short,--record) $(PROOF)

chaos: export DULY_TEST_FORK := 0
chaos: $(VENV)/.dev servers ## 10,000 tasks between two nodes, while everything is cut, repeated and killed
	DULY_CHAOS=10000 $(BIN)/pytest -s -m proof tests/end_to_end/test_chaos.py

bench: $(VENV)/.bench ## measure, beside what people use instead
	@bash tools/install-servers bench
	$(BIN)/python -m bench $(BENCH)

scale: $(VENV)/.bench ## what a million devices need, by costs that are measured here (SCALE='--devices 50000')
	@bash tools/install-servers bench
	$(BIN)/python -m bench.scale $(SCALE)

clean: ## remove what was made
	rm -rf $(VENV) bench/out proof/out .hypothesis .mypy_cache .ruff_cache

.PHONY: help setup up servers test check lint types tests compile simulate proof chaos bench scale clean

$(VENV)/.docs: $(VENV)/.user
	$(PIP) install -c constraints.txt -e '.[all,docs]'
	@touch $@

# Not with --quiet: it hides the warnings from --strict as well, and they are no errors any more.
docs: $(VENV)/.docs ## build the site of the documents, into site/; warnings are errors
	$(BIN)/python tools/map
	$(BIN)/python tools/reference
	$(BIN)/python tools/js
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Tracing makes everything several times slower; the limit of a single test allows for that. The simulation is
# no part of it: on Python 3.11 a traced `asyncio.timeout` ends in a CancelledError that nothing catches.
coverage: $(VENV)/.dev ## which branches of core/ its tests take
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -p no:xdist -o timeout=600 --hypothesis-profile=ci tests/core tests/runtime tests/wire tests/test_docs.py::test_examples_in_docstrings_hold
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

.PHONY: docs coverage
