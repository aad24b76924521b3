"""Planners, which divide the examples of a step: fixed shares, unequal shares, adaptive batch."""
