"""The commands of python -m gluon_syncbn."""
