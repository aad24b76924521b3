"""Parameters as users write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import HvdElasticError, UsageError
from hvd_elastic.search.space import check_space, fill, grid_size, of_file, parse_param

optuna = pytest.importorskip("optuna")
kinds = optuna.distributions


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=1e-4..1:log", kinds.FloatDistribution(1e-4, 1.0, log=True)),
        ("layers=1..8", kinds.IntDistribution(1, 8)),
        ("batch=16..512:log", kinds.IntDistribution(16, 512, log=True)),
        ("drop=0..0.5:0.1", kinds.FloatDistribution(0.0, 0.5, step=0.1)),
        ("shift=-1..1.5", kinds.FloatDistribution(-1.0, 1.5)),
        ("rate=0.0..1", kinds.FloatDistribution(0.0, 1.0)),
        ("width=64..256:64", kinds.IntDistribution(64, 256, step=64)),
    ],
)
def test_a_range(text: str, values: Any) -> None:
    assert parse_param(text) == (text.partition("=")[0], values)


def test_choices_are_passed_on_as_they_are_written() -> None:
    _, rates = parse_param("lr=1e-3,0.01,1")
    assert isinstance(rates, kinds.CategoricalDistribution)
    assert fill(["--lr", "{lr}"], {"lr": rates.choices[0]}, 0) == ["--lr", "1e-3"]
    optim = ("optim.name", kinds.CategoricalDistribution(["adam", "sgd"]))
    assert parse_param("optim.name=adam,sgd") == optim


def test_a_grid_has_all_points() -> None:
    texts = ("a=64..256:64", "b=0..0.3:0.1", "c=1..3", "d=relu,gelu")
    assert [grid_size(dict([parse_param(text)])) for text in texts] == [4, 4, 3, 2]
    assert grid_size(dict(map(parse_param, texts))) == 4 * 4 * 3 * 2
    with pytest.raises(UsageError, match="the grid has 1,000,000 points, and may have 100,000"):
        grid_size(dict([parse_param("n=1..1000000")]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "is not valid: give NAME=LOW..HIGH"),
        ("lr=", "is not valid"),
        ("1lr=1,2", "is not valid"),
        ("lr=1..1e-4", "the bounds are reversed"),
        ("lr=0..1e999", "a bound is above 9"),
        ("lr=1..1", "both bounds are equal"),
        ("lr=0..1:log", "begins above 0, and this one begins at 0"),
        ("lr=-1..1:log", "begins above 0"),
        ("lr=0..1:1e-300", "of which it has at most 9"),
        ("n=1..99999999999999999999", "a bound is above 9.* too large"),
        ("lr=[1e-4,1]", r"a list has no brackets: lr=1e-4,1\. A range has two points"),
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
        ("def suggest(trial):\n    return {1: 2}", "has returned 1 as a placeholder's name"),
        ("import sys\nsys.exit('no')", "line 2: SystemExit: no"),
    ],
)
def test_a_file_with_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "space.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        of_file(path)(optuna.trial.FixedTrial({}))
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"space\.py cannot be read: No such file"):
        of_file(tmp_path / "space.py")


def test_a_function_returns_the_values_or_has_asked_for_them(tmp_path: Path) -> None:
    path = tmp_path / "space.py"
    trial = optuna.trial.FixedTrial({"a": 1, "b": 2})
    asks = "def suggest(trial):\n    {}[trial.suggest_int(n, 0, 9) for n in 'ab']"
    path.write_text(asks.format(""))
    assert of_file(path)(trial) == {"a": 1, "b": 2}
    path.write_text(asks.format("a, b = ") + "\n    return {'both': f'{a}x{b}'}")
    assert of_file(path)(trial) == {"both": "1x2"}
