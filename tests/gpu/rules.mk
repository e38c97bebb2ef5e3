# How the CUDA kernels run without a GPU: as PTX on a simulator (ptxsim), alone or in an MXNet for
# GPUs with simulated GPUs (simgpu). The Makefile, which includes this file, has the help.
.PHONY: simgpu run-ptx compare-gpu-counts

# The simulator is taken from the tree of this file, so that it can run the sources of another tree:
# make -C OTHER -f THIS/Makefile gpu-counts.
simulator_sources := $(dir $(lastword $(MAKEFILE_LIST)))ptxsim
simulated := $(build)/ptxsim
PTX_ARCH ?= 90
simulator := $(patsubst $(simulator_sources)/%.cc,$(simulated)/%.o,$(filter-out %/print_counts.cc %/test_ptxsim.cc,$(wildcard $(simulator_sources)/*.cc)))
# MXNet for GPUs, unpacked, with simulated GPUs.
simgpu_sources := tests/gpu/simgpu
simgpu := build/simgpu
known_architectures := $(if $(nvcc),$(patsubst compute_%,%,$(shell $(nvcc) --list-gpu-arch)))
oldest := $(firstword $(known_architectures))
newest := $(lastword $(known_architectures))
cuda_sources := $(wildcard src/operator/*/*.cu)
ptx = $(cuda_sources:src/operator/cuda/%.cu=build/native/ptx/%_$(1).o)

# Uses a copy of the package with its own library and its own MXNet. .venv and gluon_syncbn/ stay as
# they are. The second run plays what gpu-check does on a real GPU: see cards.cc.
test-gpu: $(if $(nvcc),$(environment) $(ready)test)
	$(call on_simulated_gpus,libgluon_syncbn,PTXSIM_DEVICES=8,$(addprefix gpu/test_,mxnet_gpu.py simulated_gpus.py use_of_cuda.py))
	$(call on_simulated_gpus,libcards,PTXSIM_DEVICES=1 SIMGPU_CONTEXTS=8 SIMGPU_LIBRARY="$$PWD/gluon_syncbn/libgluon_syncbn.so",gpu/test_simulated_gpus.py,-k "not trains")

test-gpu-all: test-gpu
	$(call on_simulated_gpus,libgluon_syncbn,PTXSIM_DEVICES=8 GLUON_SYNCBN_TEST_DEVICES=gpu,$(gpu_tests),-n 3 -m "not long")

gpu_tests = layers convert deploy training gpu/test_users_programs.py
# ARGS may select tests of one run alone, and pytest ends with 5 where it selects none.
# A test that hangs in MXNet ends the run, with the stacks of all threads.
# Streams do their work in a random order, different in each run. STREAMS= makes them do it at once,
# and STREAMS=late as late as possible.
STREAMS ?= $(shell date +1%N)
define on_simulated_gpus
	@$(if $(nvcc),,echo "No nvcc is found (NVCC, CUDA_HOME, PATH), so nothing is tested on simulated GPUs."; exit 0;) \
	mkdir -p build; $(fetch_mxnet) || { \
	    echo "$(mxnet) cannot be downloaded (build/mxnet.log), so nothing is tested on simulated GPUs."; exit 0; }; \
	$(build_native:@%=%) simgpu && rm -rf $(addprefix $(simgpu)/,$(packages)) && \
	tar -c --exclude='*.so' --exclude=__pycache__ $(packages) | tar -x -C $(simgpu) && \
	cp $(simgpu)/$(1).so $(simgpu)/gluon_syncbn/libgluon_syncbn.so && cd $(simgpu) && echo "STREAMS=$(STREAMS)" && \
	export $(2) PTXSIM_STREAMS=$(STREAMS) MXNET_USE_FUSION=0 PYTHONPATH="$$PWD" && \
	$(abspath $(python)) -m pytest -q --capture=sys -p no:cacheprovider -o timeout_method=thread $(4) $(addprefix $(CURDIR)/tests/,$(3)) $(ARGS) $(if $(ARGS),|| [ $$? = 5 ])
endef

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

gpu-counts:
	$(if $(nvcc),,$(error No nvcc is found (NVCC, CUDA_HOME, PATH), and the counts are those of its code))
	$(build_native) $(simulated)/print_counts_$(PTX_ARCH)
	@$(or $(PYTHON),python3) $(simulator_sources)/counts.py $(simulated)/print_counts_$(PTX_ARCH) $(nvcc) $(PTX_ARCH) $(ARGS)

compare-gpu-counts: $(simulated)/print_counts_$(PTX_ARCH)
	@$(or $(PYTHON),python3) $(simulator_sources)/counts.py $< $(nvcc) $(PTX_ARCH) --quiet

mxnet := mxnet-cu112==1.9.1
mxnet_wheel = "$(HOROVOD_CACHE)"/mxnet_cu112-1.9.1-*.whl
fetch_mxnet = { ls $(mxnet_wheel) >/dev/null 2>&1 || { echo "Downloading $(mxnet), once"; \
    $(pip) download --no-deps --dest "$(HOROVOD_CACHE)" $(mxnet) >build/mxnet.log 2>&1; }; }
$(simgpu)/mxnet/libmxnet.so:
	@echo "Unpacking $(mxnet)"
	@rm -rf $(simgpu)
	@$(python) -m zipfile -e $(mxnet_wheel) $(simgpu)

simgpu: $(simgpu)/mxnet/libmxnet.so $(objects) $(build)/api/layers.o $(call ptx,$(newest)) $(simulator)
	@echo "Putting simulated GPUs into MXNet"
	@$(python) $(simgpu_sources)/install.py $(simgpu) --layer $(filter-out $(simulator),$(filter %.o,$^)) --simulator $(simulator)

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
link_simulated = @$(compile) $(filter %.cc %.o,$^) -o $@ -ldl
$(foreach arch,$(sort $(oldest) $(newest) $(PTX_ARCH)),$(eval $(call compile_ptx,$(arch))))

.SECONDARY: $(simulated)/test_cuda_kernels.o $(simulated)/test_cuda_passes.o
$(simulated)/test_cuda_%.o: tests/native/cuda/test_cuda_%.cc $(native_headers)
	@mkdir -p $(@D)
	@echo "Compiling $< for the simulator"
	@$(compile) -I$(simulator_sources) -c $< -o $@

$(simulated)/test_ptxsim: $(simulator_sources)/test_ptxsim.cc $(simulator)
	$(link_simulated) -std=c++20

