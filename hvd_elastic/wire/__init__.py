"""Messages between worker, agent and leader, and how they travel."""
