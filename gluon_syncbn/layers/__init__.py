"""The layers, and the operator that they call."""
