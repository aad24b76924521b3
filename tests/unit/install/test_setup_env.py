"""What the set-up of a checkout installs; nothing is installed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup_env.py"
FRAMEWORKS = {"torch": "torch==2.13.0", "tensorflow": "tensorflow==2.21.*"}


@pytest.mark.parametrize(
    ("extras", "installed", "rest"),
    [
        ("torch,tensorflow,dev", ["torch==2.13.0", "tensorflow==2.21.*"], "[dev]"),
        ("torch, dev", ["torch==2.13.0"], "[dev]"),
        ("tensorflow", ["tensorflow==2.21.*"], ""),
        ("dev", [], "[dev]"),
    ],
)
def test_frameworks_among_the_extras_are_installed_as_asked_for_and_pinned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    extras: str,
    installed: list[str],
    rest: str,
) -> None:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    setup_env = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_env", setup_env)
    spec.loader.exec_module(setup_env)
    commands: list[list[str]] = []
    monkeypatch.setattr(setup_env, "run_quietly", lambda words, **_: commands.append(words))
    monkeypatch.setattr(setup_env, "_installed_frameworks", lambda _: ["torch==2.13.0+cpu"])
    setup_env.install_packages(Path("python"), tmp_path, FRAMEWORKS, extras, tmp_path / "log")
    assert [words[-1] for words in commands[1:-1]] == installed
    assert commands[-1][-1] == f"{SCRIPT.parents[1]}{rest}"
    assert (tmp_path / "constraints.txt").read_text() == "torch==2.13.0+cpu\n"
    assert str(tmp_path / "constraints.txt") in commands[-1]
