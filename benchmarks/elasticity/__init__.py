"""``hvd-elastic bench elasticity``: what joins, leaves and failures cost, ours beside peers."""
