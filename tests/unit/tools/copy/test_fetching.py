"""A file of each host, fetched to this machine."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.transfer import receive_file
from hvd_elastic.tools.copy import fetching
from hvd_elastic.tools.copy.fetching import fetch_from_each


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o644, 0o644), (0o4777, 0o755)])
def test_a_private_file_stays_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, expected: int
) -> None:
    source, folder = tmp_path / "key", tmp_path / "fetched"
    source.write_bytes(b"secret")
    source.chmod(mode)
    modes: list[int] = []

    def receive(connection: Any, remote: str, write: Callable[..., object]) -> None:
        receive_file(connection, remote, write)
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in folder.glob(".tmp-*"))

    monkeypatch.setattr(fetching, "receive_file", receive)
    (result,) = fetch_from_each([Host("localhost")], str(source), folder, SshOptions())
    assert result.ok, result.error
    assert modes == [0o600], "while it arrives"
    assert result.answer.path.read_bytes() == b"secret"
    assert stat.S_IMODE(result.answer.path.stat().st_mode) == expected
