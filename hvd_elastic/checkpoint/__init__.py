"""Checkpoints as files, independent of any framework: written, collected, stored and read."""
