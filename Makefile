# make run        train a small model on real text, generate from its cache, verify it, time it (about 8 minutes, install included)
# make test       the tests                       make test-long   the full product (SAMPLE=40: that many of its tests)
# make check      format, lint, types, house      make install     what make test needs, and nothing else
# make oracle     transformers 4.57.6 and 5.x, asked anew (tests/oracle)
#
# TORCH_INDEX=URL  where torch comes from; its CPU build on Linux is  TORCH_INDEX=https://download.pytorch.org/whl/cpu
# PYTHON=python3.12  VENV=.venv  DEMO_ARGS="--minutes 1 --out runs/mine"  TEST_ARGS="-k sampler"  JOBS=2

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
DEMO_ARGS ?=
TEST_ARGS ?=
SAMPLE ?=
JOBS ?= auto
ORACLES ?= /tmp/kvad-oracle

TORCH := torch==2.13.0
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# An install is done when a stamp with the checksum of all that decides it lies in the environment. The test set holds
# the run set, so `make run` is content with either; a changed pyproject.toml or constraints.txt installs again.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d' ' -f1)
TEST_STAMP := $(VENV)/.kvad-test-$(KEY)
RUN_STAMP := $(firstword $(wildcard $(TEST_STAMP)) $(VENV)/.kvad-run-$(KEY))

.PHONY: run test test-long oracle check install
.DELETE_ON_ERROR:

run: $(RUN_STAMP)
	$(VENV)/bin/kvad demo $(DEMO_ARGS)

test: $(TEST_STAMP)
	$(PY) -m pytest -n $(JOBS) --maxprocesses 8 $(TEST_ARGS)

test-long: $(TEST_STAMP)
	$(PY) -m pytest -n $(JOBS) --maxprocesses 8 -m long $(if $(SAMPLE),--sample $(SAMPLE)) $(TEST_ARGS)

# Both versions of transformers, each in an environment of its own, compute the goldens anew (the same but for
# rounding, if nothing changed), and read what kvad trains and exports.
oracle: $(TEST_STAMP)
	VENV=$(VENV) tests/oracle/environments.sh $(ORACLES)
	for version in 4.57 5; do $(ORACLES)/$$version/bin/python -m tests.oracle.make --out $(ORACLES)/goldens || exit 1; done
	$(PY) -m tests.oracle.compare
	$(PY) -m tests.oracle.compare --anew $(ORACLES)/goldens
	for version in 4.57 5; do $(ORACLES)/$$version/bin/python -m tests.oracle.steps || exit 1; done
	$(PY) -m pytest -n $(JOBS) tests/oracle tests/checkpoint tests/model $(TEST_ARGS)

check: $(TEST_STAMP)
	VENV=$(VENV) scripts/check

install: $(TEST_STAMP)

$(VENV)/.kvad-run-$(KEY): EXTRAS := plot
$(TEST_STAMP): EXTRAS := plot,dev,oracle

# torch comes alone and first: its index holds no other package at the versions of constraints.txt. hatchling is
# installed beside it, so that the build of kvad itself uses pinned packages too.
$(VENV)/.kvad-%-$(KEY): $(VENV)/bin/activate
	$(PIP) install --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@rm -f $(VENV)/.kvad-$*-*
	@touch $@

$(VENV)/bin/activate:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvad needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make run PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
