# Everything runs in .venv, which is made on the first call and again when the pins change.
PYTHON := .venv/bin/python
STAMP := .venv/.installed
STEPS ?=
# A pyenv shim may exist without its version behind it, so each candidate is asked.
CANDIDATES := python3.11 python3 $(wildcard $(HOME)/.pyenv/versions/3.11*/bin/python)
IS_RECENT := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: demo test lint format golden bench sizes clean

demo: $(STAMP)
	@$(PYTHON) examples/demo.py $(if $(STEPS),--steps $(STEPS))

test: $(STAMP)
	@$(PYTHON) -m pytest tests

lint: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports

format: $(STAMP)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

golden: $(STAMP)
	@$(PYTHON) -m pytest tests/golden --rewrite-golden

bench: $(STAMP)
	@$(PYTHON) -m benchmarks

sizes:
	@find hyper_parallel -name '*.py' | xargs wc -l | sort -n

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PYTHON) || for python in $(CANDIDATES); do \
	    "$$python" -c '$(IS_RECENT)' 2>/dev/null && echo "making .venv with $$python" && "$$python" -m venv .venv && break; \
	done || { echo "Python 3.11 or later is needed; tried: $(CANDIDATES)" >&2; exit 1; }
	@echo "installing the pinned packages into .venv (minutes the first time)"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
