"""What training processes wrote down: worlds, stalls, exactly once, steps done again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.records import (
    Chronicle,
    RecordFolder,
    check_steps,
    epochs_between,
    split_audit,
    step_problems,
)

Line = tuple[str, dict[str, Any]]
EXAMPLES = 4


class Story:
    """Records of made-up processes, a tenth of a second apart."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._processes: set[str] = set()
        self._worlds = 0

    def say(self, name: str, kind: str, **fields: Any) -> None:
        mono = round(len(self.lines) / 10, 3)
        self.lines.append((name, {"kind": kind, "mono": mono, **fields}))

    def world(self, names: Sequence[str], step: int) -> None:
        """These processes train together from ``step`` made steps on."""
        self._worlds += 1
        for rank, name in enumerate(names):
            if name not in self._processes:
                self._processes.add(name)
                self.say(name, "process", host=f"host-{name}", worker=name)
            place = {"rank": rank, "size": len(names), "generation": self._worlds, "step": step}
            self.say(name, "world", world=self._worlds, **place)

    def begin(self, step: int, epoch: int, **indices: list[int]) -> None:
        for name, used in indices.items():
            self.say(name, "begin", step=step, epoch=epoch, indices=used)

    def make(self, step: int, epoch: int, **indices: list[int]) -> None:
        """A step that all of them make."""
        self.begin(step, epoch, **indices)
        for name in indices:
            self.say(name, "end", step=step)

    def chronicle(self) -> Chronicle:
        chronicle = Chronicle()
        for name, record in self.lines:
            chronicle.take(name, record)
        return chronicle

    def sentence(self, *, finished: bool = True) -> str:
        return check_steps(self.lines, EXAMPLES, finished=finished).sentence()

    def problems(self) -> tuple[list[str], list[int]]:
        return step_problems(self.lines)


def test_an_epoch_without_a_change() -> None:
    story = Story()
    story.world(["p", "q"], 0)
    story.make(1, 0, p=[2], q=[0])
    story.make(2, 0, p=[1], q=[3])
    assert story.sentence() == "each of 4 examples (by index) used exactly once in its one epoch"
    assert story.problems() == ([], [])


def test_an_example_used_twice_and_one_left_out_are_told() -> None:
    story = Story()
    story.world(["p", "q"], 0)
    story.make(1, 0, p=[2], q=[0])
    story.make(2, 0, p=[2], q=[3])
    result = check_steps(story.lines, EXAMPLES, finished=True)
    assert not result.ok
    assert "1 missing (1)" in result.problems()[0]
    assert "1 used more than once (2)" in result.problems()[0]


@pytest.mark.parametrize("ended", [False, True])
def test_the_step_in_flight_may_be_done_again_by_the_survivor(ended: bool) -> None:
    story = Story()
    story.world(["p", "q"], 0)
    story.make(1, 0, p=[2], q=[0])
    story.begin(2, 0, p=[1], q=[3])
    if ended:
        story.say("q", "end", step=2)  # and dies, while p broke off
    story.world(["p"], 1)
    story.make(2, 0, p=[1, 3])
    assert story.sentence() == "each of 4 examples (by index) used exactly once in its one epoch"
    assert story.problems() == ([], [])


def test_the_step_in_flight_that_was_made_after_all_is_not_done_again() -> None:
    story = Story()
    story.world(["p", "q"], 0)
    story.make(1, 0, p=[2], q=[0])
    story.begin(2, 0, p=[1], q=[3])  # made, but nobody came to say so
    story.world(["p"], 2)
    story.make(3, 1, p=[0, 1, 2, 3])
    assert story.sentence() == "each of 4 examples (by index) used exactly once in each of 2 epochs"
    assert story.problems() == ([], [])


def test_two_steps_done_again_although_a_process_lived_on() -> None:
    story = Story()
    story.world(["p", "q"], 0)
    for step in (1, 2, 3):
        story.make(step, 0, p=[step - 1], q=[])
    story.world(["p"], 1)
    story.make(2, 0, p=[1])
    story.make(3, 0, p=[2])
    story.make(4, 0, p=[3])
    (problem,), lost = story.problems()
    assert "steps 2 to 3 were done again although a process that had made them lived" in problem
    assert lost == []
    assert story.sentence().startswith("each of 4 examples (by index) used exactly once")


def test_steps_done_again_from_a_checkpoint_are_counted() -> None:
    story = Story()
    story.world(["p"], 0)
    for step in (1, 2, 3):
        story.make(step, 0, p=[step - 1])
    story.world(["r"], 1)
    for step in (2, 3, 4):
        story.make(step, 0, r=[step - 1])
    assert story.problems() == ([], [2])
    assert story.sentence() == "each of 4 examples (by index) used exactly once in its one epoch"


def test_steps_left_out_are_told() -> None:
    story = Story()
    story.world(["p"], 0)
    story.make(1, 0, p=[0, 1])
    story.world(["p"], 3)
    story.make(4, 0, p=[2, 3])
    assert story.problems()[0] == ["steps 2 to 3 were left out"]


def test_only_the_epochs_of_a_full_disk_are_excused() -> None:
    story = Story()
    story.world(["p"], 0)
    for epoch in range(3):
        story.make(epoch + 1, epoch, p=[0, 1])
    audit = check_steps(story.lines, EXAMPLES, finished=True)
    begun = [record["mono"] for _, record in story.lines if record["kind"] == "begin"]
    assert epochs_between(story.lines, [(begun[1], begun[1] - 0.95)]) == {1}
    assert epochs_between(story.lines, [(begun[1], None)]) == {1, 2}
    assert epochs_between(story.lines, []) == set()
    forgiven, wrong = split_audit(audit, {1})
    assert forgiven == [1]
    assert [text.split(":")[0] for text in wrong] == ["epoch 0", "epoch 2"]
    assert split_audit(audit, {0, 1, 2}) == ([0, 1, 2], [])


def test_examples_used_twice_are_never_excused() -> None:
    story = Story()
    story.world(["p"], 0)
    story.make(1, 0, p=[0, 0, 1])
    audit = check_steps(story.lines, EXAMPLES, finished=True)
    forgiven, (wrong,) = split_audit(audit, {0})
    assert forgiven == []
    assert "1 used more than once (0)" in wrong


def test_an_open_epoch_is_no_fault_while_training_goes_on() -> None:
    story = Story()
    story.world(["p"], 0)
    story.make(1, 0, p=[0, 1])
    assert not check_steps(story.lines, EXAMPLES, finished=True).ok
    assert check_steps(story.lines, EXAMPLES, finished=False).ok


def test_the_chronicle_knows_who_trains_and_when_steps_ended() -> None:
    story = Story()
    story.world(["p", "q"], 0)
    story.make(1, 0, p=[2], q=[0])
    story.world(["q"], 1)
    assert story.chronicle().current is not None
    assert story.chronicle().worker_of_rank(0) == ("host-p", "p"), "no step of the new one yet"
    story.make(2, 0, q=[1, 3])
    chronicle = story.chronicle()
    assert chronicle.current is chronicle.worlds[1]
    assert chronicle.worker_of_rank(0) == ("host-q", "q")
    assert chronicle.worker_of_rank(1) is None
    assert chronicle.current.slots() == {"host-q": 1}
    assert chronicle.step == 2
    assert len(chronicle.ends) == 2, "a step is ended once, by whoever is first"
    assert chronicle.ends_since(chronicle.ends[0]) == 1
    assert chronicle.first_end_after(chronicle.ends[0]) == chronicle.ends[1]
    assert chronicle.first_end_after(chronicle.ends[1]) is None


def test_ranks_that_hold_different_parameters_are_told() -> None:
    story = Story()
    story.world(["p", "q"], 0)
    story.say("p", "equal", step=0)
    story.say("q", "differ", step=10, sums=[[1, 10], [2, 10]])
    chronicle = story.chronicle()
    assert chronicle.compared == 1
    assert len(chronicle.differences) == 1
    assert "after 10 steps the ranks hold different parameters" in chronicle.differences[0]


def test_a_folder_is_read_while_it_grows(tmp_path: Path) -> None:
    story = Story()
    story.world(["p"], 0)
    story.make(1, 0, p=[0])
    lines = [json.dumps(record) for _, record in story.lines]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines[:3]))  # the third is being written
    folder = RecordFolder(tmp_path)
    folder.poll()
    assert folder.chronicle.ends == []
    assert len([*folder.read_all()]) == 2
    path.write_text("\n".join(lines) + "\n")
    folder.poll()
    assert len(folder.chronicle.ends) == 1
    assert [record for _, record in folder.read_all()] == [record for _, record in story.lines]
