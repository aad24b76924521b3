"""Studies on disk: what is defined, sampled and kept."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.jobs.job import JobRequest
from hvd_elastic.records.process_lock import take_lock
from hvd_elastic.search.space import grid_size, parse_param
from hvd_elastic.search.study import Definition, Study, searches_folder, study_names
from hvd_elastic.search.trials import Point, Rules, Trial, TrialStatus

optuna = pytest.importorskip("optuna")

RULES = Rules("max", trials=50, rungs=2, max_examples=900.0)
REQUEST = JobRequest("digits", {"command": ["python", "train.py", "--lr={lr}"], "cwd": "/"})


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))


def defined(*texts: str, **more: object) -> Definition:
    found = texts or ("lr=1e-4..1:log",)
    made = Definition("acc", RULES, REQUEST, "/clusters/test", found, seed=3)
    return replace(made, **more)  # type: ignore[arg-type]


def ended(trial: Trial, *values: float, status: TrialStatus = TrialStatus.DONE) -> Trial:
    points = tuple(Point(100.0 * (n + 1), value, 1e9) for n, value in enumerate(values))
    return replace(trial, status=status, points=points, run_id=f"r{trial.number}", reason="why")


def test_what_was_written_is_found_by_another_process() -> None:
    study = Study.create(defined())
    with study.lock():
        first = study.add_trial([])
        second = study.add_trial([first])
        third = study.add_trial([first, second])
        study.report(ended(second, 0.25))
        study.end_trial(ended(first, 0.5, math.nan))
        study.end_trial(ended(second, 0.25, status=TrialStatus.STOPPED))
        study.end_trial(ended(third, status=TrialStatus.FAILED))
        fourth = study.add_trial(study.trials())
    found = Study.open("digits")
    assert found.definition == study.definition
    one, two, three, four = found.trials()
    assert one.params == first.params
    assert 1e-4 <= one.params["lr"] <= 1
    assert [trial.status.value for trial in (one, two, three, four)] == [
        "done", "stopped", "failed", "waiting",
    ]  # fmt: skip
    assert one.points[0] == Point(100.0, 0.5, 1e9)
    assert math.isnan(one.points[1].value)
    assert (one.run_id, one.reason) == ("r0", "why")
    assert four.params == fourth.params
    kept = optuna.load_study(study_name="digits", storage=found._open()[0]).trials
    assert kept[0].value == -math.inf  # what is no number is the worst
    assert kept[1].intermediate_values == {100: 0.25}
    assert study_names() == ["digits"]


def test_words_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'caf\\udce9' is not UTF-8"):
        Study.create(defined(request=replace(REQUEST, name="caf\udce9")))


def test_a_study_defined_so_again_is_the_same_and_another_is_refused() -> None:
    study = Study.create(defined())
    with study.lock():
        trial = study.add_trial([])
        study.end_trial(ended(trial, 0.5))
        with pytest.raises(RunError, match="a process searches already for study digits"):
            with Study.open("digits").lock():
                pass
    again = Study.create(defined())
    assert again.definition.token == study.definition.token
    with pytest.raises(UsageError, match="with other values of: parameters, metric"):
        Study.create(defined("lr=1e-3..1", metric="loss"))
    with pytest.raises(UsageError, match="with other values of: options of its jobs"):
        Study.create(defined(request=replace(REQUEST, max_np=1)))
    with pytest.raises(RunError, match=r"there is no study 'other' in .*; there is: digits"):
        Study.open("other")


def test_a_study_whose_trials_have_ended_without_the_metric_gives_way() -> None:
    study = Study.create(defined(metric="accuracy"))
    with study.lock():
        trial = study.add_trial([])
        with pytest.raises(UsageError, match="with other values of: metric"):
            Study.create(defined())
        study.end_trial(ended(trial, status=TrialStatus.FAILED))
    assert Study.create(defined()).trials() == []
    assert Study.open("digits").definition.token != study.definition.token


def test_two_that_define_one_study_at_once_do_not_both_search() -> None:
    first = Study.create(defined())
    second = Study.create(defined("lr=1e-3..1"))  # before the first one has a trial
    with second.lock():
        second.add_trial([])
        assert Study.create(defined("lr=1e-3..1")).definition.token == second.definition.token
    with pytest.raises(RunError, match="another study digits was started meanwhile"), first.lock():
        pass
    folder = searches_folder() / "new"
    folder.mkdir()
    with take_lock(folder / "lock") or pytest.fail("it is free"):
        with pytest.raises(RunError, match="a process searches already for study new"):
            Study.create(defined(request=replace(REQUEST, name="new")))
        assert not (folder / "study.json").exists()


def test_a_writer_that_was_killed_leaves_nothing_to_wait_for() -> None:
    study = Study.create(defined())
    with study.lock():
        study.add_trial([])
    journal = study.folder / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "wor')  # as on a full disk
    (study.folder / "journal.log.lock").symlink_to(journal)
    study = Study.open("digits")
    with study.lock():
        study.add_trial(study.trials())
    assert len(Study.open("digits").trials()) == 2
    assert journal.read_bytes().startswith(whole)
    assert not os.path.lexists(study.folder / "journal.log.lock")


def test_a_grid_is_tried_whole_and_once() -> None:
    study = Study.create(defined("lr=0.1,0.2,0.4", "width=1..3", sampler="grid"))
    with study.lock():
        for number in range(grid_size(study.definition.values)):
            trial = study.add_trial(study.trials())
            if number % 2:
                study.end_trial(ended(trial, 0.5))
    points = {(trial.params["lr"], trial.params["width"]) for trial in study.trials()}
    assert len(points) == 9
    with pytest.raises(UsageError, match="lr is a range without a step"):
        grid_size(dict([parse_param("lr=1e-4..1:log")]))


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
def test_a_sampler_goes_on_as_it_would_have_without_a_new_start(sampler: str) -> None:
    if sampler == "gp":
        pytest.importorskip("scipy")
        pytest.importorskip("torch")

    def rates(restart: bool) -> list[float]:
        study = Study.create(defined(sampler=sampler, request=replace(REQUEST, name=f"s{restart}")))
        for number in range(12):
            with study.lock():
                trial = study.add_trial(study.trials())
                score = -abs(math.log10(trial.params["lr"]) + 2)
                # Every third one is left where it is, as at a rung.
                if number % 3:
                    study.end_trial(ended(trial, score, score))
            if restart:
                study = Study.open(study.name)
        return [trial.params["lr"] for trial in study.trials()]

    straight = rates(False)
    assert len({*straight}) == 12
    assert rates(True) == straight


def test_a_space_may_differ_from_trial_to_trial(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "space.py"
    path.write_text(
        "def suggest(trial):\n"
        "    layers = trial.suggest_int('layers', 1, 3)\n"
        "    widths = [trial.suggest_int(f'w{n}', 1, 9) for n in range(layers)]\n"
        "    return {'widths': ','.join(map(str, widths)), 'number': trial.number}\n"
    )
    spec = {**REQUEST.spec, "command": ["train.py", "{widths}", "{number}"]}
    study = Study.create(defined(params=(), space=str(path), request=replace(REQUEST, spec=spec)))
    with study.lock():
        for number in range(15):
            trial = study.add_trial(study.trials())
            assert trial.params["number"] == number
            study.end_trial(ended(trial, len(str(trial.params["widths"]))))
    assert len({str(trial.params["widths"]).count(",") for trial in study.trials()}) > 1
    assert capfd.readouterr().err == ""


def test_a_trial_without_a_value_for_a_placeholder_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "space.py"
    path.write_text("def suggest(trial):\n    trial.suggest_int('layers', 1, 3)\n")
    study = Study.create(defined(params=(), space=str(path)))
    with study.lock():
        with pytest.raises(
            UsageError, match=r"no value for the placeholder \{lr\}; it has: layers"
        ):
            study.add_trial([])
        assert study.trials() == []


def test_tpe_learns_from_trials_that_are_held() -> None:
    """Optuna takes a trial that runs for a bad one, and a held one is often a good one."""
    study = Study.create(defined(seed=1))
    trials: list[Trial] = []
    with study.lock():
        for _ in range(40):
            trial = study.add_trial(trials)
            score = -abs(math.log10(trial.params["lr"]) + 3)
            trials.append(ended(trial, score, status=TrialStatus.HELD))
    late = [abs(math.log10(trial.params["lr"]) + 3) for trial in trials[25:]]
    assert sorted(late)[len(late) // 2] < 0.5  # of uniform ones, the median is 1
