"""What python -m gluon_syncbn does."""
