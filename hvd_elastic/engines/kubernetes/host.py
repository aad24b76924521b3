"""The process of a pod that is a host: dials back to the leader until that has no more use for it.

It is ``python -m`` this module, in the image of the run, with the path of the invitation.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hvd_elastic import __version__
from hvd_elastic.agent.preemption.notice import AFTER_SIGTERM
from hvd_elastic.engines.dial_in.hosts import HostProcess
from hvd_elastic.errors import RunError
from hvd_elastic.json_text import parse_json


def main() -> int:
    """Dial back, and return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first process of a pod ignores it
    invitation = parse_json(Path(sys.argv[1]).read_bytes())
    if invitation["version"] != __version__:
        sys.stderr.write(
            f"this image has hvd_elastic {__version__}, and that of the leader has "
            f"{invitation['version']}: use one image for both\n"
        )
        return 1
    variables = {AFTER_SIGTERM: f"{invitation['after_sigterm_s']:g}"}
    slots, name = invitation["slots"], os.environ.get("POD_NAME") or os.uname().nodename
    process = HostProcess(invitation, name, slots, variables)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        process.wait()
    except RunError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
