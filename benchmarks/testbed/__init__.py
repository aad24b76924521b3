"""Modules that the benchmarks share: virtual hosts, launchers, records of processes, figures."""
