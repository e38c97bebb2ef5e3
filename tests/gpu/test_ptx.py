"""What the operator does on GPUs, without one: in a library whose CUDA is the simulator of PTX
(ptxsim), which takes CPU contexts for GPUs (make simulated-cuda). The kernels are compiled ones."""

import pytest

from test_cuda_build import needs_nvcc
from test_cuda_on_host import OF_CPUS, package_with, run

pytestmark = [pytest.mark.long, needs_nvcc]

TESTS = ["batch_norm", "activation", "numerics", "semantics"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptx")
    return package_with("simulated-cuda", "ptxsim/libgluon_syncbn.so", folder)


@pytest.mark.timeout(600)
def test_the_tests_of_the_layer_pass(package):
    tests = [f"tests/layers/test_{name}.py" for name in TESTS]
    chosen = " and ".join(f"not ({each})" for each in OF_CPUS)
    assert " passed" in run(package, "-m", "pytest", "-q", "-x", "-k", chosen, *tests)


@pytest.mark.timeout(600)
def test_the_tests_of_gpu_check_inside_mxnet_pass(package):
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_mxnet_gpu.py")
    done = run(package, *command, GPUS_FOR_TESTS="cpu(0) cpu(1)", PTXSIM_SEED="1")
    assert " passed" in done and "skipped" not in done
