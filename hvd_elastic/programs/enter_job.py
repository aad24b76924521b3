"""Become a shell in the folder and with the environment of a run's processes on this host.

Sent as text by ``hvd-elastic shell``; standard library only. Arguments: run id, name of the host in
the hostfile. The variables by which a process counts as one of the run are left out.
"""

from __future__ import annotations

import os
import pwd
import sys

from hvd_elastic.programs.processes import all_processes, environment, real_uid


def main() -> None:
    """Find a process of the run, and become a shell like it."""
    run, host = sys.argv[1:3]
    for pid in sorted(all_processes()):
        if real_uid(pid) != os.getuid():  # root can read what any user has put there
            continue
        found = environment(pid)
        if (found.get("HVD_ELASTIC_RUN_ID"), found.get("HVD_ELASTIC_HOST")) != (run, host):
            continue
        try:
            os.chdir(os.readlink(f"/proc/{pid}/cwd"))  # noqa: PTH115
        except OSError:  # it has ended
            continue
        keeps = ("HVD_ELASTIC_HOME", "HVD_ELASTIC_CLUSTER")
        own = {k: v for k, v in found.items() if not k.startswith("HVD_ELASTIC_") or k in keeps}
        own["TERM"] = os.environ.get("TERM", "vt100")
        shell = os.environ.get("SHELL") or pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
        os.execve(shell, [shell, "-i"], own)
    sys.exit(f"run {run} has no process on host {host}: it has ended, or is about to start")
