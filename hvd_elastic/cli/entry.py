"""How every program is entered: arguments to a command, its end to an exit status.

A user's mistake ends in a line that begins with ``error:``, whoever found it: the project, or the
parser of the command line. A defect of ours keeps its traceback.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from hvd_elastic.cli.start import INTERRUPTED, raise_at_interrupt
from hvd_elastic.errors import HvdElasticError

# typer has click inside, or beside it, and gives only this one of its errors a name of its own.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


def enter(program: str, command: Any, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``command`` with the arguments (without: those of this process) and exit.

    Args:
        program: the name it is called by, for help and messages.
        command: what typer made.
        arguments: words after the name.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    raise SystemExit(_status_of(program, command, words))


def flow_help(command: Any) -> Any:
    """Has a narrow terminal break the lines of a help text, and not the source as well.

    Args:
        command: what typer made; its subcommands are looked at too.
    """
    command.help = _join_lines(inspect.cleandoc(command.help or ""))
    for each in getattr(command, "commands", {}).values():
        flow_help(each)
    return command


def _join_lines(text: str) -> str:
    r"""Each paragraph as one line; lines that are set in stay apart.

    >>> _join_lines("Do it\nnow.\n\nFor example:\n  one\n  two")
    'Do it now.\n\nFor example:\n  one\n  two'
    """
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _status_of(program: str, command: Any, words: list[str]) -> int:
    try:
        raise_at_interrupt()
        with flow_help(command).make_context(program, words) as context:
            command.invoke(context)
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except typer.Exit as end:
        return end.exit_code
    except _ParserError as error:
        print(_usage_words(error), file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (| head): nothing can be shown any more.
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
    end = "" if message.endswith("?") else "."  # after "Did you mean 'run'?"
    return f"error: {message}{end} See: {context.command_path} --help"
