# Every target prepares its own environment first (scripts/setup_env.py): the first time minutes, then a second.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
# Tensor-parallel tests keep both cores busy themselves, and crawl beside others: they run last, alone.
BOTH_CORES := tests/engine/test_tensor_parallel.py
# Two files at a time, as engine tests keep one core busy each; one where engines would share a GPU.
TEST_WORKERS ?= $(shell $(PY) vllm_vidspec/devices.py && echo 0 || echo 2)
TWO_AT_A_TIME = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# A Python that is there before any environment.
SYSTEM_PYTHON = python=$$(command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3) || \
  { echo "[setup] error: no Python found; install python3.11" >&2; exit 1; }; $$python
# The null GPU's environment; arguments are run by its Python.
CUDA_HOST = $(SYSTEM_PYTHON) scripts/setup_cuda_host.py
# Every case runs on the oldest supported vLLM, some on each; what ours rely on is looked up in each one's sources.
CUDA_HOST_TESTS = tests/null_gpu tests/unit/engine/test_contract.py tests/unit/engine/test_vllm_contracts.py

# The clone that make runs in is the one that is tested, even if another clone re-points the shared environment meanwhile.
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels$(if $(PYTHONPATH),:$(PYTHONPATH))
# One thread per process: unpinned OpenMP threads on shared cores are up to ten times slower.
export OMP_NUM_THREADS ?= 1
# Nothing here needs the network once it is installed.
export HF_HUB_OFFLINE ?= 1
export TRANSFORMERS_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYTHONUNBUFFERED ?= 1

.PHONY: help setup demo test test-slow setup-cuda-host test-cuda-host contracts check format docs bench bench-gpu soak doctor gpu-smoke clean distclean

help: ## Show this list.
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## Prepare the environment only (CPU or CUDA vLLM, as the machine has it).
	@$(SYSTEM_PYTHON) scripts/setup_env.py

demo: setup ## Serve the bundled pair with and without vidspec, caption the bundled video, print one table.
	@$(PY) -m vllm_vidspec.cli demo $(DEMO_ARGS)

test: setup ## Run every test but the slow ones (PYTEST_ARGS="-m 'not serve'" for others).
ifdef PYTEST_ARGS
	@$(PY) -m pytest --durations=10 $(TWO_AT_A_TIME) $(PYTEST_ARGS)
else
	@$(PY) -m pytest --durations=10 $(TWO_AT_A_TIME) -m "not slow" --ignore $(BOTH_CORES)
	@$(PY) -m pytest --durations=3 -m "not slow" $(BOTH_CORES)
endif

test-slow: setup ## Run the slow tests: killed servers, a soak, faults, costly variants of what `make test` runs.
	@$(PY) -m pytest --durations=10 -m slow --ignore tests/null_gpu
	@$(CUDA_HOST) --vllm 0.32 -m pytest -m slow tests/null_gpu

setup-cuda-host: ## Prepare the environments of test-cuda-host only, one for each supported vLLM.
	@$(CUDA_HOST)

test-cuda-host: ## Run the host side of the CUDA path on a null GPU (own environments; no GPU needed).
	@$(CUDA_HOST) --vllm 0.32 -m pytest --durations=5 -m "not slow" tests/null_gpu $(PYTEST_ARGS)
	@$(CUDA_HOST) --vllm 0.33 -m pytest --durations=5 $(CUDA_HOST_TESTS) $(PYTEST_ARGS)

contracts: ## Say what no longer fits another vLLM's sources (VLLM=path/to/vllm).
	@$(CUDA_HOST) --vllm 0.33 scripts/contracts.py $(VLLM)

check: setup ## Check format, lint, types and who imports whom.
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/unit/test_imports.py -k "room or circle"

format: setup ## Format, and fix what lint can fix itself.
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

docs: ## Build these pages as a site, strictly, in runs/site (DOCS_ARGS="serve" to read it while you write).
	@$(SYSTEM_PYTHON) scripts/docs_site.py $(DOCS_ARGS)

bench: setup ## Measure acceptance on the bundled pairs (BENCH_ARGS="--prune-ratio 0.5,0.9" for other rows).
	@$(PY) -m vllm_vidspec.cli bench acceptance $(BENCH_ARGS)

bench-gpu: setup ## Kernels and engines of real shapes on a GPU, 25 minutes at most (BENCH_GPU_ARGS="--half 1" or 2 for one half).
	@$(PY) -m benchmarks.gpu $(BENCH_GPU_ARGS)

soak: setup ## Minutes of mixed traffic to two servers, every answer compared (SOAK_ARGS="--minutes 2 --json soak.json").
	@$(PY) -m benchmarks.soak $(SOAK_ARGS)

doctor: setup ## Check the environment and say what to do about each problem.
	@$(PY) -m vllm_vidspec.cli doctor

gpu-smoke: setup ## The first minutes on a GPU, 26 at most: what runs, what agrees, what it takes (SMOKE_ARGS="--only kernels").
	@$(PY) -m benchmarks.gpu --smoke $(SMOKE_ARGS)

clean: ## Remove caches and build products from the clone.
	@rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Also remove the prepared environments.
	@$(SYSTEM_PYTHON) scripts/setup_env.py --remove
	@$(CUDA_HOST) --remove
