"""Training steps, and which devices take part in them."""
