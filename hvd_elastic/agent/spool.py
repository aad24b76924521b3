"""The folder on a host's disk that keeps what a run needs when its agent or its leader is gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic import config
from hvd_elastic.checkpoint.files import ShardInfo, drop_shards, find_shards
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import MessageDecoder, ProtocolError, encode

SPEC_NAME = "run.json"
_UNTOLD = "untold.jsonl"


class Spool:
    """The run's specification, checkpoints that wait for the leader, and what it was not told.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_run(cls, hello: msg.LeaderHello) -> Spool:
        """Return the spool of a run on a host; hosts may share the disk."""
        configured = hello.env.get("HVD_ELASTIC_HOME")
        home = Path(configured) if configured else config.home()
        return cls(home / "spool" / hello.run_id / hello.host)

    def keep_run(self, fields: Mapping[str, Any]) -> None:
        """Write the run's specification, in one line.

        Raises:
            OSError: the folder cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f"{SPEC_NAME}.part"
        with contextlib.suppress(OSError):  # a full disk; other hosts have it, too
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(dict(fields)) + "\n")
            partial.replace(self.path / SPEC_NAME)

    def shards(self) -> list[ShardInfo]:
        """Return the shards of checkpoints that the leader has not collected."""
        return find_shards(self.path)

    def drop_shards(self, up_to_step: int | None) -> None:
        """Remove shards that the leader has collected."""
        drop_shards(self.path, up_to_step)

    def size_bytes(self) -> int:
        """Return the size of all files, which grows while a checkpoint is written."""
        size = 0
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # renamed meanwhile
                    size += entry.stat().st_size
        return size

    def keep_untold(self, readings: Sequence[msg.Reading]) -> None:
        """Keep what was read, and no leader knows, for the next agent of the run."""
        if readings:
            with contextlib.suppress(OSError):
                (self.path / _UNTOLD).write_bytes(b"".join(map(encode, readings)))

    def take_untold(self) -> Iterator[msg.PastReading | msg.AgentWarning]:
        """Yield what an earlier agent kept, and forget it."""
        path = self.path / _UNTOLD
        readings: MessageDecoder[msg.Reading] = MessageDecoder(msg.Reading, f"the file {path}")
        with contextlib.suppress(FileNotFoundError):
            lines = path.read_bytes().splitlines()
            path.unlink()
            for line in lines:
                try:
                    yield msg.PastReading(readings.decode(line))
                except ProtocolError as error:  # torn, as by a full disk
                    yield msg.AgentWarning(str(error))

    def remove(self) -> None:
        """Remove it, unless it has what no leader has: the next one asks for that."""
        if self.shards() or (self.path / _UNTOLD).exists():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in (self.path.parent, self.path.parent.parent):
            with contextlib.suppress(OSError):  # other hosts and runs may share the disk
                folder.rmdir()
