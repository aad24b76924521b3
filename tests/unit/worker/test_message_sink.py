"""What a training without a leader records."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.errors import UsageError
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.run_events import Warned
from hvd_elastic.worker.message_sink import FileSink
from tests.small_disk import mounted


@pytest.mark.root
def test_a_full_disk_does_not_end_training_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "small", "64k", lazy=True) as disk:
        sink = FileSink(disk)
        for _ in range(40):
            sink.send(Warned("x" * 4000))
        (said,) = [record.message for record in caplog.records]
        assert said.startswith(f"cannot write to {disk / 'events.jsonl'}: No space left on device.")
        assert read_records(disk / "events.jsonl")[0]["message"] == "x" * 4000


@pytest.mark.parametrize("told", ["30s", "-1", "nan", "inf"])
def test_an_interval_that_is_none_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_CHECKPOINT_EVERY", told)
    with pytest.raises(UsageError, match=rf"HVD_ELASTIC_CHECKPOINT_EVERY={told}: .* in seconds"):
        FileSink(tmp_path)
    monkeypatch.setenv("HVD_ELASTIC_CHECKPOINT_EVERY", "0.5")
    assert FileSink(tmp_path).checkpoint_every_s == 0.5


def test_a_folder_that_cannot_be_made_is_named_with_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"HVD_ELASTIC_RUN_FOLDER=.*cannot be made: Not a directory"
    ):
        FileSink(tmp_path / "file" / "run")
