# The two commands that matter: `make demo` and `make test`. Everything happens inside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `deepspeed` and `ninja` are looked up on PATH by the tools that start them.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: install demo test test-all test-exhaustive check format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(wildcard vitscale/images/jpeg/*.[ch])
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or newer, or: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; print("Python:", sys.executable, sys.version.split()[0], flush=True); sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed; try: make PYTHON=python3.12 install" >&2; exit 2; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
		|| { echo "error: cannot create $(VENV); on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off -e '.[demo,dev]'
	@touch $@

# An own corpus, one sub-folder per class: make demo DATA=/path/to/folder
demo: install
	$(BIN)/python launch/demo.py $(if $(DATA),--data '$(DATA)')

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# VITSCALE_REQUIRE_SLURM=1 makes tests that need SLURM fail where they would otherwise be skipped.
test: check
	$(BIN)/python -m pytest -m "not slow and not exhaustive"

# The slow ones only.
test-all: install
	$(BIN)/python -m pytest -m "slow and not exhaustive"

# Every fault, mutant and pair of layouts: by hand, before a release.
test-exhaustive: install
	$(BIN)/python -m pytest -m exhaustive

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
