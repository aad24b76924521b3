"""Elastic training on any Ray cluster, and a Ray cluster on the hosts of a hostfile."""
