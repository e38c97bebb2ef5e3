"""The launcher: python -m gluon_syncbn.launch.

It starts the processes of any MXNet program, and imports neither MXNet nor gluon_syncbn. In
reading order: ``__main__`` reads the command line, ``processes`` starts and watches processes,
``cluster`` lets launchers of several machines agree, ``runner`` is what each process runs,
``patience`` measures waits.
"""
