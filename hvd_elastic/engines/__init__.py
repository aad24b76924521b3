"""Engines own the machines of a run: Slurm, Spark, Ray; `dialled`: hosts that dial in."""
