"""Units of this user's manager of systemd: daemons and keepers come back after a reboot."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.replaced_files import write_whole

_KEPT = ("HVD_ELASTIC_HOME", "PYTHONPATH", "PATH")
"""Variables that the process has after a reboot as well."""


def write_unit(place: ClusterFolder, what: str, command: Sequence[str]) -> None:
    """Have a process start when this user's manager does, if there is one now; tell what it needs.

    Args:
        what: ``daemon`` or ``keeper``.
        command: what starts it, and stays in the foreground.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if not (Path(runtime) / "systemd" / "private").exists():
        return
    path = _path(place, what)
    text = _text(place, what, command)
    with contextlib.suppress(OSError, ValueError):
        if path.read_text(encoding="utf-8") == text:
            return
    link = path.parent / "default.target.wants" / path.name
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    except OSError as error:
        print(
            f"{path} cannot be written, so after a reboot the {what} of cluster {place.name} is "
            f"not started: {error.strerror}",
            file=sys.stderr,
        )
        return
    if not Path("/var/lib/systemd/linger", getpass.getuser()).exists():
        print(
            f"after a reboot the {what} of cluster {place.name} starts when you log in; to have "
            "it start with the machine: loginctl enable-linger",
            file=sys.stderr,
        )


def remove_unit(place: ClusterFolder, what: str) -> None:
    """Have a process not start any more."""
    path = _path(place, what)
    with contextlib.suppress(OSError):
        for each in (path.parent / "default.target.wants" / path.name, path):
            each.unlink(missing_ok=True)


def _path(place: ClusterFolder, what: str) -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    name = f"hvd-elastic-{what}-{place.keeper.name}.service"
    return Path(folder).expanduser() / "systemd" / "user" / name


def _text(place: ClusterFolder, what: str, command: Sequence[str]) -> str:
    lines = [
        f"Environment={_quoted(f'{name}={os.environ[name]}')}"
        for name in _KEPT
        if os.environ.get(name)
    ]
    return "\n".join(
        [
            "[Unit]",
            f"Description=hvd-elastic: {what} of cluster {place.name}",
            "[Service]",
            *lines,
            f"ExecStart={' '.join(_quoted(each).replace('$', '$$') for each in command)}",
            "# What leads the jobs outlives it.",
            "KillMode=process",
            "Restart=on-failure",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def _quoted(text: str) -> str:
    r"""Return text as one word of a unit.

    >>> print(_quoted('a "b" 100%'))
    "a \"b\" 100%%"
    """
    return '"' + re.sub(r'(["\\])', r"\\\1", text).replace("%", "%%").replace("\n", "\\n") + '"'
