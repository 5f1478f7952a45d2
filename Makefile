# `make demo` and `make test` work in a fresh clone: they create a virtual environment (.venv), install the package into
# it, and run. `make help` lists the other targets.
#
#   PYTHON=python3.13    use another interpreter; .venv is created again
#   CC=/bin/false        build as if there were no C compiler: the timer runs in its pure Python form
#   ARGS="-x -k fork"    arguments of pytest
#   DOCS_VERSION=0.1.0   the version whose documentation `make docs` builds; its source links lead to the tag v0.1.0

PYTHON ?= python3
ARGS   ?=
export DOCS_VERSION ?= dev

BIN := .venv/bin
# The names of stamp files contain a checksum of the settings, so that another PYTHON or CC has another stamp.
checksum  = $(firstword $(shell printf '%s' '$(1)' | cksum))
VENV      := .venv/made-$(call checksum,$(shell $(PYTHON) -c 'import sys; print(sys.base_prefix, sys.version)'))
INSTALLED := .venv/installed-$(call checksum,$(CC) $(CFLAGS) $(LDFLAGS))
# Most tests wait for most of their time, so that more processes than processors are faster. Those of faults and of other
# programs have time limits for programs that have a processor.
pytest = $(BIN)/python -m pytest $(or $(ARGS),-n $(1))
# The compiled files and their build settings. (Other changes need no build: the installation is editable.)
BUILT_FROM := pyproject.toml $(wildcard rpcwheel/timer/_*.py rpcwheel/timer/*.pxd)

# With bytecode, also where the environment forbids it: each worker of pytest, and each process that a test starts, would
# compile the package and rewrite the assertions again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-rest test-etcd test-pure lint format types layers workflows docs docs-links docs-serve bench changelog dist clean
.DELETE_ON_ERROR:

help:                      ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(INSTALLED)         ## server and client are killed under calls, and started again; all calls are delivered
	$(BIN)/python examples/demo.py

test: .venv/test           ## unit and contract tests: Python and loopback sockets only
	$(call pytest,6) tests/unit tests/contract

test-all: test test-rest test-pure  ## every test; starts the registry engines that are installed

test-rest: .venv/test      ## faults and interop tests
	$(call pytest,2) tests/faults tests/interop

test-etcd: .venv/test      ## the tests of etcd, with a newer etcd that is built first; needs go
	TEST_ETCD="$$(.ci/build_etcd)" && export TEST_ETCD && \
		$(call pytest,4) -k etcd tests/faults/registry tests/faults/cli

test-pure: .venv/test      ## the timer tests with the pure Python form of the timer
	RPCWHEEL_PURE=1 TEST_EXPECT=pure $(call pytest,4) \
		tests/unit/timer \
		tests/contract/test_package.py::test_the_timer_runs_in_the_requested_form

lint: .venv/dev            ## ruff: check rules and format; towncrier: the fragments in changes/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/towncrier build --draft --version next 2>&1

format: .venv/dev          ## ruff: fix rules and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/dev           ## mypy --strict
	$(BIN)/mypy

layers: .venv/test         ## import-linter: which package may import which
	$(BIN)/lint-imports --no-cache --no-logo

workflows: .venv/dev       ## zizmor and actionlint: the workflows of GitHub; actionlint needs go
	$(BIN)/zizmor --offline --quiet .
	@if PATH="$$PATH:/usr/local/go/bin" $(MAKE) --silent $(BIN)/actionlint; then $(BIN)/actionlint; \
	else echo "actionlint did not run: it needs go and its module proxy"; fi

# Warnings are errors, also references to names and headings that do not exist. Needs no network.
docs: .venv/docs           ## the documentation site, in build/docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs/$(DOCS_VERSION)
	$(BIN)/python docs/versions.py build/docs

docs-links: .venv/docs     ## check the links of the documentation to other sites; needs the network
	$(BIN)/sphinx-build --quiet -b linkcheck -d build/doctrees docs build/links

docs-serve: docs           ## the documentation site at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8000

bench: .venv/bench         ## measure timers, calls, connections, registries, journals, failback, overload and capacity; writes docs/benchmarks
	$(BIN)/python -m benchmarks.timer
	$(BIN)/python -m benchmarks.calls
	$(BIN)/python -m benchmarks.connections
	$(BIN)/python -m benchmarks.registries
	$(BIN)/python -m benchmarks.journal
	$(BIN)/python -m benchmarks.failback
	$(BIN)/python -m benchmarks.overload
	$(BIN)/python -m benchmarks.capacity

dist: .venv/dist           ## sdist and wheel of the commit, in dist/: build, check, install both, build again and compare
	$(BIN)/python .ci/dist.py

changelog: .venv/dev       ## move the fragments in changes/ into CHANGELOG.md: make changelog VERSION=1.2.3
	$(BIN)/towncrier build --yes --version '$(VERSION)'

clean:                     ## delete all generated files, .venv too
	rm -rf .venv .nox build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f rpcwheel/timer/*.so rpcwheel/timer/*.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV):
	rm -rf .venv
	$(PYTHON) -m venv .venv
	@touch $@

# Old binaries are deleted first: if the compiler fails, the installation continues, and Python would load them.
$(INSTALLED): $(VENV) $(BUILT_FROM)
	rm -rf build rpcwheel/timer/*.so .venv/installed-*
	$(BIN)/python -m pip install --quiet --editable '.[cli]' protobuf
	@$(BIN)/python -c 'from rpcwheel.timer.queue import FORM; print("installed; form of the timer:", FORM)'
	@touch $@

# rpcwheel is installed already, so pip adds only the packages of the extra.
.venv/test .venv/dev .venv/docs .venv/bench: .venv/%: $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'rpcwheel[$*]'
	@touch $@

$(BIN)/actionlint: $(VENV)
	GOBIN="$(CURDIR)/$(BIN)" GOTOOLCHAIN=local CGO_ENABLED=0 go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

.venv/dist: .ci/dist.txt $(VENV)
	$(BIN)/python -m pip install --quiet --requirement $<
	@touch $@
