r"""Joins the processes of a SyncGroup: MXNet's KVStore ``dist_sync`` and Horovod.

::

    kv = mx.kv.create("dist_sync")
    sbn.set_default_group(sbn.SyncGroup(store=sbn.distributed.KVStoreReducer(kv)))
    net = ...                                          # its layers share statistics with all
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {...}, kvstore=kv,
                               update_on_kvstore=False)

Every process sends its sums once per layer and pass, gets those of all, and adds them in the order
of ranks as a single process would: the results are the same, bit for bit.

No wait is without a limit. A process that waits probes all others after a tenth of the timeout.
Where one has ended or has failed, the wait ends at once with an error, and otherwise with the
timeout. Where no error can be raised, as in the Trainer's messages, the process ends.
"""

from .horovod import HorovodReducer
from .join import join
from .kvstore import KVStoreReducer
from .reducer import Reducer

__all__ = ["HorovodReducer", "KVStoreReducer", "Reducer", "join"]
