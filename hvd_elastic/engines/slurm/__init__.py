"""Runs whose hosts come from Slurm: an allocation, and further ones that join it."""
