"""How the examples of a step are divided: fixed, unequal shares, adaptive; reviewed in training."""
