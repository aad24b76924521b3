"""Runs a script of others as it is, with ranks that die; arguments: folder, script, its arguments.

The variable KILLS is a list of [place, epoch, rank]; see ``killing.py``.
"""

import runpy
import sys

import lightning.pytorch as pl
from killing import may_die, wait_for_the_next_to_die


class Faults(pl.Callback):
    """A callback that each Trainer of the script has."""

    def on_train_batch_start(self, *_):
        wait_for_the_next_to_die()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 5 == 4:
            may_die(trainer, "after the step")

    def on_validation_batch_start(self, trainer, *_):
        may_die(trainer, "validation")


if __name__ == "__main__":
    connector = pl.trainer.connectors.callback_connector._CallbackConnector
    initialise = connector.on_trainer_init

    def add_faults(self, *args, **options):
        initialise(self, *args, **options)
        self.trainer.callbacks.insert(0, Faults())

    connector.on_trainer_init = add_faults
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
