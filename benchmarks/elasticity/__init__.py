"""What starts, joins, leaves and failures cost, ours beside peers."""
