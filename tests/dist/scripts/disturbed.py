"""Runs a training script, and has a worker join it and another one die at a random line of it.

``disturbed.py PLAN SCRIPT ARGUMENTS…``, where PLAN is a JSON file with these fields:

``folder``      for marks: ``joined``, ``died`` with the place, ``ends.jsonl`` with each rank's end
``hostfile``    one that has rank 0 write it
``join``        after this step, with the text ``hosts``; steps wait until ``size`` ranks train
``die``         ``rank``, ``step`` (the first in which it may die), ``seed``, and ``everywhere``:
                whether lines of the library count too; or ``rank`` and ``epoch``: it dies before
                the first step of the epoch, when another worker is about to join in its place; or
                ``rank`` and ``save``: it dies where it would save the file of that name
"""

import hashlib
import json
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hvd_elastic
from hvd_elastic.checkpoint.saved import spool_file
from hvd_elastic.script import saving
from hvd_elastic.worker import context
from hvd_elastic.worker.metrics import Metrics
from hvd_elastic.worker.rollback import Rollback

plan = json.loads(Path(sys.argv[1]).read_text())
script = str(Path(sys.argv[2]).resolve())
folder = Path(plan["folder"])
LIBRARY = str(Path(hvd_elastic.__file__).parent)
LINES = {False: 25, True: 250}
"""Lines in which the victim dies on average: about two steps."""
STEPS = 3
"""After so many steps it dies in the next line."""
WAIT_S = 200.0


def wait_for(size, mark):
    """Wait until so many ranks train or are about to, the first time."""
    worker = context.current().worker
    end = time.monotonic() + WAIT_S
    while not mark.exists() and time.monotonic() < end:
        if worker.size >= size:
            mark.touch()
        link = worker.link
        if worker.wants_change or (link and link.aborted(worker.generation)):
            return
        time.sleep(0.01)


def join():
    """Have a worker join after a step, and wait until it is about to."""
    wait_for(2, folder / "both")  # on a busy machine one may be late for the start
    worker, joined = context.current().worker, folder / "joined"
    if "join" not in plan or worker.progress.step < plan["join"] or joined.exists():
        return
    if worker.rank == 0:
        Path(plan["hostfile"]).write_text(plan["hosts"])
    wait_for(plan["size"], joined)


class Death:
    """Traces lines, and ends this process in one of them if nobody has died yet."""

    def __init__(self, rank, step, seed, everywhere):
        self.rank, self.step, self.everywhere = rank, step, everywhere
        self.random = random.Random(seed)
        self.process = os.getpid()  # readers of data are forked from it

    def trace(self, frame, event, _):
        name = frame.f_code.co_filename
        counts = name == script or (self.everywhere and name.startswith(LIBRARY))
        return self.line if counts else None

    def line(self, frame, event, _):
        worker = context._context and context.current().worker
        if event == "line" and worker and worker.in_train and os.getpid() == self.process:
            step, ranks = worker.progress.step - self.step, worker.communicator
            if step >= 0 and ranks.size > 1 and ranks.rank == self.rank:
                if step >= STEPS or self.random.random() < 1 / LINES[self.everywhere]:
                    self.die(f"{frame.f_code.co_filename}:{frame.f_lineno}, step {step}")
        return self.line

    def die(self, place):
        try:
            with (folder / "died").open("x") as file:
                file.write(place)
        except FileExistsError:
            sys.settrace(None)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def die_between_epochs(rollback, *arguments, begin=Rollback.loop_begins, **options):
    """Die where the loop over the data of an epoch begins, once a newcomer waits to join."""
    worker, mark = context.current().worker, folder / "died"
    here = (worker.rank, worker.progress.epoch)
    if here == (plan["die"]["rank"], plan["die"]["epoch"]) and not mark.exists():
        Path(plan["hostfile"]).write_text(plan["hosts"])
        end = time.monotonic() + WAIT_S
        while not worker.wants_change and time.monotonic() < end:
            time.sleep(0.01)
        mark.write_text(f"before epoch {worker.progress.epoch}")
        os.kill(os.getpid(), signal.SIGKILL)
    return begin(rollback, *arguments, **options)


def die_in_save(folder, write, describe, *, spool=spool_file):
    """Die before a file is written that the other ranks have asked for too."""
    name, mark = describe(0, "").name, Path(plan["folder"], "died")
    if name == plan["die"]["save"] and not mark.exists():
        time.sleep(1.0)  # the others go on to the next epoch
        mark.write_text(f"in hvd.save({name!r})")
        os.kill(os.getpid(), signal.SIGKILL)
    return spool(folder, write, describe)


def tell_end():
    """Write a digest of what the optimizers train."""
    worker = context.current().worker
    state: Any = worker.state
    found = hashlib.sha256()
    content = state._live_content()
    for tensor, trained in zip(content.tensors, state._known(content), strict=True):
        for piece in state._pieces(tensor) if trained else ():
            found.update(piece().tobytes())
    rank = worker.rank
    line = json.dumps({"rank": rank, "digest": found.hexdigest()}) + "\n"
    with (folder / "ends.jsonl").open("a") as file:
        file.write(line)


def count_and_join(metrics, planned, *, count=Metrics.step_finished):
    count(metrics, planned)
    join()


if "join" in plan or "die" in plan:
    setattr(Metrics, "step_finished", count_and_join)  # noqa: B010
if "epoch" in plan.get("die", ()):
    setattr(Rollback, "loop_begins", die_between_epochs)  # noqa: B010
elif "save" in plan.get("die", ()):
    setattr(saving, "spool_file", die_in_save)  # noqa: B010
elif "die" in plan:
    sys.settrace(Death(**plan["die"]).trace)
sys.argv[:] = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
sys.settrace(None)
tell_end()
