# make run        train a small model on real text, generate from its cache, verify it, time it (about 4 minutes, install included)
# make test       the tests                       make test-long   the full product (SAMPLE=40: that many of its tests)
# make test-gpu   the engine's and the kernels' tests on a GPU (each is skipped, with the reason, where torch finds none)
# make check      format, lint, types, imports    make install     what make test needs
# make test-unit  the tests without a model or a subprocess   make docs   the documentation as a site, in site/
# make test-lower-bounds   a model trained and used with the lowest versions of the dependencies, in a separate environment
# make clients   lm-eval and litellm in a separate environment, for their tests in make test
# make replicas  Ray (400 MB) into the environment, and the tests of two replicas on this machine
# make peers      the environment of the engines that kvad is compared with   make bench   measure all of them, by turns, for hours;
#                 started again, it continues   make bench-docs   docs/explanation/decoding-speed-results.md from what was measured
# make oracle     compute the reference outputs of transformers 4.57.6 and 5.x again (tests/hf_parity)
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
PEERS ?= .venv-peers
CLIENTS ?= .venv-clients
BENCH_ARGS ?=
BENCH_OUT ?= dev/results/peers.jsonl

TORCH := torch==2.13.0
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# A stamp in the environment marks a finished installation; its name has a checksum of pyproject.toml, constraints.txt and
# the sources of the CPU kernels, so a change installs again. The test set includes the run set, so `make run` accepts either.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt kvad/ops/native/*.cpp kvad/ops/native/*.h; } | cksum | cut -d' ' -f1)
TEST_STAMP := $(VENV)/.kvad-test-$(KEY)
RUN_STAMP := $(firstword $(wildcard $(TEST_STAMP)) $(VENV)/.kvad-run-$(KEY))
CLIENTS_STAMP := $(CLIENTS)/.kvad-$(shell cksum < tests/server/clients/requirements.txt | cut -d' ' -f1)

.PHONY: run test test-gpu test-unit test-long test-lower-bounds oracle clients replicas peers bench bench-docs check docs install
.DELETE_ON_ERROR:

run: $(RUN_STAMP)
	$(VENV)/bin/kvad demo $(DEMO_ARGS)

test: $(TEST_STAMP) clients
	KVAD_CLIENTS=$(CLIENTS) $(PY) -m pytest -n $(JOBS) --maxprocesses 8 $(TEST_ARGS)

# Integers, files, texts and formulas: nothing that trains or serves a model, and no subprocess. Under two minutes.
UNIT_TESTS := tests/config tests/datasets tests/storage tests/cache/manager tests/cache/sizing tests/cache/test_policy.py \
	$(addprefix tests/engine/,scheduling/test_scheduler.py scheduling/test_swap_costs.py execution/test_philox.py test_options.py) \
	tests/ops tests/train/config tests/train/sources tests/train/optim tests/test_import_rules.py tests/test_model_input.py \
	tests/test_mutations.py tests/test_prose.py

test-unit: $(TEST_STAMP)
	$(PY) -m pytest -n $(JOBS) --maxprocesses 8 $(UNIT_TESTS) $(TEST_ARGS)

test-long: $(TEST_STAMP)
	$(PY) -m pytest -n $(JOBS) --maxprocesses 8 -m long -o faulthandler_timeout=7200 $(if $(SAMPLE),--sample $(SAMPLE)) $(TEST_ARGS)

test-lower-bounds:
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) scripts/lower_bounds

# Both versions of transformers, each in a separate environment, compute the reference outputs again (equal up to
# rounding if nothing changed), and load what kvad trains and exports. So do the libraries that write quantized files, and
# llama.cpp, which is compiled once (15 minutes on one core).
oracle: $(TEST_STAMP)
	VENV=$(VENV) tests/hf_parity/environments.sh $(ORACLES)
	for version in 4.57 5; do $(ORACLES)/$$version/bin/python -m tests.hf_parity.make --out $(ORACLES)/goldens || exit 1; done
	$(PY) -m tests.hf_parity.compare
	$(PY) -m tests.hf_parity.compare --new $(ORACLES)/goldens
	for version in 4.57 5; do $(ORACLES)/$$version/bin/python -m tests.hf_parity.steps || exit 1; done
	VENV=$(VENV) tests/file_parity/environments.sh $(ORACLES)
	$(ORACLES)/quantizers/bin/python tests/file_parity/make_quantized.py $(ORACLES)/quantized.safetensors
	rm -rf $(ORACLES)/gguf && mkdir $(ORACLES)/gguf && $(PY) -m tests.file_parity.export_gguf $(ORACLES)/gguf
	$(ORACLES)/llama-cpp/bin/python tests/file_parity/make_llama_cpp.py $(ORACLES)/gguf $(ORACLES)/llama_cpp.npz
	$(PY) -m tests.file_parity.compare $(ORACLES)
	$(PY) -m pytest -n $(JOBS) tests/hf_parity tests/checkpoint tests/model $(TEST_ARGS)

# 760 MB, because lm-eval needs pandas, pyarrow and scipy; its huggingface_hub is not the one of transformers 4.57.
# Where they cannot be installed, their tests are skipped.
clients:
	@test -e $(CLIENTS_STAMP) || { echo "installing lm-eval and litellm into $(CLIENTS)"; $(PYTHON) -m venv $(CLIENTS) && \
		$(CLIENTS)/bin/python -m pip install -q --no-compile --disable-pip-version-check --no-deps -r tests/server/clients/requirements.txt && \
		touch $(CLIENTS_STAMP); } || echo "no lm-eval, no litellm: tests/server/clients skips their tests"

# Ray is no part of `make install`, because of its size. Where it is installed, `make test` runs these tests too.
replicas: $(TEST_STAMP)
	$(PY) -c 'import ray.serve' 2>/dev/null || $(PIP) install -q -c constraints.txt 'ray[serve]'
	$(PY) -m pytest tests/server/test_routing.py -rs $(TEST_ARGS)

# llama.cpp is compiled for this processor: 5 to 15 minutes, once.
peers: $(TEST_STAMP)
	VENV=$(VENV) benchmarks/peers/environment.sh $(PEERS)

bench: $(TEST_STAMP)
	PEERS=$(PEERS) $(PY) -m benchmarks.peers run --out $(BENCH_OUT) $(BENCH_ARGS)

bench-docs: $(TEST_STAMP)
	$(PY) -m benchmarks.peers docs $(BENCH_OUT)

test-gpu: $(TEST_STAMP)
	$(PY) -m pytest -m gpu -rs tests/engine/test_devices.py tests/engine/execution/test_gpu_kernels.py tests/ops/test_triton.py $(TEST_ARGS)

docs: $(TEST_STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

check: $(TEST_STAMP)
	VENV=$(VENV) scripts/check

install: $(TEST_STAMP)

# The page is tested in a Chromium of the system, or else in the one that playwright downloads. Without either, the tests
# in a browser are skipped.
BROWSERS := command -v chromium || command -v chromium-browser || command -v google-chrome
NO_BROWSER := no Chromium: tests/server/test_page.py skips what a user does in the page. To run it: apt-get install chromium

$(VENV)/.kvad-run-$(KEY): EXTRAS := plot,server
$(TEST_STAMP): EXTRAS := plot,dev,docs,oracle

# torch is installed first and alone: its index has no other package at the versions of constraints.txt. hatchling is
# installed too, so that the build of kvad uses pinned packages.
$(VENV)/.kvad-%-$(KEY): $(VENV)/bin/activate
	@echo "installing torch, then kvad and its other dependencies, into $(VENV)"
	$(PIP) install --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install -q -c constraints.txt hatchling editables
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@if test $* = test; then { $(BROWSERS) || $(PY) -m playwright install chromium; } >/dev/null 2>&1 || echo "$(NO_BROWSER)"; fi
	@rm -f $(VENV)/.kvad-$*-*
	@touch $@

$(VENV)/bin/activate:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvad needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make run PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
