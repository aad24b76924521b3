"""Connections to the agents of all hosts, and what is sent over them and received."""
