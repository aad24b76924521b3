"""Rules that choose, from measurements: the slots of a run, its batch, and slots among jobs."""
