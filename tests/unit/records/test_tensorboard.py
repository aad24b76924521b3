"""What TensorBoard finds in the files that were written for it."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import UsageError
from hvd_elastic.records.tensorboard import TensorBoardWriter, check_tensorboard
from tests.tensorboard_files import read_scalars
from tests.unit.records.made_events import made


def metrics(step: int, t: float | None = None, **fields: Any) -> Any:
    t = 1e9 + step if t is None else t
    return made({"t": t, "kind": "metrics", "step": step, "epoch": 1, "size": 2, **fields})


def writer(folder: Path, warnings: list[str] | None = None) -> TensorBoardWriter:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    return TensorBoardWriter(folder, (warnings if warnings is not None else []).append)


def test_metrics_are_read_back_by_step(tmp_path: Path) -> None:
    known = {"throughput": 900.0, "efficiency": 0.75, "goodput": 675.0, "lr": 0.1, "loss": 2.5}
    with writer(tmp_path / "new") as board:
        board.write_metrics(made({"t": 1.0, "kind": "run_started", "run_id": "a"}))
        board.write_metrics(metrics(10, size=2, global_batch_size=64, rank_s=[0.1, 0.2], **known))
        board.write_metrics(
            metrics(20, size=3, loss=1.25, ok=True, name="x", **{"val/accuracy": 0.5})
        )
        # While the writer is open: what is noted is there for readers at once.
        assert read_scalars(tmp_path / "new") == {
            "size/world_size": [(10, 2), (20, 3)],
            "size/global_batch_size": [(10, 64)],
            "goodput/throughput": [(10, 900)],
            "goodput/efficiency": [(10, 0.75)],
            "goodput/goodput": [(10, 675)],
            "train/epoch": [(10, 1), (20, 1)],
            "train/lr": [(10, 0.1)],
            "train/loss": [(10, 2.5), (20, 1.25)],
            "val/accuracy": [(20, 0.5)],
        }


def test_another_leader_goes_on_and_steps_done_again_replace_the_lost_ones(tmp_path: Path) -> None:
    with writer(tmp_path) as first:
        for step in (10, 20, 30):
            first.write_metrics(metrics(step, loss=1.0))
    with writer(tmp_path) as second:  # from a checkpoint of step 14
        for step in (15, 25):
            second.write_metrics(metrics(step, loss=2.0))
        second.write_metrics(metrics(22, loss=3.0))  # and once more
    assert len(list(tmp_path.iterdir())) == 2
    assert read_scalars(tmp_path)["train/loss"] == [(10, 1), (15, 2), (22, 3)]


def test_a_disk_that_takes_nothing_is_told_once_and_tried_again(tmp_path: Path) -> None:
    folder, said = tmp_path / "board", list[str]()
    folder.write_text("in the way")
    board = writer(folder, said)
    for step in (1, 2, 100):
        board.write_metrics(metrics(step, loss=1.0))
    assert len(said) == 1
    assert f"into {folder}: File exists" in said[0]
    folder.unlink()
    board.write_metrics(metrics(101, loss=1.0))  # not yet
    board.write_metrics(metrics(200, loss=1.0))
    board.close()
    assert read_scalars(folder)["train/loss"] == [(200, 1)]
    assert len(said) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"--tensorboard needs.*pip install tensorboard"):
        check_tensorboard("--tensorboard")
