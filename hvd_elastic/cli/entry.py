"""Run a command with its arguments and turn its result into an exit status, for every program.

A mistake of the user is printed as one line that begins with ``error:``, whether this package or
the parser of the command line found it. A bug shows its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from hvd_elastic.cli.start import INTERRUPTED, raise_at_interrupt
from hvd_elastic.config import home
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.formatting import PrintableStream, printable

# The base class of parser errors has no public name in typer, which may bundle click.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]

_INSTEAD = {
    r"--pdb$": (
        "Write breakpoint() in the script; the run prints the command that joins the worker there: "
        "hvd-elastic debug RUN HOST:SLOT"
    ),
    r"--(nproc|nnodes|node.rank|master|rdzv|local.addr|standalone|max.restarts)": (
        "It is one of torchrun's. Here --np N is the number of all workers, --hostfile FILE or -H "
        "gpu1:8,gpu2:8 names their hosts, and workers find each other by themselves."
    ),
}
"""What ``run`` has instead of options of other programs, by a pattern of their names."""


def enter(program: str, command: Any, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit.

    Args:
        arguments: arguments of the program; None: those of this process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the encoding of the terminal lacks is shown as '?', and ends no run.
            stream.reconfigure(errors="replace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    raise SystemExit(_status_of(program, command, words))


def prepare(command: Any) -> Any:
    """Have a command's help flow in the terminal, name the kind of each option's value, and show
    control characters in what the command prints as text.

    Lines of a paragraph are joined, so that the terminal breaks them. A flag has no value, so
    nothing stands beside it.

    Args:
        command: command made by typer; its subcommands are changed too.

    Returns:
        The same command.
    """
    command.help = _join_lines(inspect.cleandoc(command.help or ""))
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.metavar is None:
            parameter.metavar = "" if parameter.is_flag else _kind(parameter)
    command.get_help_option = _without_kind(command.get_help_option)
    subcommands = getattr(command, "commands", {})
    for each in subcommands.values():
        prepare(each)
    if command.callback is not None and not subcommands:  # help is printed outside, by rich
        command.callback = _printing_text(command.callback)
    return command


def _printing_text(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def call(*arguments: Any, **named: Any) -> Any:
        with _printable_output():
            return callback(*arguments, **named)

    return call


@contextlib.contextmanager
def _printable_output() -> Iterator[None]:
    """Show control characters as text: they come from hosts, and from files of other users."""
    with contextlib.ExitStack() as stack:
        for redirect, stream in (
            (contextlib.redirect_stdout, sys.stdout),
            (contextlib.redirect_stderr, sys.stderr),
        ):
            if stream is not None:
                stack.enter_context(redirect(PrintableStream(stream)))
        yield


def _kind(parameter: Any) -> str:
    # typer with click inside, and typer since it has a parser of its own
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    name = getattr(annotation, "__name__", "") or getattr(
        getattr(parameter, "type", None), "name", ""
    )
    kinds = {"int": "N", "float": "NUMBER", "path": "PATH", "integer": "N", "integer range": "N"}
    return kinds.get(str(name).lower(), "TEXT")


def _without_kind(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes the option ``--help`` as a flag without a kind of value."""

    def make_help_option(context: Any) -> Any:
        option = make(context)
        if option is not None:
            option.metavar = ""
        return option

    return make_help_option


def _join_lines(text: str) -> str:
    r"""Return the text with each paragraph on one line; indented lines are kept.

    >>> _join_lines("Do it\nnow.\n\nFor example:\n  one\n  two")
    'Do it now.\n\nFor example:\n  one\n  two'
    """
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _status_of(program: str, command: Any, words: list[str]) -> int:
    try:
        raise_at_interrupt()
        with prepare(command).make_context(program, words) as context:
            command.invoke(context)
    except HvdElasticError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_status
    except typer.Exit as end:
        return end.exit_code
    except _ParserError as error:
        print(printable(_usage_words(error)), file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except PermissionError as error:
        if not Path(str(error.filename)).is_relative_to(home().absolute()):
            raise
        print(
            printable(
                f"error: {error.filename}: {error.strerror}. Fix the permissions there, or set "
                "HVD_ELASTIC_HOME to a folder of yours."
            ),
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:
        # The reader of the output has gone (| head).
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        return 1
    return 0


def _usage_words(error: Any) -> str:
    message = str(error.format_message()).strip()
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        return message
    context = getattr(error, "ctx", None)
    message = message[:1].lower() + message[1:].rstrip(".")
    if context is None:
        return f"error: {message}"
    name = getattr(error, "option_name", "")
    for pattern, instead in _INSTEAD.items() if context.command.name == "run" else ():
        if re.match(pattern, name):
            return f"error: no such option: {name}. {instead}"
    end = "" if message.endswith("?") else "."  # after "Did you mean 'run'?"
    return f"error: {message}{end} See: {context.command_path} --help"
