"""Where the checkpoints of a run are kept: one place, and no other run's."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.checkpoint.files import (
    CheckpointInfo,
    check_folder,
    check_owner,
    find_checkpoints,
)
from hvd_elastic.checkpoint.lease import find_claimant
from hvd_elastic.checkpoint.url import CheckpointUrl, is_url
from hvd_elastic.errors import CheckpointError

__all__ = ["check_new_place", "check_place"]


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
    """Make sure that checkpoints can be written, before training counts on it; what is there.

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
