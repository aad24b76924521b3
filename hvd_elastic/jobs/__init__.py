"""The queue of a cluster: a daemon that decides which jobs hold which slots, and its records."""
