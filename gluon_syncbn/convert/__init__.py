"""Makes the batch normalization of a built net synchronized, and plain again."""
