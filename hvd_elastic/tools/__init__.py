"""Cluster tools: run commands, copy, end processes, check and install on many hosts."""
