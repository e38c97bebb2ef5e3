"""python -m gluon_syncbn.launch: the launcher of mxnet_launch."""
