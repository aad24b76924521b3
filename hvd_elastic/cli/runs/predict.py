"""``hvd-elastic predict``: starts a prediction on all hosts, and puts its outputs together."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hvd_elastic.checkpoint.whole_files import write_json
from hvd_elastic.cli.jobs.naming import source_of
from hvd_elastic.cli.options import argument, command, option
from hvd_elastic.cli.runs.run import lead
from hvd_elastic.cli.runs.run_options import RunOptions
from hvd_elastic.config import runs_folder
from hvd_elastic.data.files import sha256_of
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count
from hvd_elastic.json_text import parse_json
from hvd_elastic.records.outputs import INDEX_FILE, TOTAL_FILE, joined, output_name, output_ranges
from hvd_elastic.records.process_lock import take_lock
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.replaced_files import replacing
from hvd_elastic.script.model_source import find_source
from hvd_elastic.script.prediction import VARIABLE, Prediction
from hvd_elastic.urls import is_url

_ASKED = "asked.json"
"""File in the folder of outputs that says what they are of, and which runs computed them."""

_CHOICES = ("command", "hostfile", "np", "run_id", "python", "ssh_config", "interface", "as_json")
_NO_CHOICE = {field.name for field in fields(RunOptions)} - {*_CHOICES}
"""Options of a run that a prediction has no use for."""


@dataclass(frozen=True)
class PredictOptions(RunOptions):
    """The options of a run, for one that trains nothing."""

    command: Annotated[
        list[str] | None, argument("the prediction script, after --", "-- COMMAND [ARG]...")
    ] = None
    checkpoint_every_s: float = 0.0  # the weights do not change, and the outputs are the progress


@command(PredictOptions, but=_NO_CHOICE, pass_on=True)
def predict(
    options: PredictOptions,
    checkpoint: Annotated[
        str,
        option(
            "weights: a run or its job (newest checkpoint), a checkpoint, or a file of hvd.save",
            metavar="RUN|FILE",
        ),
    ],
    data: Annotated[str, option("the data set, on every host", metavar="FOLDER|URL")],
    out: Annotated[Path, option("where the outputs go, on this machine")],
) -> None:
    """Compute a model's outputs for every example of a dataset, on all hosts.

    The script makes the model and calls [bold]hvd.predict(model, data)[/bold]. Edit the hostfile
    meanwhile to add or remove hosts. If it is interrupted or fails, the same command continues with
    the examples that are missing.

    Examples:
      hvd-elastic predict --checkpoint resnet --data /data/photos --out outputs -- python predict.py

      hvd-elastic predict -H hosts --checkpoint best.pt --data s3://photos/val --out outputs --
      python predict.py

    Exit status: 0 if all outputs are there, 1 if some are missing, 2 for wrong usage, 130 if it was
    stopped.
    """
    options.check()
    place = data if is_url(data) else str(Path(data).absolute())
    checkpoint = source_of(checkpoint)
    with _Outputs.opened(out, checkpoint, place) as outputs:
        outputs.collect()
        if not outputs.missing():
            outputs.write_index()
            print(f"{out}: all {count(outputs.examples or 0, 'output')} are there already")
            return
        done = tuple(joined(outputs.ranges()))
        if done:
            found = sum(end - begin for begin, end in done)
            print(f"{out}: {count(found, 'output')} are there already", file=sys.stderr)
        asked = Prediction(outputs.weights, place, done)
        os.environ[VARIABLE] = msgspec.json.encode(asked).decode()
        spec = options.spec()
        folder = RunFolder.create(options.run_id, spec.as_dict())
        if size := options.says_size():
            print(size, file=sys.stderr)
        outputs.add_run(folder.run_id)
        try:
            status = lead(spec, folder, resumed=False, as_json=options.as_json)
        finally:
            outputs.collect()
        missing = outputs.missing()
        if missing:
            print(
                f"error: {missing}; give the same command again to compute them, which keeps those "
                "that are there",
                file=sys.stderr,
            )
            raise typer.Exit(status or 1)
        outputs.write_index()
        if not options.as_json:
            print(f"{out}: {count(outputs.examples or 0, 'output')} in {INDEX_FILE}")
    raise typer.Exit(status)


class _Outputs:
    """The folder of outputs of one prediction.

    Attributes:
        examples: number of examples of the dataset; None: no worker has told it yet.
        weights: path of the file with the weights.
    """

    def __init__(self, folder: Path, weights: str, asked: dict[str, Any]) -> None:
        self._folder = folder
        self._asked = asked
        self.weights = weights
        self.examples: int | None = asked.get("examples")

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, checkpoint: str, data: str) -> Iterator[_Outputs]:
        """Make the folder, or open it to continue; nobody else writes into it meanwhile.

        Raises:
            UsageError: it has other files, or the outputs of another prediction.
            RunError: it cannot be written, or another process writes into it.
            CheckpointError: there are no such weights.
        """
        record = folder / _ASKED
        if folder.is_dir() and not record.exists() and any(folder.iterdir()):
            raise UsageError(
                f"--out {folder} is a folder with other files: give an empty or a new one, or that "
                "of a prediction that was interrupted"
            )
        asked = None
        if record.exists():
            try:
                asked = parse_json(record.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UsageError(
                    f"{record} cannot be read, so what the interrupted prediction was asked is not "
                    f"known ({error}): give a new --out"
                ) from error
        if asked is not None and _has_begun(asked):
            for name, value in (("checkpoint", checkpoint), ("data", data)):
                if asked[name] != value:
                    raise UsageError(
                        f"--out {folder} has outputs of another prediction, with --{name} "
                        f"{asked[name]} and not {value}: give another folder"
                    )
            # The run may have written newer checkpoints since, and the outputs are of one.
            weights = str(find_source(asked["weights"]))
        else:
            weights = str(find_source(checkpoint).absolute())
            asked = {"checkpoint": checkpoint, "data": data, "weights": weights, "runs": []}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = take_lock(folder / ".lock")
            if lock is None:
                raise RunError(f"another process is writing outputs into {folder}")
            with lock:
                made = cls(folder, weights, asked)
                made._write()
                yield made
        except OSError as error:
            raise RunError(
                f"--out {folder} cannot be written: {error.strerror or error}. What is there stays"
            ) from error

    def add_run(self, run_id: str) -> None:
        """Note a run that computes outputs, so that a later call finds them."""
        self._asked["runs"].append(run_id)
        self._write()

    def collect(self) -> None:
        """Move the outputs of all runs that have not been moved yet into the folder."""
        for run_id in self._asked["runs"]:
            saved = RunFolder(runs_folder() / run_id).saved
            total = saved / TOTAL_FILE
            if total.is_file():
                examples = parse_json(total.read_text(encoding="utf-8"))["examples"]
                if self.examples not in (None, examples):
                    raise RunError(
                        f"{self._folder} has outputs of a data set of {self.examples} examples, "
                        f"and it has {examples} now: give another --out"
                    )
                self.examples = self._asked["examples"] = examples
                self._write()
            for begin, end in output_ranges(path.name for path in saved.glob("outputs-*")):
                name = output_name(begin, end)
                _move(saved / name, self._folder / name)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of examples of all files, in order."""
        return output_ranges(path.name for path in self._folder.iterdir())

    def missing(self) -> str:
        """Return how many outputs are missing, in words; empty: none."""
        if self.examples is None:
            return "no output has been computed yet"
        found = sum(end - begin for begin, end in joined(self.ranges()))
        left = self.examples - found
        return f"{left} of {self.examples} outputs are missing" if left else ""

    def write_index(self) -> None:
        """Write the index of the complete folder."""
        files = []
        for begin, end in self.ranges():
            path = self._folder / output_name(begin, end)
            about = {"name": path.name, "begin": begin, "end": end}
            files.append({**about, "bytes": path.stat().st_size, "sha256": sha256_of(path)})
        told = {name: self._asked[name] for name in ("checkpoint", "data", "weights")}
        write_json(self._folder / INDEX_FILE, {"examples": self.examples, **told, "files": files})

    def _write(self) -> None:
        write_json(self._folder / _ASKED, self._asked)


def _has_begun(asked: dict[str, Any]) -> bool:
    """Return whether a worker has computed outputs of a prediction."""
    saved = (RunFolder(runs_folder() / run_id).saved for run_id in asked["runs"])
    return "examples" in asked or any((folder / TOTAL_FILE).exists() for folder in saved)


def _move(source: Path, target: Path) -> None:
    """Move a file, which appears at its new place whole, also on another disk."""
    try:
        source.replace(target)
    except OSError:
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        source.unlink()
