"""Define ``hvd-elastic``: the table of its commands, each of which is imported when it is called.

``hvd-elastic --help`` must answer at once even if torch and fabric lie on a slow disk. So the table
holds each command's module and summary, and the module is imported only to run the command or to
show its own help.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import typer
import typer.core
import typer.main

from hvd_elastic import __version__
from hvd_elastic.cli.entry import enter, prepare
from hvd_elastic.cli.start import end_at_interrupt, raise_at_interrupt

SECTIONS = {
    "Running": {
        "run": ("runs.run:run", "Train a script over a hostfile."),
        "slurm": ("engines.slurm:slurm", "Submit a run to Slurm."),
        "k8s": ("engines.kubernetes:k8s", "Submit a run to Kubernetes."),
        "cloud": ("engines.cloud:cloud", "Start machines of a cloud, and end them."),
        "stop": ("runs.control:stop", "End a run cleanly."),
        "scale": ("runs.control:scale", "Set the number of workers of a run."),
        "debug": ("runs.control:debug", "Join a worker that stands at breakpoint()."),
        "drain": ("runs.control:drain", "Have all jobs of the cluster, or a run, leave a host."),
        "policy": ("runs.control:policy", "Pause or resume the policy of a run."),
        "simulate": ("planning.simulate:simulate", "Try a policy on a trace in virtual time."),
    },
    "Sharing a cluster": {
        "up": ("jobs.daemon:up", "Share a cluster between jobs: start its daemon."),
        "down": ("jobs.daemon:down", "End the daemon of a cluster."),
        "hosts": ("jobs.daemon:hosts", "Show the hosts of a cluster and their jobs."),
        "submit": ("jobs.submit:submit", "Put a job into the queue of a cluster."),
        "queue": ("jobs.queue:queue", "List the jobs of a cluster."),
        "why": ("jobs.queue:why", "Say why a job waits, or has its slots."),
        "wait": ("jobs.queue:wait", "Wait until jobs have ended."),
        "history": ("jobs.history:history", "Say what jobs took, by job, user or month."),
        "cancel": ("jobs.queue:cancel", "Cancel jobs."),
        "requeue": ("jobs.queue:requeue", "Put jobs back into the queue."),
        "undrain": ("jobs.daemon:undrain", "Give a drained host of the cluster back."),
        "hold": ("jobs.queue:hold", "Hold jobs back until they are released."),
        "release": ("jobs.queue:release", "Release held jobs."),
        "priority": ("jobs.queue:priority", "Change the priority of jobs."),
        "search": ("jobs.search:search", "Try hyperparameters, each trial a job of the queue."),
        "limits": ("jobs.limits:limits", "Show what each user has, and may have at a time."),
    },
    "Monitoring and results": {
        "status": ("runs.show:status", "Say how a run is doing."),
        "list": ("runs.show:list_", "List runs, newest first."),
        "logs": ("runs.show:logs", "Show or follow the workers' output."),
        "shell": ("runs.shell:shell", "Open a terminal where a job runs."),
        "predict": ("runs.predict:predict", "Compute a model's outputs for a data set."),
        "get": ("runs.export:get", "List or copy files that a script saved."),
        "export": ("runs.export:export", "Write a run's weights for other programs."),
        "dashboard": ("views.dashboard:dashboard", "Serve live pages of the runs."),
        "top": ("views.dashboard:top", "Show a run live."),
        "attach": ("runs.show:attach", "Follow a detached run."),
        "report": ("views.dashboard:report", "Summarise and plot a run."),
        "plan": ("planning.plan:plan", "Predict what other numbers of hosts would bring."),
        "discover": (
            "runs.show:discover",
            "Print a run's hosts as horovodrun --host-discovery-script reads them.",
        ),
    },
    "Hosts": {
        "trust": ("cluster.check:trust", "Show and accept the host keys of a hostfile."),
        "install": (
            "cluster.install:install",
            "Bring this environment to the hosts of a hostfile, or upgrade it there.",
        ),
        "uninstall": ("cluster.install:uninstall", "List and remove what is installed."),
        "ray": ("engines.ray:ray", "Start and end a Ray cluster on the hosts of a hostfile."),
        "cluster": (
            "cluster.tools:cluster",
            "Run, copy, kill and check on all hosts of a hostfile.",
        ),
    },
    "This machine": {
        "doctor": ("machine.doctor:doctor", "Say what is installed, built and missing."),
        "report-bug": (
            "machine.report_bug:report_bug",
            "Gather what a report of a fault needs, without secrets.",
        ),
        "build-horovod": (
            "cluster.install:build_horovod",
            "Build Horovod for this PyTorch and TensorFlow, once.",
        ),
        "bench": (
            "planning.bench:bench",
            "Measure how training scales, and how fast a script reads.",
        ),
        "demo": ("machine.virtclust:demo", "Train on virtual hosts that come, go and die."),
    },
}
"""Commands by section of ``--help`` and of docs/commands.md: where each is, and its line there."""

COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}
_SECTION_OF = {name: title for title, section in SECTIONS.items() for name in section}


def load_command(name: str) -> Any:
    """Import the module of a command and return the command ready to be invoked."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    end_at_interrupt()
    try:
        target = getattr(importlib.import_module(f"hvd_elastic.cli.{module}"), attribute)
        from hvd_elastic.cli.options import as_command
    finally:
        raise_at_interrupt()
    return prepare(as_command(name, target))


class LazyGroup(typer.core.TyperGroup):
    """Command group that uses stubs for the list of commands and imports a command to call it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        section = _SECTION_OF.get(cmd_name)
        return typer.core.TyperCommand(cmd_name, help=entry[1], rich_help_panel=section)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # For a mistyped name Typer suggests a similar one of these.
        self.commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest


app = typer.Typer(
    cls=LazyGroup,
    help="Elastic data-parallel training on Horovod, over the hosts of a hostfile.",
    epilog=(
        "Example: hvd-elastic run --hostfile hosts --min-np 2 -- python train.py\n\n"
        "A command's own help: hvd-elastic COMMAND --help"
    ),
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"hvd-elastic {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="print the version"
    ),
) -> None:
    """Elastic data-parallel training on Horovod, over the hosts of a hostfile."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``hvd-elastic``."""
    enter("hvd-elastic", typer.main.get_command(app), argv)


if __name__ == "__main__":
    main()
