# Every target sets itself up from a bare Python >= 3.11.  VENV=FOLDER moves the virtual environment;
# PYTHON=python3.14 VENV=.venv-3.14 runs a target with another version.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
# Test processes: twice the cores of a small machine, since they wait for other processes half of the time.
TEST_PROCESSES ?= 4

# If it were set, each of some hundred test processes would recompile its modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test tests test-long wheel-test lint docs format clean check-python
.PHONY: dist demo-model release-check release-files github-release docs-publish

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

# The full counts, benchmarks and rehearsals: minutes to hours.  It continues where it was stopped; PARTS="plan runs/test_kills.py"
# chooses parts.
test-long: install
	$(BIN)/python tools/long_tests.py $(PARTS)

# The wheel of `make dist`, alone in an empty environment, outside the checkout.
wheel-test: dist
	WHEEL="$$(ls $(CURDIR)/dist/*.whl)" $(BIN)/pytest -q tests/commands/test_wheel.py

# A release (CONTRIBUTING.md); its workflow runs these targets.  TAG is the tag, such as v0.1.0.
TAG ?= v$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
RELEASE := build/release

dist: install
	rm -rf dist
	$(BIN)/python -m build

# A small trained model, its card and picture: some ten minutes on two cores.
demo-model: $(VENV)/.runs
	$(BIN)/python tools/demo_model.py $(RELEASE)

release-check:
	$(PYTHON) tools/release_notes.py "$(TAG)"

# The wheel next to the demo model, and the SHA-256 sums of all.
release-files:
	cp dist/* $(RELEASE)/
	cd $(RELEASE) && rm -f SHA256SUMS && sha256sum * > SHA256SUMS && cat SHA256SUMS

github-release:
	$(PYTHON) tools/release_notes.py "$(TAG)" > build/notes.md
	gh release create "$(TAG)" --verify-tag --title "$(TAG)" --notes-file build/notes.md $(RELEASE)/*

# The documentation as version 0.1 of the site on the branch gh-pages, next to the earlier ones; PUSH= only commits.
PUSH ?= --push
MIKE = PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 mike
docs-publish: install
	$(MIKE) deploy $(PUSH) --update-aliases "$(basename $(TAG:v%=%))" latest
	$(MIKE) set-default $(PUSH) latest

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
