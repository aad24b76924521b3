"""Keeps the checkpoints of a run in one place, a folder or a URL, that no other run uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from hvd_elastic.checkpoint.files import (
    CheckpointInfo,
    ShardInfo,
    check_folder,
    check_owner,
    complete_checkpoint,
    find_checkpoints,
    newest_valid,
)
from hvd_elastic.checkpoint.lease import find_claimant
from hvd_elastic.checkpoint.url import CheckpointUrl, is_url
from hvd_elastic.errors import CheckpointError

__all__ = ["CheckpointStore", "check_new_place"]


def check_new_place(place: str) -> None:
    """Make sure that a run that is to be started can keep its checkpoints at ``--checkpoint-dir``.

    Raises:
        CheckpointError: it cannot be written, holds those of another run, or a leader is about to
            write there.
    """
    where = CheckpointUrl(place) if is_url(place) else Path(place)
    check_place(where, None)
    other = find_claimant(where)
    if other is not None:
        raise CheckpointError(
            f"{place} is in use by run {other.run}, which {other.led_by} leads, and two runs "
            "cannot keep their checkpoints in one place. Give the new one a --checkpoint-dir of "
            f"its own, or end the other there: hvd-elastic stop {other.run}"
        )


def check_place(place: Path | CheckpointUrl, run_id: str | None) -> list[CheckpointInfo]:
    """Make sure that checkpoints can be written, before training counts on it; return those there.

    Args:
        place: a folder, or a URL.
        run_id: whose checkpoints; None: those of a new run, which has none yet.

    Raises:
        CheckpointError: it cannot be written, or holds those of another run.
    """
    if isinstance(place, CheckpointUrl):
        place.check()
        found, name = place.find(Path()), place.url
    else:
        check_folder(place)
        found, name = find_checkpoints(place), str(place)
    check_owner(found, name, run_id)
    return found


class CheckpointStore:
    """The place of one run's checkpoints.

    Args:
        run_id: the run's; checkpoints of others are never taken.
        folder: where checkpoints are put together and kept.
        place: ``--checkpoint-dir``; a URL is uploaded to, a folder is used instead of ``folder``.
        keep: checkpoints to keep.
        resumed: the run may have checkpoints already.

    Attributes:
        run_id, folder, url: as given; ``url`` None: there is none.
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
        """Return where users look for checkpoints."""
        return self.url or self.folder

    def check(self) -> None:
        """Make sure that checkpoints can be written, before training counts on it.

        Raises:
            CheckpointError: they cannot, or there are those of another run.
        """
        check_place(self.folder, self._owner)
        if self.url is not None:
            check_place(self.url, self._owner)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint in the folder; -1: there is none."""
        with contextlib.suppress(CheckpointError):
            return max((info.step for info in find_checkpoints(self.folder)), default=-1)
        return -1

    def add(self, shards: Sequence[ShardInfo], seconds: float) -> CheckpointInfo:
        """Make shards in the folder its newest checkpoint; see :func:`complete_checkpoint`."""
        return complete_checkpoint(self.folder, shards, self._keep, seconds)

    def upload(self, info: CheckpointInfo) -> str:
        """Copy a checkpoint to the URL, if there is one; return where users find it.

        Raises:
            CheckpointError: it could not be uploaded.
        """
        if self.url is None:
            return str(info.path)
        self.url.upload(info, self._keep)
        return f"{self.url}/{info.path.name}"

    def newest(self, say: Callable[[str], None]) -> CheckpointInfo | None:
        """Return the newest valid checkpoint, here or at the URL, brought here.

        Args:
            say: told what was skipped, and why.

        Raises:
            CheckpointError: it cannot be known that there is none.
        """

        def skip(path: Path, why: str) -> None:
            say(f"checkpoint {path} was skipped: {why}")

        newest, trouble = None, None
        try:
            newest = newest_valid(self.folder, skip, self.run_id)
        except CheckpointError as error:
            trouble = error
        if self.url is not None:
            newer_than = -1 if newest is None else newest.step
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
        return newest

    def __str__(self) -> str:
        return str(self.folder) if self.url is None else f"{self.url} and in {self.folder}"
