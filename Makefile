# Every target makes what it needs; a second call is fast.
PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.stamp-base
DEV := .venv/.stamp-dev
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
PIP := $(BIN)/python $(PIP_INSTALL)
# What comes with Python 3.11 compares every wheel of an index with every tag: half of an installation's time.
QUICK_PIP := 'pip>=25'
# Make runs a line in which its own name stands even under -n; under this one it does not.
SUBMAKE = $(MAKE) --no-print-directory
BASE_TESTS := -m "not engine and not gpu and not bench"
ENGINE := .venv-engine
ENGINE_LOCK := requirements/engine-cpu-py311.txt
ENGINE_PYTHON ?= $(shell for p in $(PYTHON) python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
ENGINE_PIP = $(ENGINE)/bin/python $(PIP_INSTALL) $(ENGINE_PIP_ARGS)
# A file of tests stays in one process, with the engine or cluster that its tests share.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
DEMO_VARY := --vary policy.name=no_borrow,bidirl --vary workload.max_response_tokens=1024,2048,4096 --vary policy.staleness=0,0.5,1

.PHONY: demo test engine test-engine check bench bench-engine docs validation clean
.NOTPARALLEL:

demo: $(BASE) ## A sweep over response lengths and staleness: table, CSV and figures in out/demo
	@$(BIN)/bidirl-sim sweep examples/demo.toml $(DEMO_VARY) --out out/demo
	@echo "Table and figures:"; ls out/demo/*.csv out/demo/*.png | sed 's/^/  /'

test: $(DEV) ## Base tests, then the tests on a real engine where it can be installed
	@[ -e $(ENGINE)/.stamp ] || echo "Installing the engine environment meanwhile (make engine)"
	@$(SUBMAKE) engine >/dev/null 2>&1 & engine=$$!; trap 'kill $$engine 2>/dev/null' INT TERM; \
	  $(BIN)/python -m pytest -q -n 2 $(BASE_TESTS); status=$$?; \
	  [ $$status -eq 0 ] || kill $$engine 2>/dev/null; wait $$engine; exit $$status
	@$(MAKE) -s --no-print-directory engine && $(MAKE) --no-print-directory test-engine || \
	  { [ ! -e $(ENGINE)/.stamp ] && [ -z "$$CI" ] && printf '\n%s\n' \
	    "*** THE ENGINE TESTS DID NOT RUN: vLLM's CPU build is not installed (docs/engine_environment.md) ***"; }

engine: $(ENGINE)/.stamp ## The environment with torch, vLLM's CPU build and Ray (Python 3.11, 2.7 GB)

test-engine: $(ENGINE)/.stamp ## Tests on real engines, trainers and Ray
	@$(ENGINE)/bin/python -m pytest -q $(SIDE_BY_SIDE) -m "engine and not bench" tests

check: $(DEV) ## Formatting, lint, types, import layers
	@$(BIN)/ruff format --check -q --output-format concise
	@$(BIN)/ruff check -q --output-format concise
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_layering.py tests/test_imports.py

bench: $(DEV) ## Cost, as ratios and slopes
	@$(BIN)/python -m pytest -q -m bench tests
	@for script in benchmarks/*.py; do $(BIN)/python "$$script" || exit 1; done

bench-engine: $(ENGINE)/.stamp ## Long runs on real engines: 300 neutral steps, learning, predicted vs measured (an hour)
	@for name in neutral learning_run validate_runs; do $(ENGINE)/bin/python benchmarks/$$name.py || exit 1; done

docs: $(DEV) ## Links and commands of README and docs/ hold
	@$(BIN)/python -m pytest -q tests/test_docs.py

validation: $(BASE) ## docs/validation.md: measured, predicted, error and free parameters of every table
	@$(BIN)/python benchmarks/validation.py

clean: ## Remove what the targets made, .venv too
	@rm -rf .venv $(ENGINE) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1): bidirl needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@$(PIP) $(QUICK_PIP) || true

$(BASE): pyproject.toml | .venv/bin/python
	@$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml | .venv/bin/python
	@$(PIP) -e '.[dev]'
	@touch $@ $(BASE)

$(ENGINE)/.stamp: pyproject.toml $(ENGINE_LOCK)
	@[ -n "$(ENGINE_PYTHON)" ] || { echo "The engine needs Python 3.11: run make ENGINE_PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing the engine environment (torch, vLLM's CPU build, Ray: 2.7 GB, a minute or two)"
	@rm -f $@ && $(ENGINE_PYTHON) -m venv $(ENGINE)
	@$(ENGINE_PIP) $(QUICK_PIP) || true
	@$(ENGINE_PIP) --no-deps -r $(ENGINE_LOCK)
	@$(ENGINE_PIP) -c $(ENGINE_LOCK) -e '.[test]'
	@$(ENGINE)/bin/python -c "import torch, vllm, ray"
	@touch $@
