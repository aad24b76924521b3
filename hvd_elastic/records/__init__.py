"""The records of a run: events, run folder, audit, summary, its wording, TensorBoard files."""
