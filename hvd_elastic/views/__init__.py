"""What is shown of a run's records: report, terminal, pages."""
