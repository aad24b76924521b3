"""Messages between leader, agents and workers, and their lines of JSON."""
