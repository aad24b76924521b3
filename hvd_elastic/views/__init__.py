"""Views of a run's records: HTML report, forecast page, terminal."""
