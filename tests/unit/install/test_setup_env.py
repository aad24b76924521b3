"""What the set-up of a checkout installs and refuses; nothing is installed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hvd_elastic.errors import BuildError
from hvd_elastic.install.build_horovod import patch_digest
from hvd_elastic.install.prerequisites import Prerequisite, Purpose, machine_and_libc

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup_env.py"
FRAMEWORKS = {"torch": "torch==2.13.0", "tensorflow": "tensorflow==2.21.*"}


@pytest.fixture
def setup_env(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_env", module)
    spec.loader.exec_module(module)
    return module


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
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    extras: str,
    installed: list[str],
    rest: str,
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup_env, "run_quietly", lambda words, **_: commands.append(words))
    monkeypatch.setattr(setup_env, "_installed_frameworks", lambda _: ["torch==2.13.0+cpu"])
    setup_env.install_packages(Path("python"), tmp_path, FRAMEWORKS, extras, tmp_path / "log")
    assert "--require-hashes" in commands[0]
    assert [words[-1] for words in commands[1:-1]] == installed
    assert all("torch>=2.10,<2.15" in words for words in commands if "torch==2.13.0" in words)
    assert commands[-1][-1] == f"{SCRIPT.parents[1]}{rest}"
    assert (tmp_path / "constraints.txt").read_text() == "torch==2.13.0+cpu\n"
    assert str(tmp_path / "constraints.txt") in commands[-1]


def test_folders_that_cannot_be_written_are_named_before_anything_is_installed(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    setup_env.check_folders()
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "file" / "runs"))
    with pytest.raises(BuildError, match=r"file/runs cannot be written.* in HVD_ELASTIC_HOME"):
        setup_env.check_folders()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BuildError, match=r"cache cannot be written.* in XDG_CACHE_HOME"):
        setup_env.check_folders()


@pytest.mark.parametrize(
    ("folder", "extras", "words"),
    [
        ("/no/such", "torch,dev", "/no/such cannot be written; name another folder in TMPDIR"),
        ("", "torhc, dev", "EXTRAS=torhc, dev: there is no extra torhc; there are: torch, tensor"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_installed(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    folder: str,
    extras: str,
    words: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", folder)
    venv = tmp_path / "venv"
    assert setup_env.main(["--venv", str(venv), "--horovod", "--extras", extras]) != 0
    assert f"error: {words}" in capsys.readouterr().err
    assert not (venv / "bin").exists()


def test_a_full_disk_is_named_before_anything_is_installed(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hvd_elastic.install.prerequisites.BUILD_SPACE_BYTES", 10**18)
    monkeypatch.setattr(setup_env, "ensure_system_packages", None)
    assert setup_env.main(["--venv", str(tmp_path / "env"), "--horovod"]) == 1
    assert "name another folder in TMPDIR" in capsys.readouterr().err


def test_a_machine_without_a_compiler_is_told_before_anything_is_installed(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless a Horovod is kept that was compiled before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lacking = [item for item in setup_env.PREREQUISITES if item.name in ("g++", "ssh")]
    monkeypatch.setattr(setup_env, "missing", lambda _: lacking)
    monkeypatch.setattr(setup_env, "has_apt", lambda: True)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert setup_env.may_build()
    why = (
        r"without g\+\+ you cannot build Horovod; run: sudo apt-get install -y g\+\+ openssh-client"
    )
    with pytest.raises(BuildError, match=why):
        setup_env.ensure_system_packages(tmp_path / "log", [], setup_env.may_build())
    python = f"cp3{sys.version_info.minor}"
    for fits, machine in (False, "x86_64-glibc1.0"), (True, machine_and_libc()):
        folder = f"horovod-0.28.1-{python}-{machine}-torch-2.13-patch-{patch_digest()[:12]}"
        (tmp_path / "hvd_elastic/wheels" / folder).mkdir(parents=True)
        (tmp_path / "hvd_elastic/wheels" / folder / "horovod-0.28.1.whl").touch()
        assert setup_env.may_build() is not fits, "one for another C library is of no use"
    setup_env.ensure_system_packages(tmp_path / "log", [], setup_env.may_build())


@pytest.mark.parametrize("root", [True, False])
def test_what_apt_does_not_have_keeps_nothing_else_from_being_installed(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    root: bool,
) -> None:
    """As chromium on Ubuntu; an optional package that fails is no reason either."""
    installed: set[str] = set()

    def item(name: str, *, optional: bool) -> Prerequisite:
        find = lambda: name if name in installed else None  # noqa: E731
        return Prerequisite(name, find, (f"{name}-package",), Purpose.CLUSTER, optional)

    def run_quietly(command: list[str], **_: object) -> None:
        names = {word.removesuffix("-package") for word in command if word.endswith("-package")}
        if "broken" in names:
            raise BuildError("it fails")
        installed.update(names)

    wanted = [item(name, optional=name != "ssh") for name in ("ssh", "chromium", "broken", "ip")]
    cache = tmp_path / "apt-cache"
    cache.write_text('#!/bin/sh\ncase "$2" in chromium*) exit 100;; esac; echo "Package: $2"\n')
    cache.chmod(0o755)
    (tmp_path / "mirror_Packages").touch()
    monkeypatch.setattr(setup_env, "APT_LISTS", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(setup_env, "has_apt", lambda: True)
    monkeypatch.setattr(setup_env, "run_quietly", run_quietly)
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    setup_env.ensure_system_packages(tmp_path / "log", wanted, False)
    assert installed == ({"ssh", "ip"} if root else set())
    out = capsys.readouterr().out
    assert "missing: chromium (without it you cannot" in out
    left = "broken-package" if root else "ssh-package broken-package ip-package"
    assert out.endswith(f"to install what is missing: sudo apt-get install -y {left}\n")


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_an_environment_that_was_moved_is_made_anew(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quote: str
) -> None:
    """Its programs lead to the old place, where another checkout may be."""
    venv = tmp_path / "new" / ".venv"
    made: list[list[str]] = []
    monkeypatch.setattr(setup_env, "run_quietly", lambda words, **_: made.append(words))
    monkeypatch.setattr(setup_env, "_version_of", lambda _: list(sys.version_info[:2]))

    def make(place: Path) -> None:
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin/python").touch()
        (venv / "pyvenv.cfg").touch()
        (venv / "bin/activate").write_text(f"export VIRTUAL_ENV={quote}{place}{quote}\n:\n")

    for place, remade in (
        (venv, False),
        (tmp_path / "link" / ".venv", False),
        (tmp_path / "old" / ".venv", True),
        (Path(f"{venv}2"), True),
    ):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(venv.parent)
        make(place)
        setup_env.ensure_venv(venv, tmp_path / "log")
        assert bool(made) is remade
        assert (venv / "bin/activate").exists() is not remade
        made.clear()
