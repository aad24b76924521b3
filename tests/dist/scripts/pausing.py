"""Runs a script whose sleeps last while a file is there: ``pausing.py FILE SCRIPT [ARG]...``."""

import runpy
import sys
import time
from pathlib import Path

pause = Path(sys.argv[1])
sleep = time.sleep


def sleep_on(seconds):
    sleep(seconds)
    # Those of other modules are none of the script's.
    while sys._getframe(1).f_globals.get("__name__") == "__main__" and pause.exists():
        sleep(0.02)


time.sleep = sleep_on
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
