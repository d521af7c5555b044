# Everything runs in .venv, which is made on the first call and again when the pins change.
PYTHON := .venv/bin/python
STAMP := .venv/.installed
STEPS ?=
BASE_PYTHON := $(shell command -v python3.11 || command -v python3)

.PHONY: demo test lint format golden bench sizes clean

demo: $(STAMP)
	$(PYTHON) examples/demo.py $(if $(STEPS),--steps $(STEPS))

test: $(STAMP)
	$(PYTHON) -m pytest

lint: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports

format: $(STAMP)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

golden: $(STAMP)
	$(PYTHON) -m pytest tests/golden --rewrite-golden

bench: $(STAMP)
	$(PYTHON) -m benchmarks

sizes:
	@find hyper_parallel -name '*.py' | xargs wc -l | sort -n

clean:
	rm -rf .venv build dist runs

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PYTHON) || $(BASE_PYTHON) -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
