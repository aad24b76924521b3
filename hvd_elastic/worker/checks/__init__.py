"""Checks that ranks train alike: their data, their parameters, and which examples they read."""
