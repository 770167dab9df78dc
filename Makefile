# make train [ARGS="schedule=gpipe model=resnet18"]   the main job
# make test                                           every test
# make check                                          lint, format and types
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup train test check clean

$(STAMP): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check ".[dev]"
	touch $(STAMP)

setup: $(STAMP)

train: setup
	$(RUN) train.py $(ARGS)

test: setup
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV)
