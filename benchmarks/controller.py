"""The scaling controller in virtual time; see README.md here. Writes results/controller.json."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hvd_elastic.bench.controller import measure, table
from hvd_elastic.bench.figures import conditions, write_result

RESULT = Path(__file__).parent / "results" / "controller.json"
NOTE = "Virtual time: only how long a decision takes depends on this machine."

if __name__ == "__main__":
    load_before = os.getloadavg()
    found = measure(lambda what: print(what, file=sys.stderr))
    write_result(RESULT, "controller", conditions("the simulator", NOTE, load_before), found)
    print(table(found))
