# The two commands that matter: `make demo` and `make test`. Everything happens inside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `deepspeed` and `ninja` are looked up on PATH by the tools that start them.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: install constraints lock pypi-readme demo test fast-tests test-lowest test-all test-exhaustive site check format clean FORCE

# The exact versions of constraints.txt, those last tested. With LATEST=1 pip chooses instead: it
# keeps what is in .venv already (an older torch, say) and takes the newest of what is missing.
install: $(VENV)/.installed

INSTALL_OPTIONS := $(if $(LATEST),,-c constraints.txt)
NO_PYTHON := error: $(PYTHON) not found; install Python 3.11 or newer, or: make PYTHON=/path/to/python3
OLD_PYTHON := error: Python 3.11 or newer is needed; try: make PYTHON=python3.12 install
NO_VENV := error: cannot create $(VENV); on Debian and Ubuntu: apt-get install python3-venv

$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard vitscale/images/*/*.[ch]) \
		$(if $(LATEST),FORCE)
	@command -v $(PYTHON) >/dev/null || { echo "$(NO_PYTHON)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; print("Python:", sys.executable, sys.version.split()[0])'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(OLD_PYTHON)" >&2; exit 2; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| $(PYTHON) -m venv --clear $(VENV) || { echo "$(NO_VENV)" >&2; exit 2; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off \
		$(INSTALL_OPTIONS) -e '.[dev,docs]'
	@touch $@

# Renew constraints.txt from .venv, once all tests have passed there with newer versions:
#   rm -rf .venv; make install LATEST=1; make test; make test-all; make constraints
# It renews requirements.lock too.
# CUDA's libraries are left out: each build of torch pins its own.
constraints:
	@$(BIN)/python -m pip list --disable-pip-version-check --format=freeze --exclude-editable \
		--exclude pip > $(VENV)/.versions
	@{ echo "# The exact versions last tested, with $$($(BIN)/python --version) on Linux."; \
	   echo "# Written by: make constraints. Used by: make install; not by: make install LATEST=1."; \
	   sed -E 's/[+].*//; /^(nvidia|cuda)-/d; /^triton=/d' $(VENV)/.versions; } > constraints.txt
	@echo "constraints.txt: $$(grep -vc '^#' constraints.txt) versions"
	@$(MAKE) --no-print-directory lock

# What `pip install vitscale` needs, in the versions of constraints.txt, with the hashes of all files:
#   pip install --require-hashes -r requirements.lock
lock:
	$(BIN)/uv pip compile pyproject.toml --constraints constraints.txt --universal \
		--python-version 3.11 --generate-hashes --no-annotate --quiet \
		--custom-compile-command "make lock" --output-file requirements.lock

# The links of README.md as its page on PyPI needs them; the Wheels workflow runs this before a build:
#   make pypi-readme URL=https://github.com/OWNER/NAME/blob/vVERSION
pypi-readme:
	sed -Ei -e 's#!\[([^]]*)\]\(([^:)]+)\)#![\1]($(URL)/\2?raw=true)#g' \
		-e 's#\[([^]]*)\]\(([^:)]+)\)#[\1]($(URL)/\2)#g' README.md

FORCE:

# An own corpus, one sub-folder per class: make demo DATA=/path/to/folder
# With the report in the browser at the end: make demo OPEN=1
demo: install
	$(BIN)/python launch/demo.py $(if $(DATA),--data '$(DATA)') $(if $(OPEN),--open)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Most tests start processes and wait for them, so four files run at a time; one with WORKERS=0.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# VITSCALE_REQUIRE_ALL=1 makes tests fail that would be skipped because the machine lacks something.
test: install
	@$(MAKE) --no-print-directory --jobs 2 check fast-tests

fast-tests: install
	$(PYTEST) -m "not slow and not exhaustive"

# The slow ones only.
test-all: install
	$(PYTEST) -m "slow and not exhaustive"

# Storms of faults and every pair of layouts: by hand, before a release.
test-exhaustive: install
	$(PYTEST) -m exhaustive

# The fast tests with the lowest versions that pyproject.toml allows, in a venv of their own. Without
# the golden trainings: torch's truncated normal, which draws their weights, differs by version.
test-lowest:
	$(PYTHON) -m venv --clear .venv-lowest && .venv-lowest/bin/pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python \
		--resolution lowest-direct -e '.[dev]'
	PATH="$(CURDIR)/.venv-lowest/bin:$$PATH" .venv-lowest/bin/python -m pytest -n $(WORKERS) \
		--dist loadfile --no-loadscope-reorder -m "not slow and not exhaustive" \
		--deselect tests/scripts/training/test_golden_curves.py \
		--deselect tests/scripts/training/test_golden_tracking.py

# The documentation in site/. A warning, such as a link or an anchor that leads nowhere, is an error.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
