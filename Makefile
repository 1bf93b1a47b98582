# Every target sets itself up from a bare Python >= 3.11.  VENV=elsewhere puts the virtual environment elsewhere.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
# Processes that share the tests.  Each starts a Ray of its own where its tests need one.
TEST_PROCESSES ?= 2

.PHONY: install demo test test-long lint format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python must be 3.11 or newer; got {v.major}.{v.minor}; run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --quiet --editable '.[dev]'
	@touch $@

# Writes a synthetic scroll, trains on it, shows where everything is.  DEMO_ARGS adds overrides.
demo: install
	test -d volumes/demo.zarr || $(BIN)/vesuvius volume synth volumes/demo.zarr --shape 128,256,256 --seed 0
	rm -rf runs/demo
	$(BIN)/python -m vesuvius.train --config configs/demo.yaml $(DEMO_ARGS)
	@echo
	@echo "log         runs/demo/logs/train_full.log"
	@echo "metrics     runs/demo/metrics.jsonl"
	@echo "checkpoint  $$(ls -d runs/demo/checkpoints/step_* | tail -n 1)"
	@echo "picture     $$(ls runs/demo/samples/*.png | tail -n 1)"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/config_table.py --check README.md

test: lint
	$(BIN)/pytest -m "not long" -n $(TEST_PROCESSES) --dist worksteal

# The full counts: minutes to hours.
test-long: install
	$(BIN)/pytest -m long

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
