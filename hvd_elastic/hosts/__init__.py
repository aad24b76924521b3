"""Hosts of a run: hostfiles, ssh connections, one task on many hosts."""
