"""Finds the script's line and errors, runs its debugger, and profiles its steps."""
