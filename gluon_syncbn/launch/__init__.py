"""python -m gluon_syncbn.launch: the processes of a distributed training."""
