PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One stamp a set of requirements: the environment is made again when they change.
STAMP := $(VENV)/.installed

# Tests are dealt out by files to as many processes as there are cores; each of them computes on one thread.
SPREAD := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow fuzz lint clean help

help:
	@echo "make demo       simulate a city, train on it, show how good it is (runs/demo)"
	@echo "make test       the tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make fuzz       broken files for ten minutes; the tally is bench/results/fuzz.json"
	@echo "make lint       ruff and mypy --strict"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("mobatlas needs Python 3.11 or later; say make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[spark,dp,dev]'
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
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs
