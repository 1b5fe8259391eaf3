# `make demo` and `make test` need nothing but make and Python 3.11 or newer: each builds what it
# uses of the virtual environment, and does so again only when the dependencies have changed.
#
#   make demo                            the story of one hardened node, offline
#   make demo LEDGER=off                 the same without the ledger
#   make demo MODEL=openai:<name>        with a real model (or anthropic:<name>)
#   make bot                             a support bot over HTTP, see its README
#   make test ARGS="-k approval -x"      any pytest arguments

.PHONY: bot demo test suites lint slow bench conformance negative-control wheel format clean
.DELETE_ON_ERROR:

VENV ?= .venv
ARGS ?=
LEDGER ?=
MODEL ?=
REVIEWERS ?= ann=let-me-in
WORKERS ?= 2

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq -c constraints.txt
PYTEST := $(PY) -m pytest
PARALLEL := -n $(WORKERS) --dist worksteal

# The first Python that is new enough and can make a virtual environment.
FIND_PYTHON := for python in "$$PYTHON" python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && break; python=; done; \
	test -n "$$python" || { echo 'guardchart needs Python 3.11 or newer, with venv' >&2; exit 1; }

demo: $(VENV)/.stamp-demo
	@if [ -n "$(MODEL)" ]; then $(PIP) -e ".[$(firstword $(subst :, ,$(MODEL)))]"; fi
	@GUARDCHART_DEMO_LEDGER="$(LEDGER)" GUARDCHART_DEMO_MODEL="$(MODEL)" \
		$(PY) -m examples.harden_one_node $(ARGS)

bot: $(VENV)/.stamp-dev
	@BOT_REVIEWERS="$(REVIEWERS)" $(PY) -m examples.support_bot --model "$(MODEL)" $(ARGS)

test: $(VENV)/.stamp-dev suites
	$(PYTEST) $(PARALLEL) $(ARGS)

# Outside suites, fetched once and kept outside of the tree. Without them their tests are skipped.
suites: $(VENV)/.stamp-dev
	@$(PY) -m tests.conformance.scxml.fetch
	@$(PY) -m tests.conformance.differential --fetch

slow: $(VENV)/.stamp-dev
	$(PYTEST) -m slow $(ARGS)

conformance: $(VENV)/.stamp-dev
	@$(PY) -m tests.conformance.scxml.fetch --required
	$(PYTEST) tests/conformance -m "slow or not slow" $(ARGS)
	@$(PY) -m tests.conformance.differential

bench: $(VENV)/.stamp-dev
	$(PY) -m benchmarks.node $(ARGS)

lint: $(VENV)/.stamp-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.stamp-dev
	$(VENV)/bin/ruff check --fix-only
	$(VENV)/bin/ruff format

# Every test marked `gate` must fail once the gate allows everything.
negative-control: $(VENV)/.stamp-dev
	$(PY) -m tests.promises.negative_control

# The built wheel, installed into an environment of its own, with src out of reach.
wheel: $(VENV)/.stamp-dev
	$(PY) -m tests.wheel.run -n $(WORKERS) --dist worksteal $(ARGS)

$(VENV)/.stamp-venv:
	@echo 'making $(VENV)'
	@$(FIND_PYTHON); "$$python" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	@echo 'installing what the demo needs (once)'
	@$(PIP) -e '.[langgraph]' langgraph-checkpoint-sqlite
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	@echo 'installing what the tests need (once)'
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build demo-output dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
