"""The loop of a worker: its steps, generations, progress, rollback and batch plan; no framework."""
