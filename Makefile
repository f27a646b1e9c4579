# make train: four workers train the tiny model.  make test: the whole test suite.  make check: lint and types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/tiny.toml

.PHONY: train test check clean

train: $(VENV)/.installed
	$(BIN)/lordo train $(RECIPE)

test: $(VENV)/.extras
	$(BIN)/python -m pytest

check: $(VENV)/.extras
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and pinned: it is by far the largest package, and the others then take it as it is.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("lordo needs Python 3.11 or newer; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $@

# The libraries that only some commands need, and all tests.
$(VENV)/.extras: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,eval,tensorboard,wandb,lightning,torchft,dev]'
	touch $@

clean:
	rm -rf $(VENV)
