"""Shards as ranks write them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hvd_elastic.checkpoint.manifests import CheckpointInfo, complete_checkpoint
from hvd_elastic.checkpoint.shards import ShardInfo, describe_shard
from hvd_elastic.checkpoint.stream import Content, Position, new_shard
from hvd_elastic.checkpoint.writer import CheckpointWriter
from hvd_elastic.errors import HvdElasticError
from tests.paths import LIMIT_S


class Told:
    """What writers have told."""

    def __init__(self) -> None:
        self.done: list[ShardInfo] = []
        self.errors: list[HvdElasticError] = []

    def writer(self, folder: Path) -> CheckpointWriter:
        return CheckpointWriter(
            folder,
            finish=lambda shard: describe_shard(shard, 9),
            on_done=lambda shard, _: self.done.append(shard),
            on_error=self.errors.append,
        )

    def write(
        self,
        folder: Path,
        content: Content,
        progress: Position,
        *,
        rank: int = 0,
        size: int = 1,
        lasting: Collection[int] = (),
    ) -> None:
        """Write the shard of a rank, if it has one; raise the error of a writer."""
        shard = new_shard(content, progress, rank, size)
        if shard is not None:
            writer = self.writer(folder)
            writer.start_shard(content, progress, shard, set(lasting), 0.0)
            assert writer.flush(LIMIT_S)
        for error in self.errors:
            raise error


def write_alone(folder: Path, content: Content, progress: Position) -> CheckpointInfo:
    """Write the checkpoint of one rank."""
    told = Told()
    told.write(folder, content, progress)
    return complete_checkpoint(folder, told.done, 9)
