"""What the operator does on GPUs, without one: in a library whose CUDA is the simulator of PTX
(ptxsim), which takes CPU contexts for GPUs (make simulated-cuda). The kernels are compiled ones."""

import pytest

from test_cuda_build import needs_nvcc
from test_cuda_on_host import package_with, run_layer_tests

pytestmark = [pytest.mark.long, needs_nvcc]

TESTS = ["batch_norm", "activation", "numerics", "semantics"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptx")
    return package_with("simulated-cuda", "ptxsim/libgluon_syncbn.so", folder)


@pytest.mark.timeout(600)
def test_the_tests_of_the_layer_pass(package):
    run_layer_tests(package, TESTS)
