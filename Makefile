# Every target sets up what it needs: Debian packages (as root), a virtual environment in .venv, the built extension.
# A second run repeats only the steps whose inputs changed.

PYTHON ?= python3
# Two more than the CPUs: some tests wait for services and processes.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
# The slow tests start more processes of their own.
MORE_WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# What runs in one worker, and what comes first: tests/groups.py.
DIST := --dist loadfile --no-loadscope-reorder
VENV := .venv
PY := $(VENV)/bin/python
OLD_PYICEBERG := build/pyiceberg-0.11
# Files about what PyIceberg's releases change: its API, the catalogs and FileIOs that ours derive from, scans, updates.
PYICEBERG_TESTS := tests/test_iceberg.py $(patsubst %,tests/test_iceberg_%.py,api aws code deletes encrypt hive moving \
	policy puffin reads rest sql surface updates)
# What seals and opens: each kind of block, module, page and wrapped key, and the vectors of others.
KERNEL_TESTS := $(patsubst %,tests/test_%.py,codec core_parquet kernel keys parquet parquet_interop parquet_tamper \
	parquet_view parquet_write reader vectors writer)
DOCS := build/docs
WORKFLOWS := build/workflows
SOURCES := setup.py pyproject.toml ags_fast/_core.pyx ags_fast/_agsf.pxd $(wildcard ags_fast/*.pxi) \
	ags_fast/_version.py $(wildcard csrc/*.[ch] csrc/*/*.[ch])

export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each worker, and each process that a test starts, would compile the tests and the package again.
unexport PYTHONDONTWRITEBYTECODE
# A newer compiler may print new warnings, so only CI turns warnings into errors.
ifdef CI
export AGS_FAST_WERROR := 1
endif

.NOTPARALLEL:
.PHONY: help run quick test test-more test-long test-kernel test-pyiceberg nightly coverage bench lint docs sanitize fuzz wheel wheels lock \
	clean java iceberg-java run-tools test-tools services servers more-servers

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: run-tools $(if $(wildcard $(VENV)/deps),$(VENV)/built iceberg-java,$(VENV)/tour) ## encrypt, read and decrypt real Avro and Parquet files with Spark; with your files: make run INPUT=dir OUTPUT=dir KILL=1
	PYTHONPATH=$$(.ci/iceberg-java --where pyspark-4.1) $(PY) -m benchmarks.tour $(if $(INPUT),--input '$(INPUT)') $(if $(OUTPUT),--output '$(OUTPUT)') $(if $(KILL),--kill)

quick: $(VENV)/built ## in less than a minute: linters, the tests of what has changed, some schedules of the simulator
	$(PY) -P .ci/quick.py

test: test-tools $(VENV)/built java iceberg-java services servers ## the tests, in some minutes; one file: make test ARGS=tests/test_x.py
	$(PY) -m pytest -n $(WORKERS) $(DIST) --benchmark-disable -m "not slow and not more" $(ARGS)

test-more: test-tools $(VENV)/built java iceberg-java services servers more-servers ## what takes longer: Spark clusters, kills, Java; CI runs them
	$(PY) -m pytest -n $(MORE_WORKERS) $(DIST) -m "more and not slow" $(ARGS)

test-long: test-tools $(VENV)/built java iceberg-java services servers more-servers ## the tests that take longest, which neither of the two others runs
	$(PY) -m pytest -n $(MORE_WORKERS) $(DIST) --timeout 3600 -m slow $(ARGS)

nightly: $(VENV)/built ## the long modes of everything, an hour each: simulator, long tests, fuzzers; shorter: make nightly NIGHTLY_SECONDS=20
	@.ci/tools gcc fuzzer
	.ci/nightly $(NIGHTLY_SECONDS)

test-kernel: $(VENV)/built ## the tests of bytes with the AES-GCM of our own, on any x86-64 CPU
	AGS_FAST_AES=vaes $(PY) -m pytest -n $(WORKERS) $(DIST) --benchmark-disable -m "not slow and not more" $(or $(ARGS),$(KERNEL_TESTS))

test-pyiceberg: $(VENV)/built $(OLD_PYICEBERG)/done java iceberg-java services servers ## the tests of PyIceberg's surface with the PyIceberg before the newest
	PYTHONPATH=$(CURDIR)/$(OLD_PYICEBERG) $(PY) -P -c 'import pyiceberg; assert pyiceberg.__version__.startswith("0.11."), pyiceberg'
	PYTHONPATH=$(CURDIR)/$(OLD_PYICEBERG) $(PY) -m pytest -n $(MORE_WORKERS) $(DIST) --benchmark-disable -m "not slow" $(or $(ARGS),$(PYICEBERG_TESTS))

coverage: $(VENV)/deps java iceberg-java services servers ## which lines of Python, Cython and C make test does not run; leaves build/coverage
	$(PY) -P .ci/coverage.py -n $(WORKERS) $(DIST) --benchmark-disable -m "not slow and not more" $(ARGS)

bench: $(VENV)/built java ## the benchmark: the tables of docs/benchmarks.md, and plots
	$(PY) -m benchmarks $(ARGS)

lint: $(VENV)/built $(WORKFLOWS)/done ## ruff, import-linter, mypy, stubs against the built module; clang-format, clang-tidy, C warnings as errors; workflows
	$(PY) -P -m ruff check
	$(PY) -P -m ruff format --check
	$(PY) -P $(VENV)/bin/lint-imports --no-cache
	$(PY) -P -m mypy
	$(PY) -P -m mypy.stubtest --mypy-config-file pyproject.toml --allowlist .ci/stubtest-allowlist ags_fast
	.ci/lint-c
	.ci/lint-workflows

docs: $(DOCS)/done ## the site of the documentation in build/site, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -P -m mkdocs build --strict

sanitize: $(VENV)/built ## the C test programs under ASan, UBSan, TSan and MSan, of gcc and clang; secrets' traces
	@.ci/tools gcc fuzzer valgrind
	.ci/sanitize

fuzz: $(VENV)/built ## libFuzzer on the paths that open streams and Parquet files; longer: make fuzz FUZZ_SECONDS=1800
	@.ci/tools fuzzer
	bash tests/csrc/run.sh fuzz $(FUZZ_SECONDS)

wheel: ## this machine's wheel in dist/: built from the sdist, audited, tested in an empty environment; for an older glibc: GLIBC=2.28
	@.ci/tools python cc
	GLIBC=$(GLIBC) .ci/wheel

wheels: $(WORKFLOWS)/done ## the release's wheels of this platform in dist/, by cibuildwheel; on Linux with Docker
	SOURCE_DATE_EPOCH=$(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct)) $(WORKFLOWS)/bin/cibuildwheel --archs native --output-dir dist
	$(PYTHON) .ci/dist.py dist/*.whl

lock: $(VENV)/deps ## newest versions of the development dependencies into .ci/requirements*.txt
	.ci/lock

clean: ## remove everything that make created here (the cached OpenSSL in ~/.cache/ags_fast stays)
	rm -rf $(VENV) build dist *.egg-info ags_fast/*.so .*_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# All that is missing is named, or installed, before anything is built.
run-tools:
	@.ci/tools python cc java maven

test-tools:
	@.ci/tools python cc java $(if $(CI),,--optional) maven softhsm postgresql fuse shells

java:
	@.ci/tools java

iceberg-java: $(VENV)/deps java
	@.ci/tools maven && .ci/iceberg-java $(if $(CI),,|| echo "The tests that need Iceberg's Java will be skipped.")

services:
	@.ci/tools softhsm postgresql fuse $(if $(CI),,|| echo "The tests that need it will be skipped.")

servers: $(VENV)/built
	@PYTHONPATH=tests $(PY) -m servers

more-servers: $(VENV)/built
	@.ci/tools nodejs $(if $(CI),,|| echo "The tests that need it will be skipped.")
	@PYTHONPATH=tests $(PY) -m servers fake-gcs-server azurite

# setuptools first, and then no build isolation: pyspark comes as source, and an isolated build would not be locked.
$(VENV)/deps: .ci/requirements-wheel.txt .ci/requirements.txt
	@.ci/tools python cc
	@.ci/step "Making a virtual environment in $(VENV) (half a minute)" $(PYTHON) -P -m venv --clear $(VENV)
	@.ci/step "Installing the locked packages of the fast tests (1 to 3 minutes, once)" \
		$(PY) -P -m pip install --quiet --require-hashes -r .ci/requirements-wheel.txt
	@.ci/step "Installing the other locked packages: Spark, linters (1 to 3 minutes, once)" \
		$(PY) -P -m pip install --quiet --require-hashes --no-build-isolation -r .ci/requirements.txt
	@touch $@

# pip shows nothing of a build that succeeds, such as a warning about a slow libcrypto: `ags-fast --version` repeats it.
$(VENV)/built: $(VENV)/deps $(SOURCES)
	@.ci/step "Building ags_fast (half a minute; the first build on a machine compiles OpenSSL, in 1 to 3 minutes)" \
		$(PY) -P -m pip install -qq --no-build-isolation --no-deps --editable .
	@touch $@
	@$(VENV)/bin/ags-fast --version

# A smaller environment, made while OpenSSL compiles: enough for make run. make test replaces it by the one above.
$(VENV)/tour: .ci/requirements-build.txt .ci/requirements-run.txt $(SOURCES)
	@.ci/prepare-run $(VENV)
	@touch $@
	@$(VENV)/bin/ags-fast --version

$(OLD_PYICEBERG)/done: .ci/requirements-pyiceberg-0.11.txt $(VENV)/deps
	rm -rf $(OLD_PYICEBERG)
	$(PY) -P -m pip install --quiet --require-hashes --no-deps --target $(OLD_PYICEBERG) -r $<
	@touch $@

$(WORKFLOWS)/done: .ci/requirements-workflows.txt
	@.ci/tools python
	$(PYTHON) -P -m venv --clear $(WORKFLOWS)
	$(WORKFLOWS)/bin/python -P -m pip install --quiet --require-hashes -r $<
	@touch $@

# mkdocstrings reads the sources, and imports nothing of them: the site needs no build.
$(DOCS)/done: .ci/requirements-docs.txt
	@.ci/tools python
	$(PYTHON) -P -m venv --clear $(DOCS)
	$(DOCS)/bin/python -P -m pip install --quiet --require-hashes -r $<
	@touch $@
