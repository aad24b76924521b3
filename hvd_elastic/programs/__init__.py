"""Programs for a host's own python3 (3.7 or newer): standard library and each other only."""
