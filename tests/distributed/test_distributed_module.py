"""Modules in several processes."""

import distributed_module
import numpy as np
from distributed_cluster import needs_horovod


@needs_horovod
def test_with_horovod_it_is_one_module_with_the_whole_batch(horovod):
    x, y = distributed_module.batches()
    sgd = distributed_module.sgd()
    expected = distributed_module.train(distributed_module.symbol(), x, y, sgd, None)
    for found in horovod.arrays("module"):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_kvstore_with_a_reducer_takes_no_names(shared):
    for kind, text, _ in shared.reported("module"):
        assert kind == "ValueError" and "A Module in several processes needs Horovod" in text
