"""Jobs of the adaptive benchmark, which run on each rank."""
