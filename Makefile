# Every target sets itself up from a bare Python >= 3.11.  VENV=FOLDER moves the virtual environment;
# PYTHON=python3.14 VENV=.venv-3.14 runs a target with another version.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
# Test processes: one more than cores, since they wait for other processes half of the time.
TEST_PROCESSES ?= 3

# If it were set, each of some hundred test processes would recompile its modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test tests test-long lint docs format clean check-python

install: $(VENV)/.installed

# With all development tools.  `make demo` installs only what the program itself needs.
$(VENV)/.installed: pyproject.toml constraints.txt tools/install.sh | check-python
	tools/install.sh $(PYTHON) $(VENV) dev
	@touch $@ $(VENV)/.runs

$(VENV)/.runs: pyproject.toml constraints.txt tools/install.sh | check-python
	tools/install.sh $(PYTHON) $(VENV) train
	@touch $@

check-python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v.major}.{v.minor} is too old: 3.11 or newer is required; run make PYTHON=/path/to/python3.11")'

# Writes a synthetic scroll, trains on it, shows where everything is.  DEMO_ARGS adds overrides.
demo: $(VENV)/.runs
	$(BIN)/vesuvius demo $(DEMO_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/config_table.py --check docs/config.md
	@$(MAKE) --no-print-directory docs

# The documentation as a site, build/site/index.html; a broken link or anchor fails it (not with --quiet, which hides warnings from --strict).
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Lint runs in parallel with the tests.
test: install
	@$(MAKE) --no-print-directory -j 2 lint tests

tests: install
	$(BIN)/pytest -q -m "not long" -n $(TEST_PROCESSES) --dist worksteal

# The full counts, benchmarks and rehearsals: minutes to hours.
test-long: install
	$(BIN)/pytest -m "long or hypothesis" --hypothesis-profile=full

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
