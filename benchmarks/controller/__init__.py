"""Benchmark of the scaling controller, in virtual time and on real jobs."""
