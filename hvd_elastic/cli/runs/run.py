"""``hvd-elastic run``: starts or resumes a run and leads it, in the foreground or background."""

from __future__ import annotations

import os
import sys

import typer

from hvd_elastic.cli.jobs.naming import run_id_of
from hvd_elastic.cli.options import command, given_options
from hvd_elastic.cli.runs.leading import lead, lead_in_background
from hvd_elastic.cli.runs.run_options import RunOptions, check_ssh_config
from hvd_elastic.engines.base import INSIDE
from hvd_elastic.errors import UsageError
from hvd_elastic.leader.resuming import Resumption
from hvd_elastic.records.run_folder import RunFolder

# Parameters that may be given with --resume; the run keeps all others from its start.
_WITH_RESUME = {
    *("resume", "command", "hostfile", "ssh_config", "np", "max_np", "detach", "as_json"),
}


@command(RunOptions, pass_on=True)
def run(options: RunOptions, context: typer.Context) -> None:
    """Train a script on the hosts of a hostfile, elastically.

    The script imports [bold]hvd_elastic.torch[/bold], or the modules for TensorFlow and Keras.
    Edit the hostfile during the run to add or remove hosts; a host that fails is left out and used
    again when it answers.

    Examples:
      hvd-elastic run -- python train.py

      hvd-elastic run --hostfile hosts -- python train.py --lr 0.1

      hvd-elastic run -H hosts --np 8 --min-np 4 --run-id resnet -- python train.py

      hvd-elastic run -H hosts --max-np 16 --policy goodput -- python train.py

      hvd-elastic run --resume resnet

    Exit status: 0 if training finished, 1 if it failed, 2 for wrong usage, 130 if it was stopped.
    """
    resumed = options.resume is not None
    if options.resume is not None:
        _check_resume_options(context)
        check_ssh_config(options.ssh_config)
        resumption = Resumption(
            run_id_of(options.resume),
            options.hostfile,
            options.ssh_config,
            options.np,
            options.max_np,
            options.command or (),
        )
        folder = resumption.find_folder(lambda line: print(line, file=sys.stderr))
        spec = resumption.spec_of(folder, [*INSIDE], options.hosts)
    else:
        from hvd_elastic.checkpoint.place import check_new_place

        options.check()
        spec = options.spec()
        if options.mpi:
            from hvd_elastic.leader.mpi import run_mpi

            raise typer.Exit(run_mpi(spec, os.environ))
        if spec.checkpoint_folder is not None:
            check_new_place(spec.checkpoint_folder)  # before the run id is in use
        folder = RunFolder.create(options.run_id, spec.as_dict())
        if size := options.says_size():
            print(size, file=sys.stderr)
    if options.detach:
        lead_in_background(spec, folder, resumed=resumed)
        return
    made_now = folder.began_elsewhere and not folder.events.exists()
    as_json = options.as_json
    status = lead(spec, folder, resumed=resumed, as_json=as_json, forget=made_now)
    raise typer.Exit(status)


def _check_resume_options(context: typer.Context) -> None:
    """Raise UsageError for options that a resumed run would otherwise ignore."""
    for name, flag in given_options(context).items():
        if name not in _WITH_RESUME:
            raise UsageError(
                f"{flag} cannot be given with --resume: the run keeps what it was "
                "started with. Valid beside --resume: --hostfile, --ssh-config, --np, "
                "--max-np, --detach, --json."
            )
