"""The launcher: python -m gluon_syncbn.launch.

It starts the processes of any program of MXNet, and imports neither MXNet nor gluon_syncbn itself.
In this order: ``__main__`` reads the command line, ``processes`` starts and watches, ``cluster`` is
what launchers of several machines agree on, ``runner`` is what each process runs.
"""
