"""Runs whose hosts are pods of Kubernetes, which come, are evicted and come back."""
