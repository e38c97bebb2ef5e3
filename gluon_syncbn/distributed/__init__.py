r"""Connects the processes of a SyncGroup through MXNet's KVStore ``dist_sync`` or Horovod.

::

    kv = mx.kv.create("dist_sync")
    sbn.set_default_group(sbn.SyncGroup(store=sbn.distributed.KVStoreReducer(kv)))
    net = ...                                          # its layers share statistics with all
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {...}, kvstore=kv,
                               update_on_kvstore=False)

For each layer and pass, every process sends its sums. It receives those of all, which it adds in
rank order as a single process would, or their exact sum. The results are the same, bit for bit.

Every wait has a limit. Each process reports to that of rank 0 where it is. If one has ended or
failed, the others end at once with an error that names it, otherwise at the timeout. Where no
error can be raised, as in the Trainer's messages, the process ends.
"""

from ._horovod import HorovodReducer
from ._kvstore import KVStoreReducer
from ._reducer import Reducer
from .join import join

__all__ = ["HorovodReducer", "KVStoreReducer", "Reducer", "join"]
