# Two commands for newcomers: `make demo` and `make test`. Everything they need goes into .venv, once.
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: demo test check
.DELETE_ON_ERROR:

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "foredraft needs Python 3.10 or newer; say which: make PYTHON=python3.12 …"; exit 1; }
	@echo "Installing into .venv: the first time takes a few minutes."
	$(PYTHON) -m venv --clear .venv
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: .venv/installed  ## generate with and without speculation on a real model
	@$(RUN) -m foredraft generate smollm2-135m --compare --color always --max-tokens 160 "$$(cat docs/demo-prompt.txt)"

test: .venv/installed  ## the whole suite, in two processes
	$(RUN) -m pytest -n 2 --dist loadfile

check: .venv/installed  ## what the project asks of every change
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest -n 2 --dist loadfile
