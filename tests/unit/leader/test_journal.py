"""What the leader records and shows of a run."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.leader.led_run import Journal
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.records.run_folder import RunFolder


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path: Path) -> None:
    folder = RunFolder.create("bars", root=tmp_path)
    shown: list[str] = []
    journal = Journal(folder, lambda _: None, lambda *line: shown.append(line[2]), audit=False)
    for line in ("\r 0%|  |\r50%|##|\r100%|####|", "epoch 1\r", "plain"):
        journal.output("n1", 0, line)
    journal.close()
    assert shown == ["100%|####|", "epoch 1", "plain"]
    assert [event["line"] for event in read_records(folder.output)] == shown


def test_what_is_told_late_is_not_the_last_recorded_step(tmp_path: Path) -> None:
    """Workers forget the steps up to that one."""
    folder = RunFolder.create("late", root=tmp_path)
    journal = Journal(folder, lambda _: None, lambda *_: None, audit=True)
    journal.read("restored", {"step": 10, "generation": 4})
    journal.read("used", {"step": 11, "generation": 4})
    journal.read("used", {"step": 19, "generation": 3}, late=True)
    journal.close()
    assert [line["step"] for line in read_records(folder.audit)] == [10, 11, 19]
    assert journal.recorded_step == 11
