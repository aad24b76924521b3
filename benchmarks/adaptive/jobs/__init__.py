"""The jobs of the adaptive benchmark: what each rank runs."""
