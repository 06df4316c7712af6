# Each target makes its own virtual environment: Python 3.11 or newer and make are enough.
# It is the newest on the PATH that starts, as newer ones get a newer jax; PYTHON= overrides.
ifndef PYTHON
PYTHON := $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
  command -v $$p >/dev/null || continue; \
  why=$$($$p -c "import venv" 2>&1) && echo $$p && break; \
  echo "Left out $$p, which does not start: $$(echo "$$why" | tail -n 1)" >&2; done)
endif
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# `make pytest PYTEST=tests/docs MARKED=` runs what is published or exhaustive as well.
MARKED = -m "not published and not exhaustive"

.PHONY: accelerators between bench bench-gpu demo docs quick quick-gpu test test-all lint \
  types pytest printed fuzz next oldest release-check wrong

# Only the files with such tests are imported, which takes most of the time otherwise.
quick: MARKED = -q -m quick $(shell $(PYTHON) tests/index.py --quick)
quick: pytest
test: MARKED := -m "not published and not slow and not exhaustive"
test: lint types pytest
test-all: MARKED :=
test-all: lint types pytest
fuzz: export HYPOTHESIS_PROFILE = fuzz
fuzz: MARKED := -m fuzz
fuzz: pytest
	PYTHONPATH=tests $(BIN)/python -m corpus.random_programs 2000

pytest: $(VENV)/ready
	@$(BIN)/python tests/versions.py
	$(BIN)/python -m pytest -n $(WORKERS) $(MARKED) $(PYTEST)
lint: $(VENV)/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
types: $(VENV)/ready
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
# What pages and notebooks show; ONLY= has words of names, or functions of benchmarks/FUNCTIONS.md.
printed: $(VENV)/ready
	$(BIN)/python tests/printed.py $(ONLY)
docs: $(VENV)/ready
	$(BIN)/python -m sphinx -W --keep-going docs docs/_build/html
demo: $(VENV)/ready-for-demo
	$(BIN)/python examples/digits.py
bench: $(VENV)/ready
	$(BIN)/python benchmarks/suite.py $(if $(OUT),--results $(OUT) --pictures $(OUT))
# On a machine with a GPU: times a window of a decoder there, and prints the rows.
bench-gpu: GPU ?= cuda13
bench-gpu: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable ".[$(GPU)]"
	$(BIN)/python benchmarks/gpu.py $(if $(OUT),--out $(OUT))
# The quick tests there, in one process for each worker of the GPU's memory.
quick-gpu: GPU ?= cuda13
quick-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE = false
quick-gpu: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable ".[$(GPU)]"
	$(MAKE) quick
# Installs it into empty environments of this Python and of the oldest that it is for.
release-check: PYTHON_OLDEST ?= $(shell command -v python3.11 || command -v python3)
release-check: $(VENV)/ready
	$(BIN)/python release/check.py $(BIN)/python $(PYTHON_OLDEST) $(if $(TAG),--tag $(TAG))
# With the lowest version of each that pyproject.toml allows. `make test` tests contracts.
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable . "jax==0.10.0" \
	  "jaxlib==0.10.0" "optax==0.2.6" "flax==0.12.8" "pytest>=9" pytest-xdist hypothesis
	.venv-oldest/bin/python -m pytest -n $(WORKERS) -W default -k "not contract" \
	  tests/root/test_accumulator.py tests/root/test_data.py tests/across tests/calls/test_refused.py
	.venv-oldest/bin/python -m pytest -n $(WORKERS) -W default -m quick \
	  -W "error:The gradient is computed of all rows" \
	  tests/calls/test_law.py tests/calls/test_law_told.py tests/calls/test_microbatch.py tests/partition/test_rowwise.py
# With the jax between the oldest and the newest, which needs Python 3.12 or newer: here a
# rule that fails, and rows that are computed whole for it, are errors as everywhere.
between:
	$(MAKE) VENV=.venv-between .venv-between/ready
	.venv-between/bin/python -m pip install --quiet --upgrade "jax==0.11.*" "jaxlib==0.11.*"
	$(MAKE) VENV=.venv-between quick
	$(MAKE) VENV=.venv-between pytest MARKED="-q -k right_with_its_rule" \
	  PYTEST=tests/partition/test_table.py
# The newest pre-release of jax that the package index has.
next:
	$(MAKE) VENV=.venv-next .venv-next/ready
	.venv-next/bin/python -m pip install --quiet --upgrade --pre jax jaxlib optax
	.venv-next/bin/python tests/versions.py
	.venv-next/bin/python -m pytest -n $(WORKERS) -W default -m "not published and not exhaustive"
# The compilers of GPUs and TPUs, for machines that have neither: 1.7 GB of packages.
accelerators:
	@$(PYTHON) -m venv .venv-accelerators; \
	if .venv-accelerators/bin/python -m pip install --quiet --upgrade pip && \
	  .venv-accelerators/bin/python -m pip install --quiet --editable . --group accelerators; \
	then .venv-accelerators/bin/python -m pytest tests/accelerators; \
	else echo "Skipped: no compilers of accelerators for $$($(PYTHON) --version) on this" \
	  "machine. They need Linux, Python 3.12 or newer (PYTHON=python3.13) and a network."; fi

# What a version of XLA compiles wrongly, and our fence: JAX= names the version.
wrong: JAX ?= 0.11.2
wrong:
	$(PYTHON) -m venv .venv-wrong-$(JAX)
	.venv-wrong-$(JAX)/bin/python -m pip install --quiet --editable . "jax[tpu]==$(JAX)" \
	  "jax-cuda12-plugin==$(JAX)" "pytest>=9" hypothesis
	.venv-wrong-$(JAX)/bin/python -m pytest tests/accelerators/test_wrong_versions.py

# The demo needs fewer packages than the tests, so a fresh clone shows it sooner.
$(VENV)/ready-for-demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group demo
	touch $@

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@ $@-for-demo
