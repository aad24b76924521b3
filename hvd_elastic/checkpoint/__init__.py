"""Checkpoints as files, independent of any framework: written, collected, stored and read.

The way of a byte from a rank's tensor to the place of the checkpoints:

1. ``stream`` decides which rank writes it; ``writer`` copies it while training continues, and
   writes it into a shard in the spool of the host (``shards``, whole or not there:
   ``whole_files``).
2. The worker reports the shard to its agent, and that to the leader; ``checkpoint_collector``
   fetches the shards of all hosts (``spool_collector``).
3. ``place`` puts them into the folder or to the URL, and ``manifests`` writes the manifest, with
   which the checkpoint is complete.

Files that a script saves go the same way: ``saved``, ``saved_collector``. Back to a host that
starts from a checkpoint: ``sender``, ``reader``.
"""
