"""What the benchmarks share: virtual hosts, launchers, what processes write down, figures."""
