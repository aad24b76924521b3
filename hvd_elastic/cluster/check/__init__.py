"""What would break a run on these hosts (``checkclust``)."""
