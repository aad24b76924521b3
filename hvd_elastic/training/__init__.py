"""What the frontends share: the worker, its steps, its plan of the batch; no framework."""
