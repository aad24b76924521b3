"""Finds the file of trained weights that a user names, and tells if it is of another model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_elastic.checkpoint.manifests import MANIFEST, find_checkpoints, newest_valid
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import CheckpointError, UsageError
from hvd_elastic.records.run_folder import RunFolder, check_run_id
from hvd_elastic.urls import is_url

_NAMED = 5
"""Most names that an error lists."""


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
        f"{source} is neither a file or folder nor the id of a run in {runs_folder()}. Runs "
        "are listed by: hvd-elastic list. What a script has kept by hvd.save it loads by the name "
        "alone, such as 'best.pt', once it has a rank"
    )


def mismatches(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return how tensors differ from those of a model, in words; empty: they fit.

    Args:
        own: tensors of the model by name; other values are not compared.
        given: tensors of the file by name.
    """
    wrong = []
    missing, unexpected = own.keys() - given.keys(), given.keys() - own.keys()
    for what, names in (("missing keys", missing), ("unexpected keys", unexpected)):
        if names:
            named = ", ".join(sorted(names)[:_NAMED])
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            wrong.append(f"{what}: {named}{more}")
    for name, mine in () if wrong else own.items():
        here, there = _shape(mine), _shape(given[name])
        if here is not None and here != there:
            shape = given[name] if there is None else there
            wrong.append(f"{name} has shape {shape} there, {here} in the model")
    return wrong


def another_model(path: Path, wrong: list[str]) -> CheckpointError:
    """Return the error for a file whose :func:`mismatches` are ``wrong``."""
    return CheckpointError(
        f"{path} is of another model: {'; '.join(wrong[:_NAMED])}. Create the model as the "
        "training script does; name= chooses another object of its State"
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


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
