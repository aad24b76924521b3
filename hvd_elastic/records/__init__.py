"""The records of a run: events, run folder, audit, summary, TensorBoard files."""
