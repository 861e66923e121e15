# `make help` explains. Each target sets up .venv first, which takes no time when there is nothing to do.
PYTHON ?= python3
ALG ?= ippo
ENV_ID ?=
ARGS ?=
TEST_GROUPS = dev oracles atari mujoco box2d multiagent video eval tune export docs
TESTS ?= tests
export VENV ?= .venv
RUN = $(VENV)/bin/python
# Blocks of tests, so that fixtures are made once; a worker that is done takes from another's. One thread for each, and
# one worker more than there are cores: a fifth of the time a test only waits for a process.
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n $$($(RUN) -c 'import os; print(1 + os.cpu_count())') --dist worksteal

.PHONY: help train test test-all lint format docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-8s %s\n", $$1, $$2}'
	@echo
	@echo "make train ALG=ppo ENV_ID=CartPole-v1 ARGS='--seed 2'    any script, environment and flags"
	@echo "make test TESTS=tests/test_ppo.py                          some of the tests"
	@echo "PYTHON=python3.12         the Python that .venv is made from (3.11 to 3.13)"
	@echo "TORCH_INDEX=URL           the package index torch comes from: https://download.pytorch.org/whl/cpu where"
	@echo "                          there is no GPU (saves gigabytes), .../whl/cu128 for a certain CUDA; default: pip's"

train:  ## train ippo.py on simple_spread for about a minute, or ALG on ENV_ID
	@$(PYTHON) bootstrap.py
	@$(RUN) cleanmarl/$(ALG).py $(if $(ENV_ID),--env-id $(ENV_ID)) $(if $(ALG:ippo=)$(ENV_ID)$(ARGS),,--total-timesteps 300000) $(ARGS)

test:  ## run the tests on all cores; at its end stands what was skipped and what would enable it
	@$(PYTHON) bootstrap.py $(TEST_GROUPS)
	@$(PYTEST) $(TESTS)

test-all:  ## the same with Ray, SMAX and what SMAClite needs
	@$(PYTHON) bootstrap.py $(TEST_GROUPS) ray smax smaclite
	@$(PYTEST) $(TESTS)

lint:  ## check style and types, as CI does
	@$(PYTHON) bootstrap.py dev
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

format:  ## apply the style
	@$(PYTHON) bootstrap.py dev
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

docs:  ## build docs/_build/html
	@$(PYTHON) bootstrap.py docs
	@$(RUN) -m sphinx -W --keep-going -q docs docs/_build/html
	@echo "open docs/_build/html/index.html"

clean:  ## remove .venv and what was built
	rm -rf $(VENV) docs/_build docs/_generated
