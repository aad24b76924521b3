"""Searches for hyperparameters: many trials as jobs of a cluster, the good ones trained further."""
