"""A copy that the hosts fetch from a shared store themselves; ``node`` is as in ``copy.node``."""
