"""Hosts of a run: hostfiles, ssh connections, and one task on many hosts."""
