"""Define ``hvd-elastic``: the table of its commands, each of which is imported when it is called.

``hvd-elastic --help`` must answer at once even if torch and fabric lie on a slow disk. So the table
holds each command's module and summary, and the module is imported only to run the command or to
show its own help.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
import typer.core
import typer.main

from hvd_elastic import __version__
from hvd_elastic.cli.entry import enter, prepare
from hvd_elastic.cli.start import end_at_interrupt, raise_at_interrupt

_PASS_ON = {"allow_interspersed_args": False}
"""Everything after the first positional argument belongs to the user's command."""


@dataclass(frozen=True)
class LazyCommand:
    """A command that is imported when it is called.

    Attributes:
        module: name of the module that implements it.
        attribute: name of a function with typer annotations, or of a ``typer.Typer``.
        summary: line in ``hvd-elastic --help``.
        context_settings: settings of the command parser.
    """

    module: str
    attribute: str
    summary: str
    context_settings: Mapping[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        """Import the module and return the command ready to be invoked as ``name``."""
        end_at_interrupt()
        try:
            target = getattr(importlib.import_module(self.module), self.attribute)
        finally:
            raise_at_interrupt()
        if isinstance(target, typer.Typer):
            command = typer.main.get_command(target)
        else:
            single = typer.Typer(add_completion=False, rich_markup_mode="rich")
            single.command(name, context_settings=dict(self.context_settings))(target)
            command = typer.main.get_command(single)
        command.name = name
        return prepare(command)


SECTIONS: dict[str, dict[str, LazyCommand]] = {
    "Training": {
        "run": LazyCommand(
            "hvd_elastic.cli.runs.run", "run", "Train a script over a hostfile.", _PASS_ON
        ),
        "predict": LazyCommand(
            "hvd_elastic.cli.runs.predict",
            "predict",
            "Compute a model's outputs for a data set.",
            _PASS_ON,
        ),
        "status": LazyCommand("hvd_elastic.cli.runs.show", "status", "Say how a run is doing."),
        "list": LazyCommand("hvd_elastic.cli.runs.show", "list_", "List runs, newest first."),
        "logs": LazyCommand(
            "hvd_elastic.cli.runs.show", "logs", "Show or follow the workers' output."
        ),
        "get": LazyCommand(
            "hvd_elastic.cli.runs.get", "get", "List or copy files that a script saved."
        ),
        "export": LazyCommand(
            "hvd_elastic.cli.runs.export", "export", "Write a run's weights for other programs."
        ),
        "attach": LazyCommand("hvd_elastic.cli.runs.show", "attach", "Follow a detached run."),
        "stop": LazyCommand("hvd_elastic.cli.runs.control", "stop", "End a run cleanly."),
        "scale": LazyCommand(
            "hvd_elastic.cli.runs.control", "scale", "Set the number of workers of a run."
        ),
        "policy": LazyCommand(
            "hvd_elastic.cli.runs.control", "policy", "Pause or resume the policy of a run."
        ),
        "drain": LazyCommand("hvd_elastic.cli.runs.control", "drain", "Have a run leave a host."),
        "debug": LazyCommand(
            "hvd_elastic.cli.runs.debug", "debug", "Join a worker that stands at breakpoint()."
        ),
        "discover": LazyCommand(
            "hvd_elastic.cli.runs.show",
            "discover",
            "Print a run's hosts as horovodrun --host-discovery-script reads them.",
        ),
    },
    "Looking at runs, and ahead": {
        "report": LazyCommand(
            "hvd_elastic.cli.views.report", "report", "Summarise and plot a run."
        ),
        "dashboard": LazyCommand(
            "hvd_elastic.cli.views.dashboard", "dashboard", "Serve live pages of the runs."
        ),
        "top": LazyCommand("hvd_elastic.cli.views.dashboard", "top", "Show a run as it goes on."),
        "plan": LazyCommand(
            "hvd_elastic.cli.planning.plan",
            "plan",
            "Predict what other numbers of hosts would bring.",
        ),
        "bench": LazyCommand(
            "hvd_elastic.cli.planning.bench",
            "bench",
            "Measure how training scales, and how fast a script reads.",
        ),
        "simulate": LazyCommand(
            "hvd_elastic.cli.planning.simulate",
            "simulate",
            "Try a policy on a trace in virtual time.",
        ),
    },
    "Many jobs on one cluster": {
        "up": LazyCommand(
            "hvd_elastic.cli.jobs.daemon",
            "up",
            "Share a cluster between jobs: start its daemon.",
        ),
        "down": LazyCommand("hvd_elastic.cli.jobs.daemon", "down", "End the daemon of a cluster."),
        "hosts": LazyCommand(
            "hvd_elastic.cli.jobs.daemon", "hosts", "Show the hosts of a cluster and their jobs."
        ),
        "submit": LazyCommand(
            "hvd_elastic.cli.jobs.submit",
            "submit",
            "Put a job into the queue of a cluster.",
            _PASS_ON,
        ),
        "queue": LazyCommand("hvd_elastic.cli.jobs.queue", "queue", "List the jobs of a cluster."),
        "why": LazyCommand(
            "hvd_elastic.cli.jobs.queue", "why", "Say why a job waits, or has its slots."
        ),
        "wait": LazyCommand("hvd_elastic.cli.jobs.queue", "wait", "Wait until jobs have ended."),
        "cancel": LazyCommand("hvd_elastic.cli.jobs.queue", "cancel", "Cancel jobs."),
        "requeue": LazyCommand(
            "hvd_elastic.cli.jobs.queue", "requeue", "Put jobs back into the queue."
        ),
        "priority": LazyCommand(
            "hvd_elastic.cli.jobs.queue", "priority", "Change the priority of jobs."
        ),
    },
    "Machines of others": {
        "slurm": LazyCommand("hvd_elastic.cli.engines.slurm", "slurm", "Submit a run to Slurm."),
        "ray": LazyCommand(
            "hvd_elastic.cli.engines.ray",
            "ray",
            "Start and end a Ray cluster on the hosts of a hostfile.",
        ),
    },
    "Hosts and installation": {
        "cluster": LazyCommand(
            "hvd_elastic.cli.cluster.tools",
            "cluster",
            "Run, copy, kill and check on all hosts of a hostfile.",
        ),
        "trust": LazyCommand(
            "hvd_elastic.cli.cluster.check", "trust", "Show and accept the host keys of a hostfile."
        ),
        "install": LazyCommand(
            "hvd_elastic.cli.cluster.install",
            "install",
            "Bring this environment to the hosts of a hostfile, or upgrade it there.",
        ),
        "uninstall": LazyCommand(
            "hvd_elastic.cli.cluster.install", "uninstall", "List and remove what is installed."
        ),
        "doctor": LazyCommand(
            "hvd_elastic.cli.machine.doctor", "doctor", "Say what is installed, built and missing."
        ),
        "build-horovod": LazyCommand(
            "hvd_elastic.cli.machine.build_horovod",
            "build_horovod",
            "Build Horovod for this PyTorch and TensorFlow, once.",
        ),
        "report-bug": LazyCommand(
            "hvd_elastic.cli.machine.report_bug",
            "report_bug",
            "Gather what a report of a fault needs, without secrets.",
        ),
        "demo": LazyCommand(
            "hvd_elastic.cli.machine.demo", "demo", "Train on virtual hosts that come, go and die."
        ),
    },
}
"""Commands by section of ``hvd-elastic --help``."""

COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}
_SECTION_OF = {name: title for title, section in SECTIONS.items() for name in section}


class LazyGroup(typer.core.TyperGroup):
    """Command group that uses stubs for the list of commands and imports a command to call it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        section = _SECTION_OF.get(cmd_name)
        return typer.core.TyperCommand(cmd_name, help=entry.summary, rich_help_panel=section)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # For a mistyped name Typer suggests a similar one of these.
        self.commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else COMMANDS[name].load(name), rest


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
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Elastic data-parallel training on Horovod, over the hosts of a hostfile."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``hvd-elastic``."""
    enter("hvd-elastic", typer.main.get_command(app), argv)


if __name__ == "__main__":
    main()
