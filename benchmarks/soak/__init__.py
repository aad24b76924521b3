"""Soak test: random faults of every kind while a model trains."""
