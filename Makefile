# The two commands: `make demo` and `make test`. Both make their own environment in .venv the first time.

PYTHON ?= python3
VLLM ?= 0.32.0
VENV := $(if $(filter 0.32.0,$(VLLM)),.venv,.venv-$(VLLM))
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-quick test-live test-schedules test-gpu check docs clean

install:
	@$(PYTHON) scripts/environment.py --vllm $(VLLM) --into $(VENV)

# EXIT=1: stop everything afterwards and prove that nothing is left.
demo: install
	@$(BIN)/xinference quickstart $(if $(EXIT),--exit)

# All layers that need no GPU.
test: install
	@$(BIN)/python -m pytest $(ARGS)

# Seconds: no process, no model.
test-quick: install
	@$(BIN)/python -m pytest -m pure $(ARGS)

# Real vLLM on the CPU; `make test-live VLLM=0.27.1` runs the same suite on another version.
test-live: install
	@$(BIN)/python -m pytest -m live $(ARGS)

# On a machine with a CUDA device, with the environment that vLLM runs in there: GPU_PYTHON names its interpreter.
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	@$(GPU_PYTHON) -m pytest -m gpu $(ARGS)

# vLLM's real schedulers under random schedules, and every scenario of theirs; other versions as above.
COUNT ?= 20000
test-schedules: install
	@$(BIN)/python -m pytest xinference/model/llm/vllm/xavier/test/cpu -k "test_schedule or vllm_scheduler" $(ARGS)
	@$(BIN)/python -m xinference.model.llm.vllm.xavier.test.schedules --count $(COUNT)

check: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: install
	@$(BIN)/python -m sphinx -E -n -W --keep-going -b html doc/source doc/build/html

clean:
	rm -rf .venv .venv-* build doc/build .pytest_cache .ruff_cache .mypy_cache .hypothesis
