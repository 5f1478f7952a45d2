# `make demo` and `make test` are each complete in themselves, also in a fresh clone: they make their own virtual
# environment (.venv), install the package into it, and start. `make help` lists the other verbs.
#
#   PYTHON=python3.13    another interpreter; .venv is made anew
#   CC=/bin/false        as if there were no C compiler: the wheel runs in its pure form
#   ARGS="-x -k fork"    what pytest is given

PYTHON ?= python3
ARGS   ?= -n 3

BIN := .venv/bin
# Stamps carry what they were made with, so that another PYTHON or CC is another stamp.
checksum  = $(firstword $(shell printf '%s' '$(1)' | cksum))
VENV      := .venv/made-$(call checksum,$(shell $(PYTHON) -c 'import sys; print(sys.base_prefix, sys.version)'))
INSTALLED := .venv/installed-$(call checksum,$(CC) $(CFLAGS) $(LDFLAGS))
# What is compiled, and what decides how. (All else is live: the install is editable.)
BUILT_FROM := pyproject.toml rpcwheel/__init__.py $(wildcard rpcwheel/timer/_*.py rpcwheel/timer/*.pxd)

.PHONY: help demo test test-all test-rest test-etcd test-pure lint format types walls bench clean
.DELETE_ON_ERROR:

help:                      ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(INSTALLED)         ## kill a real gRPC server under calls, and see every one of them arrive
	$(BIN)/python -m rpcwheel demo

test: .venv/test           ## unit and contract tests: Python and loopback sockets only
	$(BIN)/python -m pytest $(ARGS) tests/unit tests/contract

test-all: test test-rest test-pure  ## every test; starts the registry engines that are installed

test-rest: .venv/test      ## faults, interop and legacy tests
	$(BIN)/python -m pytest $(ARGS) tests/faults tests/interop tests/legacy

test-etcd: .venv/test      ## the tests of etcd with a newer one, which it builds; takes go
	RPCWHEEL_ETCD="$$(.ci/build_etcd)" && export RPCWHEEL_ETCD && \
		$(BIN)/python -m pytest $(ARGS) -k etcd tests/faults/registry tests/faults/cli

test-pure: .venv/test      ## the timer tests with the pure Python form of the timer
	RPCWHEEL_PURE=1 RPCWHEEL_EXPECT=pure $(BIN)/python -m pytest $(ARGS) \
		tests/unit/timer \
		tests/contract/test_package.py::test_the_timer_runs_in_the_requested_form

lint: .venv/dev            ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/dev          ## ruff: mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/dev           ## mypy --strict
	$(BIN)/mypy

walls: .venv/test          ## which room may import which
	$(BIN)/lint-imports --no-cache --no-logo

bench: .venv/bench         ## what timers, calls, connections and registries cost, into docs/benchmarks
	$(BIN)/python -m benchmarks.timer
	$(BIN)/python -m benchmarks.calls
	$(BIN)/python -m benchmarks.connections
	$(BIN)/python -m benchmarks.registries

clean:                     ## all that was made, .venv too
	rm -rf .venv .nox build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f rpcwheel/timer/*.so rpcwheel/timer/*.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV):
	rm -rf .venv
	$(PYTHON) -m venv .venv
	@touch $@

# Old binaries go first: where the compiler fails the install goes on, and they would stay in effect.
$(INSTALLED): $(VENV) $(BUILT_FROM)
	rm -rf build rpcwheel/timer/*.so .venv/installed-*
	$(BIN)/python -m pip install --quiet --editable '.[cli]'
	@$(BIN)/python -c 'from rpcwheel.timer.queue import FORM; print("installed; the wheel is", FORM)'
	@touch $@

# pip finds rpcwheel installed and adds only what the extra lists.
.venv/test .venv/dev .venv/bench: .venv/%: $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'rpcwheel[$*]'
	@touch $@
