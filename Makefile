PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment is installed again when the requirements change.
STAMP := $(VENV)/.installed

# One process per core runs whole test files, each on one thread.
SPREAD := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow fuzz lint clean help

help:
	@echo "make demo       simulate a city, train on it, show how good it is (runs/demo)"
	@echo "make test       the tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make fuzz       read broken files for ten minutes; counts go to bench/results/fuzz.json"
	@echo "make lint       ruff, mypy --strict, order of imports, sizes and names"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("mobatlas needs Python 3.11 or later; run make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[spark,dp,geo,dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/mobatlas demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(SPREAD)

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD)

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds 600 --out bench/results/fuzz.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_structure.py
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs
