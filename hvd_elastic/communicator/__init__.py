"""Horovod's ring: its life cycle, and what ranks exchange through it, for every frontend."""
