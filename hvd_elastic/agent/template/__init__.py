"""The template of a run on a host: a process from which further workers are forked."""
