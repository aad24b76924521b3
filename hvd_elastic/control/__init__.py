"""Decides what a run does, as a state machine: events in, commands out; the leader acts."""
