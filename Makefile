# The single door. `make serve` and `make test` each do everything they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MODEL ?= smollm2-135m-instruct
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help venv serve chat model test differential bench gpu bench-peers figures docs lint types clean

help: ## what each target does
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 16

# One environment, two stamps: what serving needs, then what the tests add. Reused until pyproject.toml changes.
$(VENV)/.runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); sys.exit(None if ok else "nanoserve needs Python 3.10 to 3.13, this is " + sys.version)'
	@echo 'Making the environment in $(VENV), once: some minutes and a few GB, most of it PyTorch.'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PY) -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PY) -m pip install --disable-pip-version-check -e '.[docs]'
	touch $@

venv: $(VENV)/.dev ## make the environment (.venv), once

model: $(VENV)/.runtime ## fetch and install the default model, once
	$(PY) -m serve model get $(MODEL)

serve: model ## serve the default model on 127.0.0.1:8000
	$(PY) -m serve serve --model $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

chat: model ## talk to the default model in this terminal
	$(PY) -m serve chat --model $(MODEL) $(ARGS)

test: $(VENV)/.dev model ## all tests that this machine can run, a process a core
	$(PY) -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

differential: $(VENV)/.dev model ## only fast against reference, token for token
	$(PY) -m pytest -m differential -n auto --dist loadfile $(PYTEST_ARGS)

bench: $(VENV)/.dev model ## the benchmarks, each correct first, then timed
	$(PY) -m pytest tests/bench --benchmark-enable --benchmark-only $(PYTEST_ARGS)

bench-peers: $(VENV)/.dev model ## other engines on the same model, in turn: a table (the first run installs them in .venv-peers)
	$(PY) -m tests.bench.peers $(ARGS)

gpu: ## on a machine with a card: the tests that need one, then its benches
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m tests.gpu_run $(ARGS)

figures: $(VENV)/.dev ## print the exact figures, make every block and drawing of the site anew
	$(PY) -m tests.bench.figures
	$(PY) -m tests.pages

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs ## build the site strictly, every link followed
	$(PY) -m mkdocs build --strict

lint: $(VENV)/.dev ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.dev ## mypy over the four packages
	$(PY) -m mypy

clean: ## forget the environment and every cache in this folder
	rm -rf $(VENV) *.egg-info build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
