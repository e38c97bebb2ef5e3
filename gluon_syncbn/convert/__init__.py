"""Makes the batch normalization of an existing net synchronized, or stock again."""
