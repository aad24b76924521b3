"""Runs a training script, and has a worker join it and another one die at a random line of it.

``disturbed.py PLAN SCRIPT ARGUMENTS…``, where PLAN is a JSON file with these fields:

``folder``      for marks: ``joined``, ``died`` with the place, ``ends.jsonl`` with each rank's end
``hostfile``    one that has rank 0 write it
``join``        after this step, with the text ``hosts``; steps wait until ``size`` ranks train
``die``         ``rank``, ``step`` (the first in which it may die), ``seed``, and ``everywhere``:
                whether lines of the library count too
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

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import hvd_elastic.torch as hvd
from hvd_elastic.training import context

plan = json.loads(Path(sys.argv[1]).read_text())
script = str(Path(sys.argv[2]).resolve())
folder = Path(plan["folder"])
LIBRARY = str(Path(hvd.__file__).parents[1])
LINES = {False: 25, True: 250}
"""Lines in which the victim dies on average: about two steps."""
STEPS = 3
"""After so many steps it dies in the next line."""
WAIT_S = 60.0


def join(*_):
    """Have a worker join after a step, and wait until it is about to."""
    worker, joined = context.current().worker, folder / "joined"
    if worker.progress.step < plan["join"] or joined.exists():
        return
    if worker.communicator.rank == 0:
        Path(plan["hostfile"]).write_text(plan["hosts"])
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if worker.communicator.size >= plan["size"]:
            joined.touch()
        link = worker.link
        if joined.exists() or worker.wants_change or (link and link.aborted(worker.generation)):
            return
        time.sleep(0.01)


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


def tell_end():
    """Write a digest of what the optimizers train."""
    state: Any = context.current().worker.state
    found = hashlib.sha256()
    for _, optimizer in sorted(state.named_optimizers().items()):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kept = [v for _, v in sorted(optimizer.state.get(parameter, {}).items())]
                for value in [parameter.detach(), *filter(torch.is_tensor, kept)]:
                    found.update(value.numpy().tobytes())
    line = json.dumps({"rank": hvd.rank(), "digest": found.hexdigest()}) + "\n"
    with (folder / "ends.jsonl").open("a") as file:
        file.write(line)


if "join" in plan:
    register_optimizer_step_post_hook(join)
if "die" in plan:
    sys.settrace(Death(**plan["die"]).trace)
sys.argv[:] = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
sys.settrace(None)
tell_end()
