# megafuse: every target does its own set-up; nothing is installed outside .venv.
#
#   make demo       show the compiler at work on the RankMixer block
#   make test       lint, then the test suite
#   make test-gpu   the tests that need a GPU
#   make help       all targets and the variables that change them

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
JOBS  ?= 2

HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Without a GPU one known release of PyTorch, so that results on any two such machines agree.
TORCH ?= $(if $(HAS_GPU),torch>=2.6,torch==2.13.0)
# An index that holds CPU wheels of PyTorch, where the default index has CUDA builds only.
PIP_EXTRA_INDEX ?=
# Errors only: pip's warnings are about the machine's settings and read like failures.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
PIP_INSTALL := $(PIP) install $(if $(PIP_EXTRA_INDEX),--extra-index-url $(PIP_EXTRA_INDEX))

# The interpreter that makes the environment: PYTHON if given, else the first that has venv and is new enough.
IS_USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
CANDIDATES := $(if $(filter undefined,$(origin PYTHON)),python3 python3.12 python3.11 python3.13 python3.14,$(PYTHON))
# `make test-gpu` takes PYTHON as it is (a GPU machine whose own Python has torch), else the environment.
GPU_PYTHON := $(if $(filter undefined,$(origin PYTHON)),$(BIN)/python,$(PYTHON))
GPU_NEEDS  := $(if $(filter undefined,$(origin PYTHON)),$(STAMP))

.PHONY: help setup demo test lint format test-gpu test-versions fuzz clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22
	@echo "variables: PYTHON (interpreter), TORCH (requirement, now '$(TORCH)'), PIP_EXTRA_INDEX (CPU wheels), JOBS,"
	@echo "           ARGS (passed on to megafuse demo, megafuse fuzz and pytest)"

setup: $(STAMP) ## make the virtual environment .venv

$(STAMP): pyproject.toml
	@python=; for p in $(CANDIDATES); do \
	  if $$p -c '$(IS_USABLE)' >/dev/null 2>&1; then python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "error: found no Python 3.11 or newer with the venv module (tried: $(CANDIDATES))." >&2; \
	  echo "       Install one (and its venv package, where that is separate), or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "setup: making $(VENV) with $$($$python --version)"; $$python -m venv --clear $(VENV); fi
	@echo "setup: installing $(TORCH) (a few minutes the first time)"
	@$(PIP_INSTALL) "$(TORCH)"
	@echo "setup: installing megafuse with its test and development tools"
	@$(PIP_INSTALL) --editable ".[test,dev]"
	@touch $@
	@echo "setup: done"

demo: $(STAMP) ## the compiler at work: plan, check, measure (on a GPU) or simulate
	@$(BIN)/megafuse demo $(ARGS)

test: lint ## lint, then all tests that need no GPU
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-gpu: $(GPU_NEEDS) ## the tests that need a GPU; PYTHON=python3 uses that Python without an environment
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu $(ARGS)

test-versions: $(STAMP) ## the CPU tests under the releases that pyproject.toml names, into docs/compatibility.md
	PIP_EXTRA_INDEX="$(PIP_EXTRA_INDEX)" $(BIN)/python tools/run_versions.py --jobs $(JOBS) $(ARGS)

fuzz: $(STAMP) ## random modules, checked; ARGS="--count 2000 --seed 1 --dtype bf16"
	@$(BIN)/megafuse fuzz --jobs $(JOBS) $(ARGS)

lint: $(STAMP) ## ruff, mypy, import rules, size limits
	@failed=; run() { echo "$$*"; "$$@" || failed="$$failed, $${1##*/} $${2-}"; }; \
	run $(BIN)/ruff check .; \
	run $(BIN)/ruff format --check .; \
	run $(BIN)/mypy; \
	run $(BIN)/lint-imports --no-logo; \
	run $(BIN)/python tools/check_style.py; \
	if [ -n "$$failed" ]; then echo "lint failed in: $${failed#, }" >&2; exit 1; fi

format: $(STAMP) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) .venvs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools rank_mixer -name __pycache__ -type d -prune -exec rm -rf {} +
