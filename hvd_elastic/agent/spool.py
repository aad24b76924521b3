"""A folder on a host's disk with what a run needs if its agent or leader dies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic import config
from hvd_elastic.checkpoint.saved import SAVED_FOLDER, drop_spooled, find_spooled
from hvd_elastic.checkpoint.shards import ShardInfo, drop_shards, find_shards
from hvd_elastic.own_files import private_folder
from hvd_elastic.programs.clear_left import remove as remove_path
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import MessageDecoder, ProtocolError, encode

SENT_CHECKPOINT = "restore-"
"""Begin of the name of a folder with a checkpoint that the leader has sent; the number of the
generation that is to load it follows. The worker that loads it removes it."""
# The next leader may be on another machine without run folder, and reads this file instead.
SPEC_NAME = "run.json"
_UNTOLD = "untold.jsonl"


class Spool:
    """Folder with a run's specification, shards and saved files to be fetched, and readings."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_run(cls, hello: msg.LeaderHello) -> Spool:
        """Return the spool of a run on one host; hosts may share the disk."""
        configured = hello.env.get("HVD_ELASTIC_HOME")
        home = Path.home() / configured if configured else config.home()
        return cls(home.joinpath(*_inside_home(hello)))

    @staticmethod
    def check_path(told: str, hello: msg.LeaderHello) -> None:
        """Check that an agent names a folder that can be the spool of its run and host.

        The leader reads, writes and removes files there, so no other folder is believed.

        Args:
            told: path that the agent has told.
            hello: what it was told by the leader.

        Raises:
            ValueError: it names another one; says which was expected.
        """
        configured = hello.env.get("HVD_ELASTIC_HOME", "")
        expected = Path(configured).joinpath(*_inside_home(hello)).parts
        parts = Path(told).parts
        if not Path(told).is_absolute() or parts[-len(expected) :] != expected:
            raise ValueError(f"{told}, which is not {Path('…', *expected)}")

    def keep_run(self, fields: Mapping[str, Any]) -> None:
        """Write the run's specification as one line of JSON.

        Raises:
            StrangerError: the folder belongs to another user.
            OSError: the folder cannot be created.
        """
        for folder in (self.path.parent.parent, self.path.parent, self.path):
            private_folder(folder)
        with contextlib.suppress(OSError):  # for example a full disk; other hosts have a copy too
            write_whole(self.path / SPEC_NAME, json.dumps(dict(fields)) + "\n", mode=0o600)

    def shards(self) -> list[ShardInfo]:
        """Return the shards of checkpoints that the leader has not collected yet."""
        return find_shards(self.path)

    def saved_files(self) -> list[msg.SavedFile]:
        """Return the files of the script that the leader has not fetched yet."""
        return find_spooled(self.path / SAVED_FOLDER)

    def release(self, said: msg.Release) -> None:
        """Remove files that the leader has, or does not need."""
        if said.kind == "shards":
            drop_shards(self.path, said.up_to_step)
            return
        for saved in self.saved_files() if said.files is None else said.files:
            drop_spooled(self.path / SAVED_FOLDER, saved)

    def sent_checkpoints(self, before: float = math.inf) -> list[Path]:
        """Return the folders of checkpoints that were sent for generations before this one."""
        return [
            folder
            for folder in self.path.glob(f"{SENT_CHECKPOINT}*")
            if (number := folder.name.removeprefix(SENT_CHECKPOINT)).isdecimal()
            and int(number) < before
        ]

    def remove_sent_checkpoints(self) -> None:
        """Remove what restarts that were broken off have left."""
        for folder in self.sent_checkpoints():
            shutil.rmtree(folder, ignore_errors=True)

    def size_bytes(self) -> int:
        """Return the total size of all files, which grows while a checkpoint is written."""
        size = 0
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # renamed meanwhile
                    size += entry.stat().st_size
        return size

    def keep_untold(self, readings: Sequence[msg.Reading]) -> None:
        """Save what was read of the dataset and no leader knows, for the run's next agent."""
        if readings:
            with contextlib.suppress(OSError):
                (self.path / _UNTOLD).write_bytes(b"".join(map(encode, readings)))

    def take_untold(self) -> Iterator[msg.PastReading | msg.AgentWarning]:
        """Yield the readings that an earlier agent saved, and remove them."""
        path = self.path / _UNTOLD
        readings: MessageDecoder[msg.Reading] = MessageDecoder(msg.Reading, f"the file {path}")
        with contextlib.suppress(FileNotFoundError):
            lines = path.read_bytes().splitlines()
            path.unlink()
            for line in lines:
                try:
                    yield msg.PastReading(readings.decode(line))
                except ProtocolError as error:  # incomplete, for example because the disk was full
                    yield msg.AgentWarning(str(error))

    def remove(self) -> None:
        """Remove the folder, unless it has data that the next leader needs."""
        self.remove_sent_checkpoints()
        if self.shards() or self.saved_files() or (self.path / _UNTOLD).exists():
            return
        # The agent's socket goes last: the next agent waits for the end of this one if it finds it,
        # and uses the folder if it does not.
        with contextlib.suppress(OSError):
            for each in self.path.iterdir():
                if not each.is_socket():
                    remove_path(each)
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in (self.path.parent, self.path.parent.parent):
            with contextlib.suppress(OSError):  # used by other hosts or runs on the same disk
                folder.rmdir()


def _inside_home(hello: msg.LeaderHello) -> tuple[str, str, str]:
    return "spool", hello.run_id, hello.host
