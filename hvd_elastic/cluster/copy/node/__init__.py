"""The program of a node of a copy: standard library only, Python 3.7 or newer."""
