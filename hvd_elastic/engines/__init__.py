"""Engines own the machines of a run: Slurm, Spark, Ray; ``dial_in``: hosts that dial in.

A new one is used in one of two ways. As Slurm, around ``hvd-elastic run``: it is a ``HostSource``
and an entry of ``base``. As Spark and Ray, by a program that calls a function: that ends in
:func:`hvd_elastic.engines.dial_in.training.train`. The leader of a run sees an
:class:`hvd_elastic.hosts.connection.Engine` in both.
"""
