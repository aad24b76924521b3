"""Files that are received over a connection that may break."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from hvd_elastic.errors import SshError
from hvd_elastic.hosts import transfer
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import ByteStream


class Remote:
    """A command that has ended well, of whose output the last bytes may not arrive.

    Args:
        lost: how many bytes of its output are lost.
        piece: most bytes that arrive at a time.
    """

    host = Host("gpu1")
    last_line = ""

    def __init__(self, lost: int, piece: int) -> None:
        self._lost, self._piece = lost, piece
        self.stdin: Any = self
        self.stdout: Any = self
        self._output = ByteStream()

    def start(self, command: list[str]) -> Remote:
        output = subprocess.run(command, capture_output=True, check=True).stdout
        self._output.put(b"welcome\n" + output[: len(output) - self._lost])
        self._output.mark_end()
        return self

    def read(self, size: int, timeout: float) -> bytes:
        return self._output.read(min(size, self._piece), timeout)

    def wait(self, _: float) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.mark.parametrize("content", [b"", b"loss 0.5\n", bytes(range(256)) * 20])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_file_that_arrives_in_pieces_is_whole(tmp_path, content: bytes, piece: int) -> None:
    (tmp_path / "log").write_bytes(content)
    remote: Any = Remote(0, piece)
    back = bytearray()
    transfer.receive_file(remote, str(tmp_path / "log"), back.extend)
    assert bytes(back) == content


@pytest.mark.parametrize("lost", [1, 30, 2000, 5000])
def test_a_file_whose_last_bytes_are_lost_is_an_error_though_it_was_sent(
    tmp_path, lost: int
) -> None:
    (tmp_path / "log").write_bytes(bytes(4096))
    remote: Any = Remote(lost, 1 << 20)
    with pytest.raises(SshError, match=r"^host gpu1: .*log cannot be fetched: the connection is"):
        transfer.receive_file(remote, str(tmp_path / "log"), lambda _: None)
