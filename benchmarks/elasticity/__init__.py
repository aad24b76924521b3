"""Benchmark of starts, joins, leaves and failures, ours beside peers."""
