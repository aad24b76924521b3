"""Stores the checkpoints of a run in a folder or at a URL that no other run uses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from hvd_elastic.checkpoint.lease import PlainFolder, find_lease
from hvd_elastic.checkpoint.manifests import (
    CheckpointInfo,
    check_folder,
    check_owner,
    complete_checkpoint,
    find_checkpoints,
    newest_valid,
)
from hvd_elastic.checkpoint.shards import ShardInfo
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.errors import CheckpointError
from hvd_elastic.urls import is_url

_UNFINISHED = "unfinished.json"  # beside the checkpoints


def check_new_place(place: str, run_id: str | None = None) -> None:
    """Check that a new run can store its checkpoints at ``--checkpoint-dir``.

    Args:
        run_id: run whose folder is not here, and whose checkpoints may be there; None: no run's.

    Raises:
        CheckpointError: it cannot be written, it holds checkpoints of another run, or another
            leader is using it.
    """
    where = CheckpointUrl(place) if is_url(place) else Path(place)
    check_place(where, run_id)
    other = find_lease(where)
    if other is not None:
        raise CheckpointError(
            f"{place} is in use by run {other.run}, which {other.led_by} leads, and two runs "
            "cannot keep their checkpoints in one place. Give the new one a --checkpoint-dir of "
            f"its own, or end the other there: hvd-elastic stop {other.run}"
        )


def check_place(place: Path | CheckpointUrl, run_id: str | None) -> list[CheckpointInfo]:
    """Check that checkpoints can be written before training starts; return the existing ones.

    Args:
        run_id: run that owns it; None: a new run, which has no checkpoints yet.

    Raises:
        CheckpointError: it cannot be written, or holds checkpoints of another run.
    """
    if isinstance(place, CheckpointUrl):
        place.check()
        found, name = place.find(Path()), place.url
    else:
        check_folder(place)
        found, name = find_checkpoints(place), str(place)
    check_owner(found, name, run_id)
    return found


class UnfinishedNote:
    """A note beside the checkpoints that a run has not succeeded, which its engine can continue.

    By it a program knows its run on another machine, where no other record of that is. Errors in
    writing are not reported: checkpoints use the same storage, and report them.

    Args:
        place: ``--checkpoint-dir``.
        engine: what gives the run its hosts.
    """

    def __init__(self, place: str, run_id: str, engine: str | None) -> None:
        self._files = CheckpointUrl(place) if is_url(place) else PlainFolder(Path(place))
        self._text = json.dumps({"run": run_id, "engine": engine}).encode()

    @property
    def is_there(self) -> bool:
        """Return whether there is the note of this run and engine."""
        with contextlib.suppress(OSError, CheckpointError):
            return self._files.read_file(_UNFINISHED) == self._text
        return False

    def write(self) -> None:
        with contextlib.suppress(OSError, CheckpointError):
            self._files.write_file(_UNFINISHED, self._text)

    def remove(self) -> None:
        with contextlib.suppress(OSError, CheckpointError):
            self._files.remove_file(_UNFINISHED)


class CheckpointStore:
    """Stores and finds the checkpoints of one run.

    Args:
        run_id: name of the run; checkpoints of other runs are never used.
        folder: folder in which checkpoints are assembled and kept.
        place: ``--checkpoint-dir``; checkpoints are uploaded to a URL, and kept in a folder
            instead of ``folder``.
        resumed: whether the run may have checkpoints already.

    Attributes:
        run_id, folder, url: as given; ``url`` is None if the place is a folder.
    """

    def __init__(
        self, run_id: str, folder: Path, place: str | None, *, keep: int, resumed: bool
    ) -> None:
        self.run_id = run_id
        self.url = CheckpointUrl(place) if place is not None and is_url(place) else None
        self.folder = folder if place is None or self.url is not None else Path(place)
        self._keep = keep
        self._owner = run_id if resumed else None

    @property
    def place(self) -> Path | CheckpointUrl:
        """Return the folder or URL in which users find the checkpoints."""
        return self.url or self.folder

    def check(self) -> None:
        """Check that checkpoints can be written, before training starts.

        Raises:
            CheckpointError: they cannot be written, or there are checkpoints of another run.
        """
        check_place(self.folder, self._owner)
        if self.url is not None:
            check_place(self.url, self._owner)

    def resume_step(self) -> int:
        """Return the step of the checkpoint in the folder to resume from; -1 if there is none.

        That is the newest with finite weights, or the newest if there is none.
        """
        with contextlib.suppress(CheckpointError):
            found = find_checkpoints(self.folder)
            finite = [info for info in found if not info.not_finite]
            return max((info.step for info in finite or found), default=-1)
        return -1

    def add_checkpoint(self, shards: Sequence[ShardInfo], seconds: float) -> CheckpointInfo:
        """Turn shards in the folder into a checkpoint; see :func:`complete_checkpoint`."""
        return complete_checkpoint(self.folder, shards, self._keep, seconds)

    def upload(self, info: CheckpointInfo, on_progress: Callable[[], None]) -> str:
        """Copy a checkpoint to the URL, if there is one; return its path or URL.

        Args:
            on_progress: called while it goes on.

        Raises:
            CheckpointError: it could not be uploaded.
        """
        if self.url is None:
            return str(info.path)
        self.url.upload(info, self._keep, on_progress)
        return f"{self.url}/{info.path.name}"

    def newest(self, say: Callable[[str], None]) -> CheckpointInfo | None:
        """Return the newest valid checkpoint, downloaded if it is at the URL; None if none exists.

        Args:
            say: called with a message for each checkpoint that was skipped.

        Raises:
            CheckpointError: a folder or URL cannot be read, so a checkpoint may exist there.
        """

        def skip(path: Path, why: str) -> None:
            say(f"checkpoint {path} was skipped: {why}")

        newest, trouble = None, None
        try:
            newest = newest_valid(self.folder, skip, self.run_id)
        except CheckpointError as error:
            trouble = error
        if self.url is not None:
            newer_than = -1 if newest is None or newest.not_finite else newest.step
            try:
                found = self.url.download_newest(
                    self.folder, self._keep, newer_than, skip, self.run_id
                )
                newest = found or newest
            except CheckpointError as error:
                trouble = error
        if trouble is not None:
            if newest is None:
                raise trouble
            say(f"{trouble}; the workers take checkpoint {newest.path}")
        if newest is not None and newest.not_finite:
            say(f"the workers take checkpoint {newest.path} all the same: there is no other")
        return newest

    def __str__(self) -> str:
        return str(self.folder) if self.url is None else f"{self.url} and in {self.folder}"
