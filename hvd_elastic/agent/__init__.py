"""The agent: the one resident process of a run on each host."""
