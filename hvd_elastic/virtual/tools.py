"""Find and run the system programs that virtual clusters need."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from hvd_elastic.errors import VirtualClusterError

# The PATH of a user who is not root often lacks the sbin folders.
_SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"]
)
_LIMIT_S = 20.0  # far above what any of them takes
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
    """Return the absolute path of a program; sshd must be started by one."""
    path = shutil.which(name, path=_SEARCH_PATH)
    if path is None:
        raise VirtualClusterError(
            f"a virtual cluster needs the program '{name}', which is not installed; "
            f"install it with: sudo apt-get install {_PACKAGES[name]}"
        )
    # Resolving links would lose the name by which busybox knows the program.
    return os.path.abspath(path)  # noqa: PTH100


def run_tool(argv: Sequence[str], *, text_in: str = "") -> str:
    """Run a program and return its output.

    Raises:
        VirtualClusterError: it failed or timed out; with its error output.
    """
    command = [find_tool(argv[0]), *argv[1:]]
    try:
        done = subprocess.run(
            command, input=text_in, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise VirtualClusterError(
            f"'{' '.join(argv)}' gave no answer for {_LIMIT_S:g} s"
        ) from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").replace("\n", "; ")
        raise VirtualClusterError(f"'{' '.join(argv)}' failed: {words}")
    return done.stdout
