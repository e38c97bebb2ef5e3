"""The launcher: python -m gluon_syncbn.launch.

It starts the processes of any MXNet program, and imports neither MXNet nor gluon_syncbn. In
reading order: ``__main__`` reads the command line, ``environment`` finds which of several launchers
this is, ``processes`` starts processes and ends them, ``runner`` is what each of them runs.
"""
