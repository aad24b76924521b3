"""Runs a script of others as it is, with ranks that die; arguments: folder, script, its arguments.

The variable KILLS is a list of [place, epoch, rank]; see ``killing.py``.
"""

import os
import runpy
import sys
from pathlib import Path

import transformers
from killing import may_die_in_epoch, wait_for_the_next_to_die


class Faults(transformers.TrainerCallback):
    """A callback that each Trainer of the script has."""

    def on_step_begin(self, args, state, control, **_):
        wait_for_the_next_to_die()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % 5 == 4:
            may_die_in_epoch(int(state.epoch), "after the step")

    def on_evaluate(self, args, state, control, **_):
        may_die_in_epoch(int(state.epoch), "evaluation")


if __name__ == "__main__":
    transformers.trainer.DEFAULT_CALLBACKS.append(Faults)
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    os.chdir(sys.path[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
