"""Run a shell command on many hosts (``runclust``)."""
