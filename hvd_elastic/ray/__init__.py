"""Ray: a Ray cluster on the hosts of a hostfile, and elastic training on any Ray cluster."""
