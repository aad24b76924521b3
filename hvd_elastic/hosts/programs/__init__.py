"""Programs that run with a host's own python3: standard library only, Python 3.7 or newer."""
