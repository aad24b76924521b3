"""Read the ssh configuration, with its ``Include`` lines, and find what it says about a host."""

from __future__ import annotations

import functools
import glob
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_elastic.errors import SshError, StrangerError
from hvd_elastic.own_files import check_configuration

if TYPE_CHECKING:
    from paramiko import SSHConfig


USER_CONFIG = "~/.ssh/config"
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
# The limit of OpenSSH, which also ends files that include themselves.
MAX_INCLUDE_DEPTH = 16
VIRTCLUST_MARK = "# Written by virtclust."
"""First line of the ssh configuration of a virtual cluster."""

_NAME = re.compile(r"[\w.:-]+")
_EVERY_HOST = "Host *"
_KEYWORD = re.compile(r"\s*(?P<key>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<value>.*)")


def load_ssh_config(
    config_path: Path | None,
    host: str | None = None,
    port: int | None = None,
    user: str | None = None,
) -> SSHConfig:
    """Return the user's and the system's configuration, or only the given file (as ``ssh -F``).

    Args:
        config_path: the only file to read, or None.
        host: host that will be looked up; blocks for other hosts are left out. None for all.
        port, user: what counts more than the configuration, also where that writes %p and %r.

    Raises:
        SshError: ``config_path`` cannot be read, others can write a file, or paramiko cannot parse
            one.
    """
    from paramiko.ssh_exception import ConfigParseError

    text = read_config_text(config_path)
    given = {"Port": port, "User": user}
    before = [f"{key} {value}\n" for key, value in given.items() if value is not None]
    where = str(config_path) if config_path else f"{USER_CONFIG} or {SYSTEM_CONFIG}"
    try:
        return _parse("".join(before) + (text if host is None else _narrow(text, host)))
    except (ConfigParseError, ValueError) as error:
        raise SshError(
            f"ssh configuration {where}: {error}. Fix the line, or give a configuration of its "
            "own with --ssh-config"
        ) from error


def _narrow(text: str, host: str) -> str:
    """Return the text without the blocks that are only about other hosts.

    paramiko looks up the user's name for each block of another host, which would take 5 ms for
    each of 128 hosts.
    """
    always, named = _blocks(text)
    chosen = {**always, **named.get(host, {})}
    return "\n".join(chosen[at] for at in sorted(chosen))


@functools.lru_cache(maxsize=8)
def _blocks(text: str) -> tuple[dict[int, str], dict[str, dict[int, str]]]:
    """Return blocks by position: those that may match any host, and by name those for that host."""
    always: dict[int, str] = {}
    named: dict[str, dict[int, str]] = {}
    canonical = "canonicalizehostname" in text.lower()
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        match = _KEYWORD.match(line)
        if match is not None and match["key"].lower() in ("host", "match"):
            blocks.append([])
        blocks[-1].append(line)
    for at, lines in enumerate(blocks):
        match = _KEYWORD.match(lines[0]) if lines else None
        names = match["value"].split() if match and match["key"].lower() == "host" else []
        # The canonical name of a host, by which blocks may match as well, is not known here.
        if names and not canonical and all(_NAME.fullmatch(name) for name in names):
            for name in names:
                named.setdefault(name, {})[at] = "\n".join(lines)
        else:
            always[at] = "\n".join(lines)
    return always, named


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> SSHConfig:
    """Parse a text once for all hosts that have the same one; look-ups do not change the result."""
    from paramiko import SSHConfig

    return SSHConfig.from_text(text)


def read_config_text(config_path: Path | None) -> str:
    """Return the configuration as one text, with ``Include`` lines replaced by their files."""
    if config_path is not None:
        path = config_path.expanduser()
        try:
            return _inline(path, _read(path), 0)
        except OSError as error:
            raise SshError(
                f"ssh configuration {config_path} cannot be read: {error.strerror}. "
                "Give an existing file with --ssh-config, or leave it out to use ~/.ssh/config"
            ) from error
    parts = []
    for name in (USER_CONFIG, SYSTEM_CONFIG):
        path = Path(name).expanduser()
        try:
            parts.append(_inline(path, _read(path), 0))
        except OSError:
            continue
    # ssh uses the first value found, so the user's file comes first. "Host *" ends its last block.
    return "\nHost *\n".join(parts)


def _read(path: Path) -> str:
    """Return the text of a file, in which a ProxyCommand would run as this user.

    Raises:
        SshError: other users can write it.
        OSError: it cannot be read.
    """
    try:
        check_configuration(path)
    except StrangerError as error:
        raise SshError(f"ssh configuration {error}") from None
    return path.read_text(encoding="utf-8", errors="replace")


def _inline(path: Path, text: str, depth: int, outer: str = _EVERY_HOST) -> str:
    """Replace ``Include`` lines, which paramiko does not support, by their files.

    ``outer`` is the Host or Match line that contains the text: the text's own blocks then apply
    only to hosts that this line matches too.
    """
    if outer == _EVERY_HOST and "include" not in text.lower():
        return text
    lines, block = [], outer
    for line in text.splitlines():
        match = _KEYWORD.match(line)
        key = match["key"].lower() if match else ""
        if key in ("host", "match"):
            line = block = _both(outer, line)
        if match is None or key != "include" or depth >= MAX_INCLUDE_DEPTH:
            lines.append(line)
            continue
        folder = Path("~/.ssh").expanduser()
        if not path.is_relative_to(Path.home()) and path.is_relative_to("/etc"):
            folder = Path("/etc/ssh")
        for pattern in match["value"].replace('"', "").split():
            for name in sorted(glob.glob(os.path.join(folder, Path(pattern).expanduser()))):  # noqa: PTH118, PTH207  # absolute patterns too
                included = Path(name)
                try:
                    inner = _read(included)
                except OSError:
                    continue
                lines.append(_inline(included, inner, depth + 1, block))
        # A block that an included file opens ends with the file.
        lines.append(block)
    return "\n".join(lines)


def _both(outer: str, inner: str) -> str:
    """Return the header line of a block for hosts that match both lines."""
    if outer == _EVERY_HOST:
        return inner
    criteria = [each for each in (_criteria(outer), _criteria(inner)) if each.lower() != "all"]
    return f"Match {' '.join(criteria) or 'all'}"


def _criteria(line: str) -> str:
    """Return the criteria of a Host or Match line in the form of a Match line."""
    match = _KEYWORD.match(line)
    assert match is not None
    if match["key"].lower() == "match":
        return match["value"].strip()
    return f"originalhost {','.join(match['value'].split())}"


def config_beside(hostfile: Path) -> Path | None:
    """Return the ssh configuration that virtclust wrote next to this hostfile, or None.

    A file of another user is ignored, since a ProxyCommand in it would run as the current user.
    """
    path = hostfile.expanduser().absolute().with_name("ssh_config")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            own = os.fstat(file.fileno()).st_uid == os.geteuid()
            return path if own and file.readline().startswith(VIRTCLUST_MARK) else None
    except OSError:
        return None


def has_entry(text: str, name: str) -> bool:
    """Return whether a Host line is about this name in particular, which ``Host *`` is not."""
    for line in text.splitlines():
        match = _KEYWORD.match(line)
        if match is None or match["key"].lower() != "host":
            continue
        patterns = match["value"].replace('"', "").split("#", 1)[0].split()
        if any(
            fnmatchcase(name, pattern) for pattern in patterns if pattern.strip("*?") and pattern
        ):
            return True
    return False


def known_hosts_files(entry: dict[str, str]) -> list[Path]:
    """Return the user's and the system's known_hosts files for a host with this entry."""
    user = entry.get("userknownhostsfile")
    names = user.split() if user else ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
    names += entry.get("globalknownhostsfile", GLOBAL_KNOWN_HOSTS).split()
    home = str(Path.home())
    return [
        Path(name.strip('"').replace("%d", home)).expanduser()
        for name in names
        if name.lower() != "none"
    ]


def ssh_config_for(hostfile: Path | None, ssh_config: Path | None) -> str | None:
    """Return the path of the ssh configuration; None: the user's own.

    It is the given one, else the one beside the hostfile of a virtual cluster.
    """
    if ssh_config is None and hostfile is not None:
        ssh_config = config_beside(hostfile)
    return None if ssh_config is None else str(ssh_config.expanduser().absolute())
