"""Nets and symbols as they are built: their blocks, and graphs that are rewritten."""
