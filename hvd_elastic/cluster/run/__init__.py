"""A shell command on many hosts (``runclust``)."""
