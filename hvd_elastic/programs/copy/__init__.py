"""Program of a copy that runs on each host: standard library only, Python 3.7 or newer."""
