"""Parameters as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.errors import HvdElasticError, UsageError
from hvd_elastic.search.space import check_space, fill, of_file, parse_param


@pytest.mark.parametrize(
    ("text", "low", "high", "log", "step", "whole"),
    [
        ("lr=1e-4..1:log", 1e-4, 1.0, True, None, False),
        ("layers=1..8", 1.0, 8.0, False, None, True),
        ("batch=16..512:log", 16.0, 512.0, True, None, True),
        ("drop=0..0.5:0.1", 0.0, 0.5, False, 0.1, False),
        ("shift=-1..1.5", -1.0, 1.5, False, None, False),
        ("width=64..256:64", 64.0, 256.0, False, 64.0, True),
    ],
)
def test_a_range(
    text: str, low: float, high: float, log: bool, step: float | None, whole: bool
) -> None:
    found = parse_param(text)
    assert (found.low, found.high, found.log, found.step, found.whole) == (
        low, high, log, step, whole,
    )  # fmt: skip


def test_choices_are_passed_on_as_they_are_written() -> None:
    rate = parse_param("lr=1e-3,0.01,1")
    assert fill(["--lr", "{lr}"], {"lr": rate.choices[0]}, 0) == ["--lr", "1e-3"]
    assert parse_param("optim.name=adam,sgd").choices == ("adam", "sgd")
    assert parse_param("width=64..256:64").grid() == [64, 128, 192, 256]
    assert parse_param("drop=0..0.3:0.1").grid() == pytest.approx([0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "is not valid: give NAME=LOW..HIGH"),
        ("lr=", "is not valid"),
        ("1lr=1,2", "is not valid"),
        ("lr=1..1e-4", "the bounds are reversed"),
        ("lr=0..1e999", "a bound is too large"),
        ("lr=1..1", "both bounds are equal"),
        ("lr=0..1:log", "begins above 0, and this one begins at 0"),
        ("lr=-1..1:log", "begins above 0"),
        ("lr=0..1:2", "a step above 0 and at most 1"),
        ("lr=0..1:lag", "what follows the range is log, or a step"),
        ("lr=a..b", "the bounds of a range are numbers"),
        ("lr=0.1", "one value is nothing to search"),
        ("lr=1,,2", "empty or listed twice"),
        ("lr=1,2,1", "empty or listed twice"),
        ("trial=1..3", "is the number of the trial"),
    ],
)
def test_a_parameter_that_is_not_valid_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        parse_param(text)
    assert f"{text!r}" in str(error.value) or text in str(error.value)


def test_placeholders_and_parameters_belong_together() -> None:
    check_space(["lr"], ["train.py", "--lr={lr}", "--out", "{trial}", '{"a":{"b":1}}', "{{x}}"])
    with pytest.raises(HvdElasticError) as error:
        check_space(["lr", "width"], ["train.py", "--lr={lr}", "--depth={depth}"])
    assert "{depth}, and no parameter is named so (there is: lr, width)" in str(error.value)
    assert "no word of the command has the placeholder {width}" in str(error.value)


def test_braces_that_are_no_placeholders_stay() -> None:
    words = ['{"lr":{lr}}', '{"a":{"b":1}}', "{{lr}}", "{}"]
    assert fill(words, {"lr": 0.1}, 0) == ['{"lr":0.1}', '{"a":{"b":1}}', "{lr}", "{}"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def suggests(trial): ...", "has no function suggest"),
        ("def suggest(trial):\n    return trial.suggest('lr')", "line 2: AttributeError"),
        ("def suggest(trial)\n    return 1", "line 1: SyntaxError"),
        ("import nothing_of_that_name", "line 1: ModuleNotFoundError"),
        ("def suggest(trial):\n    return 3", "has returned a int"),
    ],
)
def test_a_file_with_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    optuna = pytest.importorskip("optuna")
    path = tmp_path / "space.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        of_file(path)(optuna.trial.FixedTrial({}))
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"space\.py cannot be read: No such file"):
        of_file(tmp_path / "space.py")


def test_a_function_returns_the_values_or_has_asked_for_them(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    path = tmp_path / "space.py"
    trial = optuna.trial.FixedTrial({"a": 1, "b": 2})
    asks = "def suggest(trial):\n    {}[trial.suggest_int(n, 0, 9) for n in 'ab']"
    path.write_text(asks.format(""))
    assert of_file(path)(trial) == {"a": 1, "b": 2}
    path.write_text(asks.format("a, b = ") + "\n    return {'both': f'{a}x{b}'}")
    assert of_file(path)(trial) == {"both": "1x2"}
