"""What keeps an environment from working on a host, or from being changed there."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs.copy.comparison import Comparison
from hvd_elastic.programs.copy.tree import walk
from hvd_elastic.tools import installing
from hvd_elastic.tools.copy.job import CopySettings
from hvd_elastic.tools.installing import (
    Environment,
    Installation,
    own_environment,
    why_kept,
    why_not,
)

HERE = platform.python_version()
MINOR = ".".join(HERE.split(".")[:2])
DEBIAN = Environment("/opt/env", Path("/usr/bin/python3"), None, Path("lib"))
PYENV = Environment("/opt/env", Path("/home/a/.pyenv/3/bin/python3"), None, Path("lib"))
CONDA = Environment("/opt/env", None, None, Path("lib"))
FACTS = {"machine": platform.machine(), "libc": "glibc 2.36", "base": HERE}


@pytest.mark.parametrize(
    ("changed", "environment", "why"),
    [
        ({}, DEBIAN, ""),
        ({"base": f"{MINOR}.99"}, DEBIAN, ""),
        ({"base": None}, CONDA, ""),
        ({"libc": "glibc 2.41"}, DEBIAN, ""),
        ({"machine": "riscv64"}, DEBIAN, "its processor is riscv64, here it is"),
        ({"libc": "glibc 2.31"}, CONDA, "it has glibc 2.31, here it is glibc 2.36"),
        ({"libc": ""}, DEBIAN, "it has another C library, here it is glibc 2.36"),
        ({"base": "3.9.2"}, DEBIAN, "/usr/bin/python3 is Python 3.9.2 there"),
        ({"base": "3.9.2"}, DEBIAN, f"make this environment again by /usr/bin/python{MINOR}"),
        ({"base": ""}, DEBIAN, f"Install Python {MINOR} there as here"),
        ({"base": ""}, PYENV, "copyclust HOSTFILE /home/a/.pyenv/3 /home/a/.pyenv/3"),
    ],
)
def test_a_host_on_which_it_cannot_work_is_refused_with_what_differs(
    changed: dict[str, Any], environment: Environment, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "libc", lambda: "glibc 2.36")
    found = why_not({**FACTS, **changed}, environment)
    assert why in found
    assert bool(found) == bool(why)


def test_only_frameworks_that_horovod_is_compiled_for_are_imported_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for GPUs is not compiled for the TensorFlow that may be installed beside it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    versions = {"torch": "2.13.0", "tensorflow": "2.21.0"}
    for name in versions:
        (tmp_path / "horovod" / name).mkdir(parents=True)
    assert installing.used_frameworks(versions) == ["torch", "tensorflow"], "none imports"
    (tmp_path / "horovod/torch/mpi_lib_v2.cpython-311.so").touch()
    assert installing.used_frameworks(versions) == ["torch"]
    (tmp_path / "horovod/tensorflow/mpi_lib.cpython-311.so").touch()
    assert installing.used_frameworks(versions) == ["torch", "tensorflow"]
    assert installing.used_frameworks({**versions, "torch": None}) == ["tensorflow"]


def test_no_host_changes_while_one_is_in_use() -> None:
    free = {"kept": "", "in_use": ""}
    assert why_kept({"a": free, "b": free}) == {}
    busy = {"kept": "", "in_use": "/opt/env is in use there by run x"}
    why = why_kept({"a": free, "b": busy, "c": {"kept": "it is another user's", "in_use": ""}})
    assert why["a"] == "not changed, since the environment is in use on b"
    assert why["b"].startswith("/opt/env is in use there by run x, and would change. Call again")
    assert why["c"] == "it is another user's"


def test_the_python_of_the_system_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(UsageError, match=r"the Python of this system .*`make horovod` makes one"):
        own_environment()


def test_the_python_that_made_an_environment_is_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: f"{tmp_path}/lib/site")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("python3")
    (tmp_path / "bin" / "python3").symlink_to("/usr/bin/python3")
    found = own_environment()
    assert (found.base, found.site) == (Path("/usr/bin/python3"), Path("lib/site"))
    assert found.package == Path(installing.__file__).parents[1]
    (tmp_path / "conda-meta").mkdir()
    assert own_environment().base is None
    (tmp_path / "condabin").mkdir()
    with pytest.raises(UsageError, match="conda's base environment"):
        own_environment()


def test_a_removed_package_goes_with_what_python_has_compiled_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with nothing else is still imported, as a namespace package."""
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("here/kept/a.py", "here/single", "there/kept/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("tensorflow", "single"):
        (there / name / "core" / "__pycache__").mkdir(parents=True)
        (there / name / "core" / "__pycache__" / "x.pyc").touch()
    extra: list[str] = []

    def compare(
        hosts: object, source: str, place: str, options: object, settings: CopySettings, *_: object
    ) -> list[Any]:
        patterns = list(settings.exclude)
        tree, _skipped = walk(os.fsencode(source), patterns)
        target = os.fsencode(place)
        plan = Comparison(target, tree, patterns, settings.delete, False, settings.passing)
        extra.extend(plan.extra)
        return []

    monkeypatch.setattr(installing, "copy_to_hosts", compare)
    environment = Environment(str(here), None, None, Path("lib"))
    Installation([Host("a")], environment, SshOptions())._copy([Host("a")], str(there))
    assert extra == ["tensorflow"]
