"""The lease of a machine of a cloud: it shuts the machine down, and a renewal delays that."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvd_elastic.programs import lease
from tests.waiting import until

Start = Callable[[float, float], "Machine"]


class Machine:
    """The program of a machine, whose ``shutdown`` leaves a file."""

    def __init__(self, folder: Path, lease_s: float, max_s: float) -> None:
        self.lease, self.kept, self._down = (folder / name for name in ("lease", "kept", "down"))
        for name in ("shutdown", "poweroff"):  # those of this machine must not be found
            program = folder / name
            program.write_text(
                f'#!/bin/sh\necho "$@" > {self._down}.new\n/bin/mv {self._down}.new {self._down}\n'
            )
            program.chmod(0o755)
        self.process = subprocess.Popen(
            [
                sys.executable,
                lease.__file__,
                self.lease,
                str(lease_s),
                str(max_s),
                getpass.getuser(),
                self.kept,
            ],
            env={**os.environ, "PATH": str(folder)},
        )

    def wait_down(self) -> str:
        while not self._down.exists():
            assert self.process.poll() is None
            time.sleep(0.05)
        return self._down.read_text().strip()

    def wait_read(self) -> None:
        """Wait until it has read a renewal, or the lease has ended before."""
        until(lambda: self.kept.exists() or self.is_down)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.lease, self.kept, self._down):
            file.unlink(missing_ok=True)

    @property
    def is_down(self) -> bool:
        return self._down.exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Machine] = []

    def start(lease_s: float, max_s: float) -> Machine:
        made.append(Machine(tmp_path, lease_s, max_s))
        return made[-1]

    yield start
    for each in made:
        each.end()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


@pytest.mark.parametrize(("lease_s", "max_s"), [(0.5, 600.0), (600.0, 0.5)])
def test_a_machine_shuts_down_at_the_end_of_its_lease_and_at_its_deadline(
    start, lease_s, max_s
) -> None:
    assert start(lease_s, max_s).wait_down() == "-h now"


def test_a_renewed_lease_keeps_a_machine_and_what_is_no_number_does_not(start) -> None:
    while True:
        began = time.monotonic()
        machine = start(4.0, 600.0)
        wait_for(machine.lease)
        renewed = time.monotonic()
        machine.lease.write_text("8\n")
        was_in_time = time.monotonic() < began + 4.0
        machine.wait_read()
        machine.lease.write_text("0\n")  # nor does a shorter one end it
        time.sleep(4.5)  # beyond the first lease
        was_down = machine.is_down
        if was_in_time and time.monotonic() < renewed + 8.0:
            break
        machine.end()  # else this process was held up until a lease had ended
    assert not was_down
    machine.lease.write_text("nonsense\n")
    machine.wait_down()


def test_a_renewal_is_read_though_it_comes_before_the_program_looks_for_the_first_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the connection does that writes one as soon as the file is there."""
    monkeypatch.setattr(sys, "argv", ["lease", str(tmp_path / "lease"), "1", "600", "root"])
    monkeypatch.setattr(os, "chown", lambda path, *_: Path(path).write_text("3\n"))
    asleep: list[float] = []
    monkeypatch.setattr(lease, "_now", lambda: sum(asleep))
    monkeypatch.setattr(time, "sleep", asleep.append)

    def shutdown(_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(subprocess, "call", shutdown)
    with pytest.raises(SystemExit):
        lease.main()
    assert sum(asleep) == 3.0


def test_a_renewed_lease_outlasts_a_reboot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept, wall = str(tmp_path / "kept"), 1000.0
    monkeypatch.setattr(sys, "argv", ["lease", str(tmp_path / "lease"), "1", "600", "root", kept])
    asleep: list[float] = []
    monkeypatch.setattr(lease, "_now", lambda: sum(asleep))
    monkeypatch.setattr(time, "sleep", asleep.append)
    monkeypatch.setattr(time, "time", lambda: wall)

    def shutdown(_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(subprocess, "call", shutdown)
    for renewal, lasts_s in (("9\n", 9.0), ("", 7.0)):  # before the reboot, and after it
        monkeypatch.setattr(os, "chown", lambda path, *_, text=renewal: Path(path).write_text(text))
        with pytest.raises(SystemExit):
            lease.main()
        assert sum(asleep) == lasts_s
        del asleep[:]
        wall += 2.0


def test_no_renewal_reaches_beyond_the_deadline(start) -> None:
    machine = start(2.0, 4.0)
    wait_for(machine.lease)
    machine.lease.write_text("600\n")
    machine.wait_down()


def test_only_root_and_its_user_may_write_the_lease(start) -> None:
    machine = start(600.0, 600.0)
    wait_for(machine.lease)
    until(lambda: machine.lease.stat().st_mode & 0o077 == 0)
    assert machine.lease.owner() == getpass.getuser()
