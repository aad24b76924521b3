"""Send and receive whole files over a host's connection, each as one stream.

sftp requests a file in pieces of 32 KiB; here ``cat`` sends it, limited only by the window of the
ssh channel. The content is verified elsewhere, by the SHA-256 in the manifest of a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection

_CHUNK_BYTES = 1 << 20
# A transfer without any data for this time has failed.
_SILENCE_S = 60.0
# Marks the start of the file, since shell start-up files may print something before.
_START = b"\x01hvd-elastic-file\n"
# Marks its end: if the connection breaks while the last bytes are on their way, the exit status may
# have arrived before. A size could not tell that, since a file may change while it is read.
_END = b"\x01hvd-elastic-end\n"
_READ = 'printf "\\001hvd-elastic-file\\n" && cat -- "$1" && printf "\\001hvd-elastic-end\\n"'
# A lost connection looks like the end of the file, so the length is checked before the rename. Each
# call has a file of its own: two that wrote one would leave a hole in it, of the right length.
_WRITE = (
    'umask 077; part="$1.part.$$"; mkdir -p -- "$(dirname -- "$1")" && cat > "$part" && '
    'test "$(wc -c < "$part")" -eq "$2" && mv -- "$part" "$1" || { rm -f -- "$part"; exit 1; }'
)


def receive_file(
    connection: Connection, remote: str, write: Callable[[bytes | memoryview], object]
) -> None:
    """Pass the content of a file on the host to ``write``, piece by piece.

    Raises:
        SshError: it cannot be read, or the connection is lost.
    """
    process = connection.start(["sh", "-c", _READ, "sh", remote])
    try:
        process.stdin.close()
        before = b""
        while _START not in before:
            chunk = process.stdout.read(_CHUNK_BYTES, _SILENCE_S)
            if not chunk:
                break
            before += chunk
        _, started, data = before.partition(_START)
        while True:
            write(memoryview(data)[: -len(_END)])
            last = data[-len(_END) :]
            if not (started and (chunk := process.stdout.read(_CHUNK_BYTES, _SILENCE_S))):
                break
            data = last + chunk
        status = process.wait(_SILENCE_S)
        if status != 0 or last != _END:
            why = process.last_line if status else ""
            raise _failed(connection, f"{remote} cannot be fetched", why)
    except TimeoutError as error:
        raise _failed(connection, f"{remote} cannot be fetched", "nothing came for 60 s") from error
    finally:
        process.close()


def send_file(connection: Connection, local: Path, remote: str) -> None:
    """Copy a file to the host, renaming it into place when it is complete; creates folders.

    Raises:
        SshError: it cannot be written, or the connection is lost.
        OSError: it cannot be read here.
    """
    with local.open("rb", buffering=0) as file:
        size = local.stat().st_size
        process = connection.start(["sh", "-c", _WRITE, "sh", remote, str(size)])
        try:
            # The exit status shows why it stopped reading.
            with contextlib.suppress(BrokenPipeError):
                while chunk := file.read(_CHUNK_BYTES):
                    process.stdin.write(chunk)
            process.stdin.close()
            if process.wait(_SILENCE_S) != 0:
                raise _failed(connection, f"{remote} cannot be written", process.last_line)
        except TimeoutError as error:
            raise _failed(
                connection, f"{remote} cannot be written", "no answer for 60 s"
            ) from error
        finally:
            process.close()


def _failed(connection: Connection, what: str, why: str) -> SshError:
    return SshError(f"host {connection.host.name}: {what}: {why or 'the connection is lost'}")
