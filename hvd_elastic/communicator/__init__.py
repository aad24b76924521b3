"""The ring of Horovod: its life cycle and its collectives, for every frontend."""
