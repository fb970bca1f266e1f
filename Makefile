# Three commands: `make demo` shows it, `make test` tests it, `make check` adds lint and types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (torch and a few small packages; minutes the first time)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt torch
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[data,dev]'
	@touch $@

test: setup
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

clean:
	rm -rf $(VENV) demo runs build dist src/*.egg-info .mypy_cache .ruff_cache .hypothesis
