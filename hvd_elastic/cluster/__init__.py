"""Hosts: hostfiles, ssh connections, commands on many hosts, copies, virtual clusters."""
