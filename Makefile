# Each target makes its own virtual environment: Python 3.11 or newer and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test lint types pytest fuzz oldest

demo: $(VENV)/ready
	$(BIN)/python examples/digits.py

test: lint types pytest

lint: $(VENV)/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

pytest: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST)

fuzz: $(VENV)/ready
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n $(WORKERS) -m fuzz $(PYTEST)

oldest:
	$(MAKE) pytest VENV=.venv-oldest PINS="jax==0.8.0 jaxlib==0.8.0 optax==0.2.6 \
	  flax==0.12.0" PYTEST="-W default -k 'not contract' $(PYTEST)"

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group dev $(PINS)
	touch $@
