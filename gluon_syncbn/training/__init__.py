"""Steps of a training: who takes part in them."""
