"""The training data of a rank: the order of an epoch, and reading it, also on input hosts."""
