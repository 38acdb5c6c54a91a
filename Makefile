# Two doors: `make serve` and `make test`. Both build .venv first; nothing else is needed but Python 3.11 or 3.12.

PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
PY := .venv/bin/python
INSTALLED := .venv/installed

.PHONY: help serve test check venv
.DEFAULT_GOAL := help

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' Makefile

serve: venv  ## start the server on http://127.0.0.1:8000 with the small checkpoint that ships
	$(PY) -m dsparkd --config conf/dev.toml

test: venv  ## run the tests that need no GPU
	$(PY) -m pytest -m "not gpu and not gpu2"

check: venv  ## lint, types, import rules, documents against code
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo
	$(PY) -m pytest tests/docs

venv: $(INSTALLED)  ## build .venv and install everything into it

# Generated C begins with an underscore.
C_SOURCES := $(foreach d,kernels native,$(filter-out dsparkd/$(d)/_%,$(wildcard dsparkd/$(d)/*.[ch] dsparkd/$(d)/*build.py)))

$(INSTALLED): pyproject.toml setup.py $(C_SOURCES)
	@test -n "$(PYTHON)" || { echo "dsparkd needs Python 3.11 or 3.12 (make PYTHON=/path/to/python)" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	@# torch first and alone: its wheel decides between CPU and CUDA, and pip must not choose another one later.
	$(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install --quiet --editable '.[test]'
	touch $@
