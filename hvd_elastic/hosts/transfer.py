"""Whole files over a host's connection, as one stream each.

sftp asks for a file in pieces of 32 KiB and answers each; here ``cat`` sends, and only the window
of the ssh channel holds it back. What arrived is proven by the SHA-256 of its manifest, not here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection

_CHUNK_BYTES = 1 << 20
_SILENCE_S = 60.0
# Shell start-up files may print before the command runs.
_MARK = b"\x01hvd-elastic-file\n"
_READ = 'printf "\\001hvd-elastic-file\\n" && exec cat -- "$1"'
# A cut connection looks like the end of the file: only a file of the right length gets its name.
_WRITE = (
    'umask 077; mkdir -p -- "$(dirname -- "$1")" && cat > "$1.part" && '
    'test "$(wc -c < "$1.part")" -eq "$2" && mv -- "$1.part" "$1" || '
    '{ rm -f -- "$1.part"; exit 1; }'
)


def receive_file(
    connection: Connection, remote: str, write: Callable[[bytes | memoryview], object]
) -> None:
    """Give ``write`` the content of a file of the host, piece by piece.

    Raises:
        SshError: it cannot be read there, or the connection is lost.
    """
    process = connection.start(["sh", "-c", _READ, "sh", remote])
    try:
        process.stdin.close()
        before = b""
        while _MARK not in before:
            chunk = process.stdout.read(_CHUNK_BYTES, _SILENCE_S)
            if not chunk:
                break
            before += chunk
        _, marked, first = before.partition(_MARK)
        if first:
            write(first)
        while marked and (chunk := process.stdout.read(_CHUNK_BYTES, _SILENCE_S)):
            write(chunk)
        status = process.wait(_SILENCE_S)
    except TimeoutError as error:
        raise _failed(connection, f"{remote} cannot be fetched: nothing came for 60 s") from error
    finally:
        process.close()
    if status != 0:
        said = process.last_line or "the connection is lost"
        raise _failed(connection, f"{remote} cannot be fetched: {said}")


def send_file(connection: Connection, local: Path, remote: str) -> None:
    """Copy a file to the host; it gets its name there when it is complete. Folders are made.

    Raises:
        SshError: it cannot be written there, or the connection is lost.
        OSError: it cannot be read here.
    """
    with local.open("rb", buffering=0) as file:
        size = local.stat().st_size
        process = connection.start(["sh", "-c", _WRITE, "sh", remote, str(size)])
        try:
            with contextlib.suppress(BrokenPipeError):  # its status says why it stopped reading
                while chunk := file.read(_CHUNK_BYTES):
                    process.stdin.write(chunk)
            process.stdin.close()
            status = process.wait(_SILENCE_S)
        except TimeoutError as error:
            raise _failed(connection, f"{remote} cannot be written: no answer for 60 s") from error
        finally:
            process.close()
    if status != 0:
        said = process.last_line or "the connection is lost"
        raise _failed(connection, f"{remote} cannot be written: {said}")


def _failed(connection: Connection, what: str) -> SshError:
    return SshError(f"host {connection.host.name}: {what}")
