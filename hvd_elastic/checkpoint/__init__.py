"""Checkpoints as files, without any framework: shards, manifests, places, collection."""
