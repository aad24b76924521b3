"""Benchmarks of hvd_elastic, beside its peers and under faults; see README.md here."""
