"""The command table: quick, honest about what exists, one line for a user's mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from hvd_elastic import __version__
from hvd_elastic.cli import app as app_module
from hvd_elastic.cli import options
from hvd_elastic.cli.app import COMMANDS, load_command, main
from hvd_elastic.config import nearest_existing
from hvd_elastic.errors import RunError, UsageError
from tests import other_user
from tests.paths import LIMIT_S


@pytest.fixture
def command(monkeypatch):
    """Registers a function as `hvd-elastic probe`; returns the registering function."""

    def register(target, *, pass_on=False):
        if pass_on:
            target = options.command(pass_on=True)(target)
        module = types.ModuleType("hvd_elastic.cli.probe")
        module.__spec__ = types.SimpleNamespace(name=module.__name__)  # type: ignore[assignment]
        module.target = target  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(app_module.COMMANDS, "probe", ("probe:target", "A probe."))

    return register


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return 0 if ended.value.code is None else int(ended.value.code)


def test_help_lists_commands_in_the_table_s_order(capsys):
    assert status_of("--help") == 0
    out = capsys.readouterr().out
    places = [out.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)


def test_a_flag_has_no_kind_of_value_in_the_help(capsys):
    assert status_of("run", "--help") == 0
    out = capsys.readouterr().out
    assert "<bool>" not in out
    assert re.search(r"--run-id +TEXT +name", out)


def test_every_command_loads():
    for name in COMMANDS:
        assert load_command(name).name == name


def test_without_a_command_there_is_help_and_the_status_of_wrong_usage(capsys):
    assert status_of() == 2
    assert "Usage: hvd-elastic" in "".join(capsys.readouterr())


def test_version(capsys):
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"hvd-elastic {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("atach",), "no such command 'atach'. Did you mean 'attach'? See: hvd-elastic --help"),
        (("zzz",), "no such command 'zzz'. See: hvd-elastic --help"),
        (
            ("cluster", "kil"),
            "no such command 'kil'. Did you mean 'kill'? See: hvd-elastic cluster --help",
        ),
    ],
)
def test_an_unknown_command_is_wrong_usage(capsys, words, said):
    assert status_of(*words) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(("error", "status"), [(RunError, 1), (UsageError, 2)])
def test_a_user_s_mistake_is_one_line_and_the_error_s_status(command, capsys, error, status):
    def fail():
        raise error("run 'a' is not known; see hvd-elastic list")

    command(fail)
    assert status_of("probe") == status
    captured = capsys.readouterr()
    assert captured.err == "error: run 'a' is not known; see hvd-elastic list\n"
    assert captured.out == ""


def test_a_defect_of_ours_keeps_its_traceback(command):
    def fail():
        raise ZeroDivisionError

    command(fail)
    with pytest.raises(ZeroDivisionError):
        main(["probe"])


def test_ctrl_c_ends_with_130(command, capsys):
    def interrupted():
        raise KeyboardInterrupt

    command(interrupted)
    assert status_of("probe") == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_command_chooses_its_status_by_typer_exit(command):
    def failed():
        raise typer.Exit(1)

    command(failed)
    assert status_of("probe") == 1


def test_a_group_of_commands_is_loaded_like_one(command, capsys):
    group = typer.Typer()

    @group.command()
    def inner(word: str) -> None:
        print(f"inner {word}")

    @group.callback()
    def about() -> None:
        """A group."""

    command(group)
    assert status_of("probe", "inner", "x") == 0
    assert capsys.readouterr().out == "inner x\n"


@pytest.mark.parametrize(
    "line",
    [
        ["--np", "2", "--", "python", "train.py", "--lr", "0.1", "--np", "9"],
        ["--np", "2", "python", "train.py", "--lr", "0.1", "--np", "9"],
    ],
)
def test_options_after_the_script_belong_to_the_script(command, capsys, line):
    def take(words: list[str], np: int = 1) -> None:
        print(np, words)

    command(take, pass_on=True)
    assert status_of("probe", *line) == 0
    assert capsys.readouterr().out == "2 ['python', 'train.py', '--lr', '0.1', '--np', '9']\n"


def test_a_result_that_is_missing_is_named_in_words(capsys, tmp_path):
    assert status_of("bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")) == 2
    error = capsys.readouterr().err
    assert error.endswith(
        "a.json cannot be read as a result of bench synthetic: No such file or directory\n"
    )
    assert "Errno" not in error


def test_what_the_encoding_of_the_terminal_lacks_is_shown_as_a_question_mark():
    """Such as that of LC_ALL=en_US, without UTF-8; an arrow would have ended the leader."""
    program = (
        "import typer; from hvd_elastic.cli.entry import enter\n"
        "app = typer.Typer()\n"
        "app.command()(lambda: print('0 \\u2192 2 slots'))\n"
        "enter('x', typer.main.get_command(app), [])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, b"0 ? 2 slots\n"), done.stderr


@other_user.needs_root
@pytest.mark.parametrize("words", [["list"], ["status"], ["stop", "x"]])
def test_a_home_that_this_user_may_not_look_into_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    assert nearest_existing(tmp_path / "home" / "runs") == tmp_path
    load_command(words[0])  # the user nobody may not enter the folder of Python

    def act() -> None:
        assert nearest_existing(tmp_path / "home" / "runs") in tmp_path.parents
        with pytest.raises(SystemExit, match="1"):
            main(words)

    other_user.call(act)
    assert "or set HVD_ELASTIC_HOME to a folder of yours" in capfd.readouterr().err
