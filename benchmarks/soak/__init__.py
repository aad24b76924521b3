"""Random faults of every kind while a model trains."""
