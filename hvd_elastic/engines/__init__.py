"""Engines own the machines of a run: Slurm, Spark, Ray; `dial_in`: hosts that dial in."""
