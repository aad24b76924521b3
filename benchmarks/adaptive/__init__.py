"""Benchmark of the adaptive batch: accuracy of its estimates, and its benefit."""
