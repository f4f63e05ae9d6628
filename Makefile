# Two commands for a fresh machine: `make demo` and `make test`. Both prepare a private environment outside the
# checkout first, one progress line per step; a second run starts in seconds.

CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sgdiag
PYTHON ?= python3.11
# One environment per checkout, which it points to, and set of requirements, so that switching branches rebuilds nothing.
RECIPE := $(shell (pwd; cat pyproject.toml Makefile) | sha256sum | cut -c1-12)
VENV := $(CACHE)/venv-$(RECIPE)
BIN := $(VENV)/bin
RUN := $(BIN)/python -m

.PHONY: demo test test-all check unit covered index lab clean help

help:
	@echo "make demo       the TUI on a recording of a real server; nothing else needed"
	@echo "make test       everything CI runs: linters, types, contracts, unit, TUI and lab tests"
	@echo "make test-all   the same with the whole release matrix (an hour)"
	@echo "make check      linters, types and import contracts only"
	@echo "make unit       the tests that need no server"
	@echo "make covered    the same; fails where they run too little of the code"
	@echo "make index      the index of the playbooks, from their pages"
	@echo "make lab        build the environments of the CPU lab"
	@echo "make clean      remove the cached environments"

$(VENV)/ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "sgdiag: $(PYTHON) is not on PATH; set PYTHON=python3.x (3.10 or newer)" >&2; exit 2; }
	@echo "[1/3] making a virtual environment in $(VENV)"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	@echo "[2/3] updating pip"
	@$(RUN) pip install --quiet --disable-pip-version-check --upgrade pip 2>$(VENV)/pip.log || { tail -5 $(VENV)/pip.log >&2; exit 2; }
	@echo "[3/3] installing sgdiag and its development tools (half a minute)"
	@$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev,lab]' 2>$(VENV)/pip.log || { tail -5 $(VENV)/pip.log >&2; exit 2; }
	@touch $@

demo: $(VENV)/ready
	@$(BIN)/sgdiag demo

lab: $(VENV)/ready
	@$(BIN)/sgdiag lab build --all

check: $(VENV)/ready
	@echo "ruff";         $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "mypy";         $(BIN)/mypy --no-error-summary
	@echo "import-linter"; PYTHONPATH=. $(BIN)/lint-imports --no-cache >$(VENV)/contracts.log || { cat $(VENV)/contracts.log; exit 1; }

unit: $(VENV)/ready
	@$(RUN) pytest -q tests/unit tests/tui

# The floor is in pyproject.toml. Servers and commands run in processes of their own, which are not counted.
covered: $(VENV)/ready
	@$(RUN) pytest -q tests/unit tests/tui --cov=sgdiag --cov-report=

index: $(VENV)/ready
	@$(RUN) tests.playbook_index

test: check lab covered
	@$(RUN) pytest -q -m "not matrix" tests/integration

test-all: check lab covered
	@$(RUN) pytest -q tests/integration

clean:
	rm -rf $(CACHE)/venv-*
