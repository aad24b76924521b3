"""Check hosts for problems that would break a run (``checkclust``)."""
