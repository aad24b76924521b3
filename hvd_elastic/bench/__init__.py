"""Measurements of ``hvd-elastic bench``, the scripts that they run, and the demo."""
