"""Become a shell in the folder and with the environment of a run's processes on this host.

Sent as text by ``hvd-elastic shell``; standard library only. Arguments: run id, name of the host in
the hostfile. The variables by which a process counts as one of the run are left out.
"""

import os
import pwd
import sys


def main(run: str, host: str) -> None:
    """Find a process of the run, and become a shell like it."""
    for pid in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):  # noqa: PTH208
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
            found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}
            if (found.get("HVD_ELASTIC_RUN_ID"), found.get("HVD_ELASTIC_HOST")) != (run, host):
                continue
            os.chdir(os.readlink(f"/proc/{pid}/cwd"))  # noqa: PTH115
        except OSError:  # it has ended, or is another user's
            continue
        keeps = ("HVD_ELASTIC_HOME", "HVD_ELASTIC_CLUSTER")
        own = {k: v for k, v in found.items() if not k.startswith("HVD_ELASTIC_") or k in keeps}
        own["TERM"] = os.environ.get("TERM", "vt100")
        shell = os.environ.get("SHELL") or pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
        os.execve(shell, [shell, "-i"], own)
    sys.exit(f"run {run} has no process on host {host}: it has ended, or is about to start")


if __name__ == "__main__":
    main(*sys.argv[1:3])
