# Everything sets itself up: `make demo` and `make test` work in a fresh clone.
# Variables: PYTHON (default python3), TORCH (a pip requirement), TEST_ARGS (passed to pytest),
# TEST_SECONDS (the most that a target's tests may take in all; each test has 5 minutes at most),
# TEST_WORKERS (processes that share the tests of `test` and `test-parity`, a file at a time; 0: none).

PYTHON ?= python3
TORCH ?= torch==2.13.0
TEST_ARGS ?=
TEST_SECONDS ?= 3600
TEST_WORKERS ?= 2

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

# Every test belongs to one of the targets test, test-parity, test-experiments, test-stress, test-gpu,
# test-architectures and test-ecosystem.
EVERYDAY := not parity_full and not experiment and not ecosystem and not gpu and not stress \
    and not architectures
# On a CPU also where there is a GPU: the same tests, with the same results, on every machine.
ON_CPU = DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
PYTEST = $(ON_CPU) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest \
    --session-timeout=$(TEST_SECONDS)
# Whole files, since tests of a file share what is expensive: ranks, runs of a launcher. They are given out
# in the order of the folders, which ends with short ones. Each worker's torch has one thread: those of
# several workers would wait for each other's cores. Tests of one GPU would be in each other's way.
# A worker that crashes ends the run, which names its test: with another in its place xdist 3.8 may wait
# for ever, as it gives out files of which no test is left.
PYTEST_BESIDE = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTEST) \
    -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: all install demo check docs keys lint format bench bench-plan test-hybrid-plans test-uneven-plans clean
.PHONY: test test-hosts test-parity test-experiments test-stress test-gpu test-fuzz test-configs
.PHONY: test-ecosystem test-dropin test-deepspeed-versions test-architectures test-aarch64 wheels
.PHONY: sanitize sanitize-memory sanitize-threads

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
	$(BIN)/python -c 'import importlib.metadata as m; m.version("deepspeed")' 2>/dev/null \
	    || DS_BUILD_OPS=0 $(BIN)/python -m pip install --no-build-isolation 'deepspeed>=0.19.7,<0.20'
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[dev,docs]'
	touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_accelerators 1 \
	    experiments/train_lm/train.py --demo

test: install sanitize
	$(PYTEST_BESIDE) -m '$(EVERYDAY)' --ignore=tests/architectures/test_all.py $(TEST_ARGS) tests

test-parity: TEST_SECONDS = 7200
test-parity: install
	$(PYTEST_BESIDE) -m 'parity_full and not gpu' $(TEST_ARGS) tests

# Whole experiments on toy models: what `python experiments/.../run.py --device cpu` does.
test-experiments: install
	$(PYTEST_BESIDE) -m 'experiment and not gpu' $(TEST_ARGS) tests

# Every architecture of transformers, tiny, on two ranks, beside torch.
test-architectures: TEST_SECONDS = 7200
test-architectures: install
	$(PYTEST) -m architectures $(TEST_ARGS) tests/architectures

# Two hosts, which are network namespaces: launchers, failures, checkpoints, slow networks (as root, with
# iproute2; by ssh where sshd and pdsh are installed).
test-hosts: install
	$(PYTEST) -m 'not gpu' $(TEST_ARGS) tests/dist/test_hosts_*.py

# A training on two ranks that is killed KILLS times (20) at random moments and resumed each time; what 512
# ranks ask of their store.
test-stress: TEST_SECONDS = 3600
test-stress: install
	$(PYTEST) -s -m stress $(TEST_ARGS) tests/dist/test_stress.py tests/unit/comm/test_comm_scale.py

# Plans of 200 random clusters held against an independent oracle (20 minutes); `test` has some of them.
test-uneven-plans: install
	$(PYTEST_BESIDE) -m experiment $(TEST_ARGS) tests/unit/planner

# The kernels and the worker, built for 64-bit Arm and run under qemu (as root, on Debian: it installs
# the cross compiler and qemu where they are missing).
test-aarch64: install
	PATH="$(CURDIR)/$(BIN):$$PATH" TEST_ARGS="$(TEST_ARGS)" tests/aarch64/run.sh $(CURDIR)/$(BIN)/python

# manylinux_2_28 wheels for x86-64 and 64-bit Arm in dist/; each is installed, imported and computes where
# there is no compiler (as root, on Debian 12 for x86-64: it installs the cross compiler, qemu and mmdebstrap
# where they are missing). VERSIONS: some Pythons only, "3.11 3.13". WHEEL_TORCH: beside which (try_wheels.sh).
wheels: install
	packaging/build_wheels.sh $(CURDIR)/$(BIN)/python

# For machines with GPUs: parity on one, training and checkpoints on two; then what `test` runs of
# engines on a CPU, with their models on a GPU.
test-gpu: TEST_SECONDS = 7200
test-gpu: ON_CPU =
test-gpu: install
	$(PYTEST) -m gpu $(TEST_ARGS) tests
	$(PYTEST_BESIDE) -m '$(EVERYDAY)' $(TEST_ARGS) tests/parity \
	    $(addprefix tests/unit/,checkpoint engine kernels layer_major model offload placement zero3)

# 2,000 changes of each file that a reader takes; then random configurations, for so long, whose
# seeds are in the log. With SEED and CASES: as many from
# there. FUZZ_ARGS: for example --gpu --ranks 2.
MINUTES ?= 10
FUZZ_ARGS ?=
FUZZ = $(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES),--minutes $(MINUTES))
test-fuzz: install
	HYTRAIN_READER_CASES=2000 $(PYTEST) --timeout=1200 tests/fuzz/test_fuzz_readers.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/fuzz/run.py $(FUZZ) $(FUZZ_ARGS)

# Pinned libraries on top of the environment, in one of their own: those of .venv stay as they are. That one
# is added as a site's folder, not as a mere path: hytrain is installed there by a .pth file of its own.
COMPAT := .venv-compat
COMPAT_STAMP := $(COMPAT)/.installed
COMPAT_RUN = PATH="$(CURDIR)/$(COMPAT)/bin:$(CURDIR)/$(BIN):$$PATH" DS_ACCELERATOR=cpu \
    OMP_NUM_THREADS=1 $(COMPAT)/bin/python

$(COMPAT_STAMP): $(STAMP) tests/ecosystem/requirements.txt
	$(BIN)/python -m venv $(COMPAT)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	    > "$$($(COMPAT)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	$(COMPAT)/bin/python -m pip install --quiet --no-deps -r tests/ecosystem/requirements.txt
	touch $@

# Trainer, accelerate, Lightning, TRL and peft beside plain DeepSpeed (docs/compatibility.md).
test-ecosystem: $(COMPAT_STAMP)
	$(COMPAT_RUN) -m pytest -m ecosystem $(TEST_ARGS) tests/ecosystem

# DeepSpeed's own unit tests, plain and with hytrain: DEEPSPEED_TESTS=<its repository>/tests, of the
# installed release. TIER: first, rest or all. DROPIN_ARGS: for example --sample 1.
DEEPSPEED_TESTS ?=
TIER ?= first
DROPIN_ARGS ?=
test-dropin: $(COMPAT_STAMP)
	$(COMPAT_RUN) tests/dropin/run.py $(DEEPSPEED_TESTS) --tier $(TIER) $(DROPIN_ARGS)

# A short suite with releases of DeepSpeed and torch, each in an environment of its own (up to 6 GB, for a
# while); the table in docs/limits.md. RELEASES: some, "deepspeed==0.19.7 torch==2.14.1".
test-deepspeed-versions: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/versions/run.py $(RELEASES)

# A few steps of a small model with each of ds_configs/, under the launcher; on a CPU if need be.
# (zero2_plan.json needs a plan of the machine's own, and DeepSpeed refuses fp16 on a CPU.)
test-configs: install
	set -e; for config in $(filter-out %zero2_plan.json \
	    $(if $(HAS_NVIDIA),,%_fp16.json),$(wildcard ds_configs/*.json)); do \
	    case $$config in *unequal_shards*|*zero3.json) ranks=2 ;; *) ranks=1 ;; esac; \
	    echo "== $$config, $$ranks ranks"; \
	    PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_accelerators $$ranks \
	        experiments/train_lm/train.py --deepspeed_config $$config --model llama-3m \
	        --seq-len 32 --micro-batch 1 --steps 6 --warmup 1 --eval-sequences 2 \
	        --out out/test_configs --overwrite; \
	done

# For everyday work, under two minutes: pyright sees the files that differ from BASE, the tests are
# those that need no ranks and little torch. CHECK_TESTS: others.
BASE ?= HEAD
CHECK_TESTS ?= tests/policy/test_structure.py tests/policy/test_imports.py \
    tests/unit/test_*.py tests/unit/placement tests/unit/model/test_layout.py \
    tests/unit/kernels/test_cpu_adam.py
CHANGED = git diff --name-only --diff-filter=d $(BASE) -- 'hytrain/*.py' && \
    git ls-files --others --exclude-standard -- 'hytrain/*.py'
check: install
	ls -d $(CHECK_TESTS) > /dev/null
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	files="$$($(CHANGED))"; test -z "$$files" || $(BIN)/pyright --pythonpath $(BIN)/python $$files
	$(PYTEST_BESIDE) -q -m '$(EVERYDAY)' $(TEST_ARGS) $(CHECK_TESTS)

# The documents as a site, with every warning an error: build/site/index.html. Where the tools are not in
# $(VENV), they get an environment of their own; torch and the extension are not needed.
# (Not with --quiet, under which mkdocs counts no warnings.)
DOCS_VENV := .venv-docs
DOCS_TOOLS := 'mkdocs>=1.6,<2' 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=0.27' pydantic ruff
docs:
	$(BIN)/python -c 'import mkdocs, material, mkdocstrings, pydantic' 2>/dev/null || test -x $(DOCS_VENV)/bin/mkdocs \
	    || { $(PYTHON) -m venv $(DOCS_VENV) && $(DOCS_VENV)/bin/python -m pip install --quiet $(DOCS_TOOLS); }
	python=$(BIN)/python; test ! -x $(DOCS_VENV)/bin/mkdocs || python=$(DOCS_VENV)/bin/python; \
	    NO_MKDOCS_2_WARNING=1 PATH="$$(dirname $$python):$$PATH" PYTHONPATH=. $$python -m mkdocs build --strict

# Types and defaults of the keys in docs/configuration.md, from the models in hytrain/config.py;
# options of the commands in docs/cli.md, from their parsers.
keys: install
	$(BIN)/python docs/generate/configuration.py
	$(BIN)/python docs/generate/commands.py

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
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/hytrain bench kernel --beside

# Search times of hybrid plans beside the published ones; PLAN_BENCH_ARGS: --big, --repeats 9, ...
PLAN_BENCH_ARGS ?=
bench-plan: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python experiments/hybrid_planning/run.py $(PLAN_BENCH_ARGS)

# The exact search of hybrid plans against brute force on 500 random problems (a minute).
test-hybrid-plans: install
	$(PYTEST_BESIDE) -m experiment $(TEST_ARGS) tests/unit/hybrid

# With every warning an error: the kernels and the worker under AddressSanitizer and
# UndefinedBehaviorSanitizer, and the worker, where threads meet, under ThreadSanitizer as well.
# HYTRAIN_STRESS_RUNS: how many random lives the worker leads in each.
sanitize: sanitize-memory sanitize-threads

sanitize-memory sanitize-threads: sanitize-%: install
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/sanitize-$* -G Ninja -DHYTRAIN_PYTHON=OFF \
	    -DHYTRAIN_TESTS=ON -DHYTRAIN_SANITIZE=$* -DHYTRAIN_STRICT=ON \
	    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/sanitize-$*
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir build/sanitize-$* --output-on-failure \
	    --timeout 120

clean:
	rm -rf $(COMPAT) $(DOCS_VENV) build dist *.egg-info hytrain/_C.*.so $(STAMP) .pytest_cache .ruff_cache .hypothesis
