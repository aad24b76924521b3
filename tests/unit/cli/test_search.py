"""What ``hvd-elastic search`` refuses before anything is made."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.jobs.job import JobRequest
from hvd_elastic.search.study import Definition, Study, searches_folder
from hvd_elastic.search.trials import Point, Rules, TrialStatus

pytest.importorskip("optuna")

GOOD = ("--param", "lr=0.1..1", "--metric", "acc", "--goal", "max", "--trials", "9")
TRAIN = ("--", "python", "train.py", "--lr", "{lr}")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def without(name: str) -> tuple[str, ...]:
    at = GOOD.index(name)
    return (*GOOD[:at], *GOOD[at + 2 :])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*without("--goal"), *TRAIN), "give --goal max or --goal min"),
        ((*GOOD, "--goal", "best", *TRAIN), "--goal is max or min, not 'best'"),
        ((*without("--metric"), *TRAIN), "give --metric NAME"),
        ((*without("--trials"), *TRAIN), "give --trials N"),
        ((*without("--param"), *TRAIN), "give the parameters with --param"),
        ((*GOOD, "--space", "s.py", *TRAIN), "both are given"),
        ((*GOOD, "--param", "lr=1,2", *TRAIN), "--param names lr twice"),
        ((*GOOD, "--param", "w=1,2", *TRAIN), "no word of the command has the placeholder {w}"),
        ((*GOOD, *TRAIN, "{w}"), "a placeholder {w}, and no parameter is named so"),
        ((*GOOD, "--rungs", "3", *TRAIN), "--rungs needs --max-examples"),
        (
            (*GOOD, "--rungs", "9", "--max-examples", "100", *TRAIN),
            "--reduction 3 there are at most 5",
        ),
        (
            (*GOOD, "--rungs", "2", "--checkpoint-every", "0", *TRAIN),
            "continues from its checkpoint",
        ),
        ((*GOOD, "--sampler", "best", *TRAIN), "--sampler is one of tpe, random, grid, gp"),
        ((*GOOD, "--sampler", "grid", *TRAIN), "lr is a range without a step"),
        (
            ("--param", "lr=1,2", *GOOD[2:], "--sampler", "grid", *TRAIN),
            "--trials 9: the grid has 2 points",
        ),
        ((*GOOD, "--name", "x" * 41, *TRAIN), "at most 40 characters"),
        (GOOD, "error: no command to run"),
        ((*GOOD, *TRAIN), "there is no cluster in"),
        (("space.py", *GOOD[2:], *TRAIN), "space.py cannot be read"),
        (("show", "nothing"), "there is no study 'nothing'"),
        (("shwo",), "no such command 'shwo'"),
    ],
)
def test_a_mistake_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["search", *words])
    assert ended.value.code in (1, 2)
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed
    assert words != GOOD or printed.count("error:") == 1
    assert not searches_folder().exists()


def test_a_parameter_that_only_some_trials_have_is_told_before_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("space.py").write_text(
        "def suggest(trial):\n"
        "    if trial.suggest_categorical('opt', ['sgd', 'adam']) == 'sgd':\n"
        "        trial.suggest_float('lr', 0.1, 1)\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["search", "space.py", *GOOD[2:], *TRAIN, "{opt}"])
    assert ended.value.code == 2
    assert "Add it to space.py, for every trial, or write" in capsys.readouterr().err


def test_a_grid_is_not_continued_beyond_its_points(capsys: pytest.CaptureFixture[str]) -> None:
    request = JobRequest("digits", {"command": ["train.py", "{lr}"], "cwd": "/"})
    grid = ("lr=1,2",)
    Study.create(Definition("acc", Rules("max", 2), request, "/c", grid, sampler="grid"))
    with pytest.raises(SystemExit) as ended:
        main(["search", "resume", "digits", "--trials", "3"])
    assert ended.value.code == 2
    assert "--trials 3: the grid has 2 points" in capsys.readouterr().err


def test_a_study_that_cannot_be_read_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = JobRequest("digits", {"command": ["train.py", "{lr}"], "cwd": "/"})
    study = Study.create(Definition("acc", Rules("max", 2), request, "/c", ("lr=1,2",)))
    with study.lock():
        trial = study.add_trial([])
        study.end_trial(replace(trial, status=TrialStatus.DONE, points=(Point(100, 0.5),)))
    broken = {"json": ("study.json", b"{"), "log": ("journal.log", b'{"op_code": 99}\n[]\n')}
    for name, (file, content) in broken.items():
        shutil.copytree(study.folder, study.folder.with_name(name))
        (study.folder.with_name(name) / file).write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["search", "list"])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert re.search(r"^digits +ended +1 .* acc, max$", printed.out, re.MULTILINE)
    assert "json/study.json cannot be read" in printed.err
    assert "log/journal.log cannot be read" in printed.err
    for what in ("stop", "show"):
        with pytest.raises(SystemExit) as ended:
            main(["search", what, "digits"])
        assert ended.value.code == 0
    assert "study digits (ended)" in capsys.readouterr().out


@pytest.mark.parametrize("points", [(), (Point(100, math.nan),)])
def test_a_trial_without_a_number_is_not_the_best(
    points: tuple[Point, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    request = JobRequest("digits", {"command": ["train.py", "{lr}"], "cwd": "/"})
    grid = ("lr=1,2",)
    study = Study.create(Definition("acc", Rules("max", 2), request, "/c", grid))
    with study.lock():
        study.end_trial(replace(study.add_trial([]), status=TrialStatus.DONE, points=points))
    with pytest.raises(SystemExit) as ended:
        main(["search", "best", "digits"])
    assert ended.value.code == 1
    assert "no trial of study digits has reported a number for acc" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["search", "show", "digits"])
    assert re.search(r"^- +0 +done ", capsys.readouterr().out, re.MULTILINE)  # no rank


def test_a_study_that_cannot_end_without_a_daemon_says_so_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = JobRequest("digits", {"command": ["train.py", "{lr}"], "cwd": "/"})
    grid = ("lr=1,2",)
    study = Study.create(Definition("acc", Rules("max", 2), request, str(tmp_path / "c"), grid))
    with study.lock(), pytest.raises(SystemExit) as ended:
        main(["search", "stop", "digits"])
    assert ended.value.code == 1
    assert "cluster c has no daemon" in capsys.readouterr().err
    assert study.stop_request.exists()
