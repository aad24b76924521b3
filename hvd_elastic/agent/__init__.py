"""The agent: the one resident process of a run on a host."""
