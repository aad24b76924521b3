"""The queue of a cluster under measurement: a cluster with its daemon, and jobs that share it."""
