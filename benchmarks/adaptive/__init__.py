"""Benchmark of the adaptive batch: accuracy of its estimates, their cost, and its benefit."""
