"""How well a batch that adapts knows what it decides on, and what that costs."""
