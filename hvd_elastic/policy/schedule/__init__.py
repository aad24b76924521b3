"""Which job of a cluster should hold which slots; ``jobs/slot_plan.py`` moves them there."""
