"""Finds the file that holds the trained weights which a user names."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.checkpoint.files import MANIFEST, find_checkpoints, newest_valid
from hvd_elastic.checkpoint.url import is_url
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import CheckpointError, UsageError
from hvd_elastic.records.run_folder import RunFolder, check_run_id


def find_source(source: str | Path) -> Path:
    """Return the manifest of a checkpoint, or another file, that ``source`` names.

    Args:
        source: path of a manifest or another file; folder of a run or of checkpoints, whose newest
            valid one is found; or id of a run. A path that exists comes before an id.

    Raises:
        CheckpointError: there is no such file or run, or the run has no checkpoint.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix == ".json" and not MANIFEST.fullmatch(path.name):
            raise CheckpointError(
                f"{path} is no checkpoint: the manifest of one is named step-….json, as in the "
                "folder checkpoints of a run"
            )
        return path
    if path.is_dir():
        return _newest_in(path)
    run = runs_folder() / str(source)
    try:
        known = run.is_dir() and check_run_id(str(source)) == run.name
    except UsageError:
        known = False
    if known:
        return _newest_in(run)
    raise CheckpointError(
        f"{source} is neither a file or folder nor the id of a run in {run.parent}. Runs are "
        "listed by: hvd-elastic list"
    )


def _newest_in(folder: Path) -> Path:
    run = RunFolder(folder)
    is_run = run.run_json.exists() or run.events.exists() or run.checkpoints.is_dir()
    checkpoints = _checkpoints_of(run) if is_run else folder
    newest = newest_valid(checkpoints)
    if newest is not None:
        return newest.path
    if not is_run:
        raise CheckpointError(f"{folder} is not the folder of a run, and holds no whole checkpoint")
    damaged = " that is whole" if find_checkpoints(checkpoints) else ""
    saved = sorted(path.name for path in run.saved.glob("[!.]*")) if run.saved.is_dir() else []
    files = f". It has saved {', '.join(saved)} in {run.saved}: load one of these" if saved else ""
    raise CheckpointError(f"run {run.run_id} has no checkpoint{damaged} in {checkpoints}{files}")


def _checkpoints_of(run: RunFolder) -> Path:
    place = run.read_run().get("checkpoint_folder")
    # Checkpoints that are uploaded to a URL are in the run folder as well.
    return run.checkpoints if not isinstance(place, str) or is_url(place) else Path(place)
