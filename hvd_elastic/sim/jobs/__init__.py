"""Simulations of many jobs on a cluster that they share."""
