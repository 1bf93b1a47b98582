# Every target sets itself up from a bare Python >= 3.11.  VENV=elsewhere puts the virtual environment elsewhere;
# PYTHON=python3.13 VENV=.venv-3.13 runs a target with another version.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
# Processes that share the tests: one more than cores, since they wait for other processes half of the time.  Each
# starts a Ray of its own where its tests need one.
TEST_PROCESSES ?= 3

# With it each of some hundred test processes would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test tests test-long lint format clean check-python

install: $(VENV)/.installed

# Everything.  `make demo` makes do with what the program itself needs.
$(VENV)/.installed: pyproject.toml constraints.txt tools/install.sh | check-python
	tools/install.sh $(PYTHON) $(VENV) dev
	@touch $@ $(VENV)/.runs

$(VENV)/.runs: pyproject.toml constraints.txt tools/install.sh | check-python
	tools/install.sh $(PYTHON) $(VENV)
	@touch $@

check-python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python must be 3.11 or newer; got {v.major}.{v.minor}; run make PYTHON=/path/to/python3.11")'

# Writes a synthetic scroll, trains on it, shows where everything is.  DEMO_ARGS adds overrides.
demo: $(VENV)/.runs
	$(BIN)/vesuvius demo $(DEMO_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/config_table.py --check docs/config.md

# Lint runs beside the tests; what it finds fails them.
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
