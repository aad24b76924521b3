"""Functions that a script calls, for all frontends: run, evaluate, predict, save, export, load."""
