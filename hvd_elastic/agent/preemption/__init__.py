"""Notices that a host will be preempted, seen on the host itself.

There are three kinds: SIGTERM to the agent, the metadata service of a cloud, and a command of the
user for other sources. A metadata service answers each machine only for itself, and the leader may
not be in the cloud at all, so the agent of every host asks.
"""
