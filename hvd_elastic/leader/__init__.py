"""The leader of a run: carries out what the controller decides."""
