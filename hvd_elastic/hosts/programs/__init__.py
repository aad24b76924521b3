"""Programs for a host's own python3: standard library only, Python 3.7 or newer, no own imports."""
