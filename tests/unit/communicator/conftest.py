"""Rendezvous stores for real ranks."""

from tests.unit.real_ranks import stores

__all__ = ["stores"]
