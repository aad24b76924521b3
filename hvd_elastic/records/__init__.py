"""What is written of a run: events, run folder, audit, summary."""
