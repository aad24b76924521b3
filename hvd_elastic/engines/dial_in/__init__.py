"""Hosts that dial in, and what they run: functions and scripts of a program."""
