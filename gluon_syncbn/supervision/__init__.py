"""Which processes of a job wait, and whether that is of use."""
