"""The guide: its commands run on virtual hosts, and print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.running import Stage
from tests.paths import LIMIT_S, LITTLE_WORK, ROOT, WORKER_PYTHONPATH

pytestmark = pytest.mark.dist
_FENCE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBERS = re.compile(r"\d[\d,.:]*(?: (?=[kMG]?B))?[kMG]?")
_LEFT_OUT = "…"


def calls() -> Iterator[tuple[str, list[str]]]:
    """Commands of the guide, each with the lines that it shows."""
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    for fence in _FENCE.findall(text):
        command = ""
        shown: list[str] = []
        for line in fence.splitlines():
            if line.startswith("$ "):
                if command:
                    yield command, shown
                command, shown = line[2:], []
            elif command.endswith("\\"):
                command = command[:-1].rstrip() + " " + line.strip()
            else:
                shown.append(line)
        yield command, shown


def shape(line: str) -> str:
    """A line without its numbers, times and the plural of words, which differ from run to run."""
    line = re.sub(r"\b[0-9a-f]{12,}\b", "#", line)
    line = re.sub(r"\b[mµ]s\b", "s", line)
    return re.sub(r"(\w)s\b", r"\1", " ".join(_NUMBERS.sub("#", line).split()))


def test_every_command_prints_what_the_guide_shows(stage: Stage) -> None:
    pytest.importorskip("PIL", reason="Pillow draws the pictures")
    stage.boot_all()
    folder = stage.folder / f"guide-{os.getpid()}"
    folder.mkdir()
    for name in ("scripts", "datasets_prep"):
        (folder / name).symlink_to(ROOT / name)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
    own = {
        "HVD_ELASTIC_HOME": str(folder / "home"),
        "HVD_ELASTIC_SSH_CONFIG": str(stage.cluster.ssh_config),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": WORKER_PYTHONPATH,
        "COLUMNS": "120",
    }
    try:
        _follow_guide(stage, folder, {**kept, **LITTLE_WORK, **own})
    finally:  # a run that goes on in the background would be in the way of the tests after this one
        end = [sys.executable, "-m", "hvd_elastic.cli.app", "stop", "net"]
        subprocess.run(end, env={**kept, **own}, capture_output=True, timeout=LIMIT_S)


def _follow_guide(stage: Stage, folder: Path, environment: dict[str, str]) -> None:
    told: list[str] = []
    for command, shown in calls():
        here = command
        for number, host in enumerate(stage.hosts, 1):
            here = re.sub(rf"\bnode{number}\b", host, here)
        done = subprocess.run(
            ["bash", "-c", here],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env=environment,
            timeout=900,
        )
        said = done.stdout
        for number, host in enumerate(stage.hosts, 1):
            said = said.replace(host, f"node{number}")
        said = said.replace(str(folder / "home"), "~/.hvd_elastic").replace(f"{folder}/", "")
        # A process of PyTorch's loader that is ended on a busy machine may leave shared memory.
        said = re.sub(r", \d+ left behind removed \(.*\)", "", said)
        told.append(f"$ {command}\n{said}")
        record = "\n".join(told)
        assert done.returncode == 0, (
            f"{shlex.quote(command)} ended with {done.returncode}:\n{record}"
        )
        printed = iter(map(shape, said.splitlines()))
        for line in shown:
            if line != _LEFT_OUT:
                assert shape(line) in printed, f"not printed: {line}\n{record}"
    accuracies = r"(top-1 accuracy [\d.]+, top-5 [\d.]+)"
    record = "\n".join(told)
    passes = re.findall(rf"\] pass \d+: loss [\d.]+, {accuracies}", record)
    evaluated = re.findall(rf"\] {accuracies}, loss", record)
    assert passes
    assert evaluated == passes[-1:], f"the newest checkpoint is that of the last pass\n{record}"
