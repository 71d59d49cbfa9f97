# Everything sets itself up: `make demo` and `make test` work in a fresh clone.
# Variables: PYTHON (default python3), TORCH (a pip requirement), TEST_ARGS (passed to pytest).

PYTHON ?= python3
TORCH ?= torch==2.13.0
TEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.hytrain-installed
BUILD_INPUTS := setup.py pyproject.toml CMakeLists.txt \
    $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.inl csrc/include/hytrain/*.h)
CXX_FILES := $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.inl csrc/include/hytrain/*.h)

HAS_NVIDIA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
# DeepSpeed looks for an accelerator when it is imported; where there is none it must be told so.
ifneq ($(HAS_NVIDIA),yes)
export DS_ACCELERATOR := cpu
# The wheels without CUDA lie on an index of their own; where it cannot be reached, any torch does.
TORCH_CPU_INDEX := --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 15
endif

.PHONY: all install demo test test-parity lint format bench sanitize clean

all: install sanitize

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Torch and the build tools come first: DeepSpeed's setup imports torch, ours runs cmake; neither
# is isolated, so that one torch and no compiler cache of DeepSpeed's is involved.
$(STAMP): $(BIN)/python $(BUILD_INPUTS)
	$(BIN)/python -c 'import torch' 2>/dev/null \
	    || $(if $(TORCH_CPU_INDEX),$(BIN)/python -m pip install $(TORCH_CPU_INDEX) '$(TORCH)' ||) \
	       $(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install --quiet 'setuptools>=70' wheel 'cmake>=3.24' ninja 'pybind11>=2.12'
	$(BIN)/python -c 'import deepspeed.version' 2>/dev/null \
	    || DS_BUILD_OPS=0 $(BIN)/python -m pip install --no-build-isolation 'deepspeed>=0.19,<0.20'
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[dev]'
	touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_accelerators 1 \
	    experiments/train_lm/train.py --demo

test: install sanitize
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(TEST_ARGS) \
	    $(wildcard tests/unit tests/parity tests/dist tests/contract tests/policy)

test-parity: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m parity_full $(TEST_ARGS) tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/hytrain bench kernel

# The kernels and the worker under AddressSanitizer and UndefinedBehaviorSanitizer, with every
# warning an error; and the worker, where threads meet, has its tests in the same place.
sanitize: install
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/sanitize -G Ninja -DHYTRAIN_PYTHON=OFF \
	    -DHYTRAIN_TESTS=ON -DHYTRAIN_SANITIZE=ON -DHYTRAIN_STRICT=ON \
	    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/sanitize
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir build/sanitize --output-on-failure --timeout 120

clean:
	rm -rf build dist *.egg-info hytrain/_C.*.so $(STAMP) .pytest_cache .ruff_cache .hypothesis
