"""Programs for a host's own python3: standard library and each other only, Python 3.7 or newer."""
