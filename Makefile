# `make demo` shows it, `make test` tests it, `make check` adds lint and types; `make test-ci` has what takes longer,
# `make test-all` everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo browser test test-ci test-gpu test-all docs check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt src/paceline/tensors/_passes.c src/paceline/runtime/live/messaging/_checksum.c
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (torch, ray, trainers and small packages; minutes the first time)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt torch
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[data,dev,page,ray,tensorboard,lightning,transformers,accelerate]'
	@touch $@

# The same policies twice: in virtual time, then in real processes on this machine.
demo: setup
	@mkdir -p demo
	$(BIN)/paceline compare bsp ssp:staleness=3 backup:extra=1 asp --workload digits-mlp \
	    --cluster random-slowdown:factor=6 --workers 8 --servers 2 --target accuracy=0.95 --seed 0 \
	    --json demo/virtual.json --report demo/virtual.html --chrome demo/virtual.trace.json
	$(BIN)/paceline compare bsp ssp:staleness=3 backup:extra=1 asp --workload digits-mlp --live \
	    --cluster random-slowdown:factor=6,compute_s=0.02 --workers 4 --servers 2 --target accuracy=0.85 --seed 0 \
	    --json demo/live.json --report demo/live.html
	@echo
	@echo "reports: $(CURDIR)/demo/virtual.html and $(CURDIR)/demo/live.html"
	@echo "next:    $(BIN)/paceline run --workers 3 --servers 2 --policy ssp:staleness=3 examples/digits.py"

# Two at a time; whoever has none left takes tests of the other. One thread each: threads that wait for each other on taken cores spin.
test: setup
	$(BIN)/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Tests in a browser need Chromium; without it, and where it cannot be installed, they are skipped.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; } || \
	echo "no chromium here: tests in a browser will be skipped"

# What takes longer and rarely breaks.
test-ci: setup browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "ci and not long"

# What needs a GPU; skipped, with the reason, where there is none. The interpreter may be another one, with its own torch:
# make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	OMP_NUM_THREADS=1 PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu -rs -n 8 --ignore=tests/gpu/test_kills.py tests/gpu tests/live/test_gpu.py
	OMP_NUM_THREADS=1 PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu -rs tests/gpu/test_kills.py

# With those that take minutes: faults over several hosts, each policy over three, nodes lost under Ray and torchrun.
test-all: test test-ci
	$(BIN)/python -m pytest -n 1 -m long

# The documentation as a site, in site/; a link that leads nowhere is an error.
docs: setup
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --quiet --strict

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

clean:
	rm -rf $(VENV) site demo runs build dist src/*.egg-info .mypy_cache .ruff_cache .hypothesis
