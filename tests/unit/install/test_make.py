"""What make sets up, and what it refuses, with programs that write down how they are called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def interpreter(path: Path, settings: str) -> None:
    """A Python that takes itself for another one."""
    run = f"import sys; {settings}; exec(sys.argv.pop(1))"
    program(path, f'shift; code=$1; shift; exec {sys.executable} -c "{run}" "$code" "$@"')


@pytest.fixture
def checkout(tmp_path):
    """What make reads of this checkout, in a folder whose name has a blank."""
    folder = tmp_path / "my checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "setup.py", "scripts/bootstrap.sh"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("scripts/setup_env.py", "build_horovod.py", "pinned.txt", "horovod-0.28.1.patch"):
        place = folder / name if "/" in name else folder / "hvd_elastic/install" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return folder


def make(checkout: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("MAKE")}
    environment["PATH"] = f"{path}:/usr/bin:/bin"
    return subprocess.run(
        ["make", "-C", str(checkout), "--no-print-directory", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("sys.version_info = (3, 9, 18)", "Python 3.9"),
        ("sys.version_info = (3, 14, 0)", "Python 3.14"),
        ("sys.version_info = (2, 7, 18)", "Python 2.7"),
        ("sys.maxsize = 2**31 - 1", "a Python of 32 bits"),
        (
            "sys.base_prefix = '/opt'; sys.modules['ensurepip'] = None",
            "a Python without venv or pip",
        ),
    ],
)
def test_a_python_that_does_not_fit_is_refused_with_one_that_does(checkout, settings, why):
    interpreter(checkout / "bin/python3", settings)
    interpreter(checkout / "bin/python3.13", "sys.version_info = (3, 13, 1)")
    for target in ("demo", "test", "horovod"):
        done = make(checkout, target, path=f"{checkout}/bin")
        assert done.returncode == 2
        assert (
            f"python3 is {why}, and hvd_elastic needs Python 3.10 to 3.13, 64 bits" in done.stderr
        )
        assert f"; run: make {target} PYTHON=python3.13\n" in done.stderr
    assert not (checkout / ".venv/bin").exists()


def test_a_missing_python_is_named_with_the_command_that_gets_one(checkout, tmp_path):
    for name in ("sed", "dirname", "id", "seq"):
        (tmp_path / name).symlink_to(shutil.which(name))
    script = ["/bin/sh", str(checkout / "scripts/bootstrap.sh"), "python9"]
    environment = {"PATH": str(tmp_path)}
    interpreter(tmp_path / "python3.10", "sys.version_info = (3, 9, 0)")
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no program python9, and hvd_elastic needs")
    program(tmp_path / "python3.10", "exit 0")
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert "; run: make PYTHON=" in done.stderr
    program(tmp_path / "getconf", "echo 32")
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert "all programs of this system are of 32 bits: use a machine" in done.stderr


@pytest.fixture
def calls(checkout):
    """Have make call programs that write down their arguments; return a reader of them."""
    diary = checkout / "diary"
    diary.touch()
    program(checkout / "bin/python3", f'[ "$1" = -c ] || echo "$@" >> "{diary}"')
    program(checkout / ".venv/bin/python", f'[ "$1" = -c ] || echo "$@" >> "{diary}"')

    def read(*arguments: str) -> list[str]:
        done = make(checkout, *arguments, path=f"{checkout}/bin")
        assert done.returncode == 0, done.stderr
        lines = diary.read_text().splitlines()
        diary.write_text("")
        return [
            f"set up {line.partition('--extras ')[2].split()[0]}"
            if "--extras" in line
            else line.split()[2]
            for line in lines
        ]

    return read


@pytest.mark.parametrize("name", ["hvd_elastic.cli.app", "pytest"])
def test_a_second_run_sets_up_nothing(calls, name):
    target = "test" if name == "pytest" else "demo"
    assert len(calls(target)) == 3
    assert len(calls(target)) == 1


def test_the_demo_needs_pytorch_alone_and_takes_what_the_tests_have(calls):
    assert calls("demo")[0] == "set up torch"
    assert calls("test")[0] == "set up dev,tensorflow,torch"
    assert len(calls("demo")) == len(calls("test")) == 1
    assert calls("demo", "EXTRAS=torch,ray")[0] == "set up dev,ray,tensorflow,torch"


def test_an_environment_whose_python_is_gone_is_set_up_again(calls, checkout):
    calls("demo")
    text = (checkout / ".venv/bin/python").read_text()
    (checkout / ".venv/bin/python").unlink()
    (checkout / ".venv/bin/python").symlink_to("/no/python3.9")
    make(checkout, "demo", path=f"{checkout}/bin")  # fails after the set-up, which is not real
    (checkout / ".venv/bin/python").unlink()
    program(checkout / ".venv/bin/python", text.removeprefix("#!/bin/sh\n"))
    assert calls("demo")[0] == "set up torch"


def test_a_set_up_that_failed_does_not_count(calls, checkout):
    calls("demo")
    python = (checkout / "bin/python3").read_text()
    program(checkout / "bin/python3", '[ "$1" = -c ]')
    assert make(checkout, "test", path=f"{checkout}/bin").returncode == 2
    (checkout / "bin/python3").write_text(python)
    assert calls("demo")[0] == "set up torch"
    assert calls("test")[0] == "set up dev,tensorflow,torch"


def test_the_tests_first_then_the_demo(calls):
    assert calls("test")[0] == "set up dev,tensorflow,torch"
    assert len(calls("demo")) == 1
