"""The system's programs that a virtual cluster is made with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from hvd_elastic.errors import VirtualClusterError

# A plain user's PATH often lacks the sbin folders.
_SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"]
)
_PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}


def find_tool(name: str) -> str:
    """Absolute path of a program (sshd insists on being called by one)."""
    path = shutil.which(name, path=_SEARCH_PATH)
    if path is None:
        raise VirtualClusterError(
            f"a virtual cluster needs the program '{name}', which is not installed; "
            f"install it with: sudo apt-get install {_PACKAGES[name]}"
        )
    return os.path.abspath(path)  # noqa: PTH100  # resolving links would lose busybox's names


def run_tool(argv: Sequence[str], *, text_in: str = "", timeout_s: float = 20.0) -> str:
    """Run a program to its end and return what it printed.

    Raises:
        VirtualClusterError: it failed; with its own words.
    """
    command = [find_tool(argv[0]), *argv[1:]]
    try:
        done = subprocess.run(
            command, input=text_in, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise VirtualClusterError(
            f"'{' '.join(argv)}' gave no answer for {timeout_s:g} s"
        ) from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").replace("\n", "; ")
        raise VirtualClusterError(f"'{' '.join(argv)}' failed: {words}")
    return done.stdout
