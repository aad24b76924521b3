"""Runs the cluster tools as a user does, against eight hosts that are one private sshd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.programs.processes import read_process
from tests.paths import LIMIT_S
from tests.ssh.sshd import Sshd

NAMES = [f"node{number}" for number in range(1, 9)]
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


_PATIENT = ("--connect-timeout", "60")
"""A busy machine takes long for a login; tests of silent hosts give a shorter one after it."""


class Tools:
    """Runs the tools as a user does, against eight hosts that are one sshd."""

    def __init__(self, server: Sshd, folder: Path) -> None:
        self.folder = folder
        self.config = server.write_config(folder / "config", NAMES)
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("# all\nnode[1-8] slots=1\n")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "HVD_ELASTIC_HOME": str(folder / "home"),
            "HVD_ELASTIC_SSH_CONFIG": str(self.config),
        }
        self.environment.pop("SSH_AUTH_SOCK", None)

    def argv(self, tool: str, *arguments: str) -> list[str]:
        if tool == "trust":
            return [sys.executable, "-m", "hvd_elastic.cli.app", "trust", *_PATIENT, *arguments]
        program = f"from hvd_elastic.cli.cluster.tools import {tool}_main; {tool}_main()"
        return [sys.executable, "-c", program, *_PATIENT, *arguments]

    def __call__(
        self, tool: str, *arguments: str, text_in: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(tool, *arguments),
            capture_output=True,
            text=True,
            env={**self.environment, **environment},
            timeout=LIMIT_S,
            input=text_in,
        )


@pytest.fixture
def tools(server: Sshd, tmp_path: Path) -> Tools:
    return Tools(server, tmp_path)


def records(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["host"]: line for line in lines if line["kind"] == "host"}


def is_alive(pid: int) -> bool:
    return read_process(pid) is not None
