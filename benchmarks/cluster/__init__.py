"""Benchmark of the cluster tools beside the tools usually used instead, on virtual hosts."""
