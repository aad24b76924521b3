"""Reading of the training data: its times, and hosts that read for the ranks."""
