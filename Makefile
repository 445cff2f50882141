# Two commands: `make train` watches a small language model learn, `make test` runs the tests.
# Each makes what it needs first: .venv, torch, the compiled extension.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TESTS ?= fastrl tests
INTERPRETED ?= $(wildcard tests/triton/test_triton_*.py) $(addprefix tests/ops/test_,$(addsuffix .py,\
  bounds edges excluded_tokens extreme_ratios gae group_advantages logits_policy_loss policy_loss \
  token_stats)) tests/contract/test_registered_ops.py tests/fuzz/test_fuzz.py
ARGS ?=
CASES ?= 2000
SEED ?= 0
BACKEND ?= cpu

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
SOURCES := $(shell find csrc -type f 2>/dev/null)
# setup.py says what it may be; here a compilation that fails stops, where an installation goes on
FASTRL_BUILD ?= strict
BUILT := $(if $(filter none,$(FASTRL_BUILD)),without-extension,$(VENV)/.extension-built)
BUILD_LOG := $(VENV)/extension-build.log
# The Triton that each torch brings in its builds for GPUs: it is what tests and budgets run with.
# The builds for CPUs bring none.
TRITON_OF := 2.10:3.6.0 2.11:3.6.0 2.12:3.7.0 2.13:3.7.1 2.14:3.8.0 2.15:3.9.0
CONSTRAINTS := $(VENV)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train train-ppo test test-interpreted fuzz install lint format types check bench \
        bench-smoke targets gpu clean without-extension FORCE
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo "make train        a small language model learns arithmetic by GRPO (ARGS=... for options)"
	@echo "make train-ppo    the same by PPO"
	@echo "make test         the tests (TESTS=tests/ops/test_gae.py or ARGS='-k gae' for some)"
	@echo "make test-interpreted    the tests of the Triton kernels, in Triton's interpreter on the CPU"
	@echo "make fuzz         random cases against an oracle in float64 (CASES=50000 SEED=1 BACKEND=reference)"
	@echo "make install      .venv with everything for development"
	@echo "make lint format types check    ruff, clang-format, codespell, mypy; check: all and the tests"
	@echo "make bench        speed against eager torch and torch.compile (ARGS='--save' keeps it)"
	@echo "make bench-smoke  the benchmarks on tiny shapes: do they run?"
	@echo "make targets      GPU kernels compiled for every target, and what they cost (needs no GPU)"
	@echo "make gpu          on a machine with a GPU: build, its tests, benchmarks; installs nothing"
	@echo "make clean        removes what was built, and .venv's record of it"

train: $(VENV)/.installed-train $(BUILT)
	$(PY) -m fastrl.train.grpo $(ARGS)

train-ppo: $(VENV)/.installed-train $(BUILT)
	$(PY) -m fastrl.train.ppo $(ARGS)

test: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	$(PY) -m pytest --doctest-modules $(TESTS) $(ARGS)

# Triton reads TRITON_INTERPRET when it is imported, so its interpreter has a process of its own.
test-interpreted: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	TRITON_INTERPRET=1 $(PY) -m pytest -q -m interpreted $(INTERPRETED) $(ARGS)

# FASTRL_CPU_CAPABILITY=avx2 or plain, and TRITON_INTERPRET=1 with BACKEND=triton, choose the kernels.
fuzz: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	$(PY) -m tests.fuzz --cases $(CASES) --seed $(SEED) --backend $(BACKEND) $(ARGS)

install: $(VENV)/.installed-dev $(BUILT)

lint: $(VENV)/.installed-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' | xargs -r $(VENV)/bin/clang-format --dry-run --Werror
	git ls-files | xargs $(VENV)/bin/codespell

format: $(VENV)/.installed-lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' | xargs -r $(VENV)/bin/clang-format -i

types: $(VENV)/.installed-lint $(VENV)/.installed-train
	$(PY) -m mypy

check: lint types bench-smoke test-interpreted test

bench: $(VENV)/.installed-bench $(BUILT)
	$(PY) bench/compare.py $(ARGS)
	$(PY) bench/memory.py

bench-smoke: $(VENV)/.installed-bench $(BUILT)
	$(PY) bench/compare.py --smoke
	$(PY) bench/gpu.py --smoke
	$(PY) -m pytest bench --benchmark-disable -q --shapes=smoke

targets: $(VENV)/.installed-triton
	$(PY) bench/targets.py $(ARGS)

# Such a machine may have no network: the Python that has torch for CUDA is used as it is. It needs
# pytest, setuptools and ninja; GPU_MINUTES is what the benchmarks may take.
GPU_PYTHON ?= $(PYTHON)
GPU_MINUTES ?= 4.5
GPU_TESTS := env PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu --confcutdir=tests/gpu -q tests/gpu

gpu:
	FASTRL_BUILD=$(FASTRL_BUILD) $(GPU_PYTHON) setup.py build_ext --inplace
	@failed=0; \
	$(GPU_TESTS) || failed=1; \
	if command -v compute-sanitizer > /dev/null; then \
	  timeout 90 compute-sanitizer --error-exitcode 1 $(GPU_TESTS) -k "cuda and two_runs" || failed=1; \
	fi; \
	PYTHONPATH=. $(GPU_PYTHON) bench/gpu.py --minutes $(GPU_MINUTES) $(ARGS) || failed=1; \
	exit $$failed

clean:
	rm -rf build dist *.egg-info fastrl/_C*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.installed-* $(VENV)/.extension-built
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --- what the targets above need; each stamp is made once, and again when what it depends on changes

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "fastrl needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Choose another: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv"; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# another TORCH installs anew
$(VENV)/.torch-asked: FORCE | $(PY)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# What is installed later must not bring another torch: a pin of Triton once did, and unseen.
$(VENV)/.installed-torch: $(VENV)/.torch-asked | $(PY)
	@echo "installing $(TORCH) (once; this can take minutes)"
	$(PIP) install 'setuptools>=77' wheel ninja packaging $(TORCH)
	@$(PY) -c "from importlib.metadata import version; torch = version('torch'); \
	  pairs = (pair.split(':') for pair in '$(TRITON_OF)'.split()); \
	  print('torch==' + torch, *('triton==' + own for of, own in pairs if torch.startswith(of + '.')), sep='\n')" \
	  > $(CONSTRAINTS)
	@touch $@

# The package itself is installed in place; building the extension is the next rule's business.
$(VENV)/.installed-%: pyproject.toml setup.py $(VENV)/.installed-torch
	FASTRL_BUILD=none $(PIP) install --no-build-isolation -c $(CONSTRAINTS) -e '.[$*]'
	@touch $@

$(VENV)/.extension-built: setup.py $(SOURCES) $(VENV)/.installed-torch
	@echo "compiling csrc/ (about a minute; the compiler's words are in $(BUILD_LOG))"
	@PATH="$(abspath $(VENV))/bin:$$PATH" FASTRL_BUILD=$(FASTRL_BUILD) \
	  $(PY) setup.py build_ext --inplace > $(BUILD_LOG) 2>&1 || { \
	  grep -A 12 -i 'error' $(BUILD_LOG) || tail -40 $(BUILD_LOG); \
	  echo "csrc/ could not be compiled; make FASTRL_BUILD=none ... goes without the extension"; \
	  exit 1; }
	@grep '^fastrl:' $(BUILD_LOG) || true
	@if ls fastrl/_C*.so > /dev/null 2>&1; then touch $@; fi  # without a compiler: try again next time

without-extension:
	rm -f fastrl/_C*.so $(VENV)/.extension-built
