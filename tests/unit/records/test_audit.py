from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_elastic.records.audit import check_audit
from tests.unit.records.sample_run import EXAMPLES, sample_audit

Line = dict[str, Any]


def used(
    step: int, indices: list[int], epoch: int = 0, generation: int = 1, position: int = 0
) -> Line:
    """A record; the position matters only beside steps that have none."""
    return {
        "kind": "used", "generation": generation, "step": step, "epoch": epoch,
        "position": position, "indices": indices, "padding": [],
    }  # fmt: skip


def dataset(n: int, epochs: int = 1, **more: int) -> Line:
    return {"kind": "dataset", "n": n, "epochs": epochs, **more}


def test_a_whole_run() -> None:
    result = check_audit(sample_audit(epochs=3), finished=True)
    assert result.ok
    assert result.complete_epochs == 3
    assert result.repeated_steps == 1
    assert result.steps == 69
    assert [epoch.used for epoch in result.epochs] == [EXAMPLES] * 3
    assert (
        result.sentence()
        == "each of 1437 examples (by index) used exactly once in each of 3 epochs"
    )


def test_nothing_recorded() -> None:
    result = check_audit([])
    assert not result.ok
    assert result.sentence() == "not audited (start the run with --audit)"
    assert not check_audit([dataset(3)]).recorded


def test_a_missing_and_a_double_index_are_named() -> None:
    lines = [dataset(6, 2), used(1, [0, 1, 2]), used(2, [2, 4, 5]), used(3, [0, 1, 2], epoch=1)]
    result = check_audit(lines)
    assert not result.ok
    assert result.problems() == ["epoch 0: 1 missing (3), 1 used more than once (2)"]
    assert result.epochs[1].open
    assert result.sentence().startswith("NOT exactly once: epoch 0: 1 missing (3)")


def test_examples_that_cannot_be_decoded_count_as_used_and_are_told() -> None:
    undone = used(2, [2, 3]) | {"skipped": [2, 3]}
    again = used(2, [2, 3], generation=2) | {"skipped": [3]}
    result = check_audit([dataset(4), used(1, [0, 1]), undone, again], finished=True)
    assert result.ok
    assert result.skipped == 1
    assert result.sentence().endswith("in its one epoch; 1 use skipped: cannot be decoded")


def test_steps_without_a_record_lose_no_example() -> None:
    lines = [dataset(4, 2), used(1, [0, 1]), used(4, [2, 3], epoch=1, position=2)]
    result = check_audit(lines, finished=True)
    assert not result.ok
    assert not result.faulty
    assert (result.unrecorded_steps, result.unrecorded) == (2, 4)
    text = "4 examples of 2 steps not recorded; every other one was used exactly once"
    assert result.sentence() == text
    assert result.problems() == [f"epoch {epoch}: 2 not recorded" for epoch in (0, 1)]
    ended = check_audit(lines[:2], finished=True, steps_made=4, examples_made=8)
    assert ended.sentence().startswith("6 examples of 3 steps not recorded")
    twice = check_audit([*lines, used(5, [2, 0], epoch=1)], finished=True)
    assert twice.sentence().startswith(
        "NOT exactly once: epoch 1: 1 used more than once, by steps that left no record"
    )


def test_an_example_is_missing_beside_those_that_were_not_recorded() -> None:
    """Steps 2 and 3 used two examples; 3 of the rest lack one."""
    lines = [dataset(7), used(1, [0, 1]), used(4, [4, 5], position=4)]
    result = check_audit(lines, finished=True)
    assert result.problems() == ["epoch 0: 1 missing, 2 not recorded"]
    assert result.sentence().startswith("NOT exactly once")
    # While it is open, neither is an error.
    assert check_audit(lines).ok
    after = [*lines, used(5, [6], position=6), used(9, [2], epoch=2, position=3)]
    going = check_audit(after)
    assert (going.unrecorded, going.faulty) == (2 + 7, False)
    assert [(epoch.epoch, epoch.open) for epoch in going.epochs] == [
        (0, False),
        (1, False),
        (2, True),
    ]


def test_an_index_beyond_the_dataset() -> None:
    result = check_audit([dataset(2), used(1, [0, 1, 7, -1])], finished=True)
    assert result.problems() == ["epoch 0: 2 not in the dataset"]


def test_an_open_last_epoch_is_no_fault_unless_the_run_is_over() -> None:
    lines = [dataset(4, 2), used(1, [0, 1, 2, 3]), used(2, [3, 1], epoch=1)]
    going = check_audit(lines)
    assert going.ok
    assert going.complete_epochs == 1
    assert going.sentence().endswith("epoch 1 open with 2 used, none twice")
    assert check_audit(lines, finished=True).problems() == ["epoch 1: 2 missing (0, 2)"]


def test_a_script_may_end_in_the_middle_of_an_epoch() -> None:
    lines = [dataset(4, 3), used(1, [0, 1, 2, 3]), used(2, [3, 1], epoch=1)]
    ended = check_audit(lines, finished=True, ended_in=1, steps_made=2, examples_made=6)
    assert ended.ok
    assert ended.problems() == []
    assert ended.complete_epochs == 1
    text = "each of 4 examples (by index) used exactly once in its one epoch; "
    text += "ended in epoch 1 with 2 used"
    assert ended.sentence() == f"{text}, none twice"
    begun = check_audit([*lines[:1], used(1, [3])], finished=True, ended_in=0, examples_made=1)
    assert begun.sentence() == "ended in epoch 0 with 1 of 4 examples used, none twice"
    assert (begun.ok, begun.complete_epochs) == (True, 0)
    # Between two epochs, or right at the end of one, nothing is left open.
    for epoch in (0, 1):
        between = check_audit(lines[:2], finished=True, ended_in=epoch, examples_made=4)
        assert (
            between.sentence() == "each of 4 examples (by index) used exactly once in its one epoch"
        )


def test_what_is_lost_before_the_script_ends_is_a_fault() -> None:
    lines = [dataset(8, 3), used(1, [0, 1, 2]), used(2, [5], position=3)]
    skipped = check_audit(lines, finished=True, ended_in=0, steps_made=2, examples_made=6)
    assert skipped.problems() == ["epoch 0: 2 of 6 missing until the script ended"]
    lost = check_audit(lines, finished=True, ended_in=0, steps_made=3, examples_made=6)
    assert lost.sentence().startswith("2 examples of 1 step not recorded")
    twice = check_audit([*lines, used(3, [5, 6])], finished=True, ended_in=0, examples_made=6)
    assert "1 used more than once (5)" in twice.problems()[0]
    # An epoch that the run has left behind has to be complete.
    past = check_audit(lines, finished=True, ended_in=1, steps_made=2, examples_made=4)
    assert past.problems() == ["epoch 0: 4 missing (3, 4, 6, 7)"]


def test_a_huge_dataset_is_audited_by_what_was_read_of_it() -> None:
    lines = [dataset(10**12), used(1, [10**12 - 1, 0, 2]), used(2, [5, 2])]
    (epoch,) = check_audit(lines).epochs
    assert (epoch.used, epoch.missing, epoch.duplicated) == (4, 10**12 - 4, 1)
    assert epoch.missing_indices == (1, 3, 4, 6, 7, 8, 9, 10, 11, 12)


def test_an_epoch_that_was_never_begun_is_missing_at_the_end() -> None:
    result = check_audit([dataset(2, 2), used(1, [0, 1])], finished=True)
    assert result.problems() == ["epoch 1: 2 missing (0, 1)"]


def test_a_double_use_in_an_open_epoch_is_a_fault() -> None:
    result = check_audit([dataset(4), used(1, [0, 1]), used(2, [1])])
    assert result.problems() == ["epoch 0: 1 used more than once (1)"]


def test_reports_of_the_same_step_by_several_workers_count_once() -> None:
    assert check_audit([dataset(4), *[used(1, [0, 1, 2, 3])] * 3], finished=True).ok


def test_workers_that_disagree_about_a_step() -> None:
    result = check_audit([dataset(2), used(1, [0, 1]), used(1, [1, 0])], finished=True)
    assert not result.ok
    assert result.conflicts == (1,)
    assert "step 1" in result.problems()[0]


def test_a_step_that_only_dead_workers_finished_is_done_again() -> None:
    lines = [
        dataset(8),
        used(1, [0, 1]),
        used(2, [2, 3]),
        used(2, [3, 2, 4], generation=2),
        used(3, [5, 6, 7], generation=2),
    ]
    result = check_audit(lines, finished=True)
    assert result.ok
    assert result.repeated_steps == 1


def test_late_reports_of_an_older_generation_change_nothing() -> None:
    lines = [
        dataset(6),
        used(1, [0, 1]),
        used(2, [2, 3], generation=2),
        used(3, [4, 5], generation=2),
        used(2, [3, 2]),
        used(4, [4, 5]),
    ]
    result = check_audit(lines, finished=True)
    assert result.ok
    assert result.steps == 3
    assert result.repeated_steps == 1


def test_going_back_to_a_checkpoint_voids_what_came_after_it() -> None:
    lines = [
        dataset(6),
        used(1, [0, 1], generation=4),
        used(2, [2, 3], generation=4),
        used(3, [4, 5], generation=4),
        {"kind": "restored", "step": 1, "epoch": 0, "position": 2},
        # without a leader a run that goes on counts its generations from 1 again
        used(2, [3, 2, 4], generation=1, position=2),
        used(3, [5], generation=1, position=5),
    ]
    result = check_audit(lines, finished=True)
    assert result.ok
    assert (result.voided_steps, result.steps) == (2, 3)
    assert not check_audit(lines[:5] + lines[6:], finished=True).ok


def test_a_life_before_is_told_late_and_changes_nothing() -> None:
    """A host was cut off while the run went back and was resumed, and tells its steps then."""
    lines = [
        dataset(8),
        used(1, [0, 1], generation=7),
        {"kind": "restored", "step": 1, "generation": 8},
        used(2, [3, 2, 4], generation=8, position=2),
        used(2, [2, 3], generation=7, position=2),
        used(3, [4, 5], generation=7, position=4),
        used(3, [5, 6, 7], generation=8, position=5),
        used(4, [6, 7], generation=7, position=6),
    ]
    result = check_audit(lines, finished=True)
    assert result.ok
    assert (result.steps, result.repeated_steps, result.voided_steps) == (3, 0, 0)
    result = check_audit([*lines[:3], *lines[4:6]])
    assert (result.steps, result.epochs[0].used) == (1, 2), "nothing is known of the life after"


def test_padding_is_not_a_use() -> None:
    lines = [dataset(3), {**used(1, [0, 1, 2]), "padding": [2, 2]}]
    result = check_audit(lines, finished=True)
    assert result.ok
    assert result.epochs[0].padding == 2


def test_examples_that_drop_last_leaves_out() -> None:
    lines = [dataset(5, 1, dropped=1), used(1, [0, 4]), used(2, [2, 3])]
    assert check_audit(lines, finished=True).ok
    assert not check_audit(lines[:2], finished=True).ok


@settings(deadline=None)
@given(st.data())
def test_any_history_of_deaths_and_restores_is_judged_by_what_counts(data: st.DataObject) -> None:
    """Lose steps and go back at random; what is left covers the epochs, and one hole is found."""
    n = data.draw(st.integers(1, 30))
    epochs = data.draw(st.integers(1, 3))
    lines: list[Line] = [dataset(n, epochs)]
    after: dict[int, tuple[int, int]] = {0: (0, 0)}
    line_of: dict[int, Line] = {}
    step, generation, is_led = 0, 1, data.draw(st.booleans())
    while True:
        epoch, position = after[step]
        if position == n:
            epoch, position = epoch + 1, 0
        if epoch == epochs:
            break
        what = data.draw(st.sampled_from(["step", "step", "step", "redo", "restore", "late"]))
        if what == "restore" and step and len(lines) < 200:
            step = data.draw(st.integers(0, step))
            restored: Line = {"kind": "restored", "step": step}
            generation = generation + 1 if is_led else data.draw(st.integers(1, generation + 1))
            lines.append({**restored, "generation": generation} if is_led else restored)
            continue
        if what == "late" and is_led and step:
            earlier = [line for line in lines if line["kind"] == "used"]
            lines.append(data.draw(st.sampled_from(earlier)))
            continue
        count = data.draw(st.integers(1, n - position))
        indices = list(range(position, position + count))
        line = used(step + 1, indices, epoch, generation, position)
        lines.extend([line] * data.draw(st.integers(1, 2)))
        if what == "redo" and len(lines) < 200:
            generation += 1  # the step died with its workers
            continue
        step += 1
        after[step], line_of[step] = (epoch, position + count), line
    result = check_audit(lines, finished=True)
    assert result.problems() == []
    assert result.steps == step

    hole = data.draw(st.integers(1, step))
    without = [line for line in lines if line["kind"] != "used" or line["step"] != hole]
    lacking = check_audit(without, finished=True, steps_made=step, examples_made=n * epochs)
    assert not lacking.faulty
    assert lacking.unrecorded == len(line_of[hole]["indices"])


def test_a_step_is_checked_without_a_look_at_all_examples() -> None:
    """Ten times as many steps of the same size take ten times as many calls, not a hundred."""

    def calls(steps: int) -> int:
        lines = [dataset(steps * 100)]
        lines += [used(step, list(range(step * 100, step * 100 + 100))) for step in range(steps)]
        found = 0

        def note(_frame: object, event: str, _arg: object) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            assert check_audit(lines, finished=True).ok
        finally:
            sys.setprofile(None)
        return found

    assert calls(1000) < 20 * calls(100)


@pytest.mark.parametrize("seed", range(3))
def test_one_index_taken_out_anywhere_is_found(seed: int) -> None:
    lines = sample_audit(epochs=2, seed=seed)
    victim = lines[10 + seed]
    taken = victim["indices"][5]
    for line in lines:
        if line.get("step") == victim["step"]:
            line["indices"] = [index for index in line["indices"] if index != taken]
    result = check_audit(lines, finished=True)
    assert result.problems() == [f"epoch 0: 1 missing ({taken})"]
