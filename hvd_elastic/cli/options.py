"""Make a command of a function and a dataclass of its options, and parse the values of options."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core
import typer.main
from typer.models import ArgumentInfo

from hvd_elastic.config import home
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import parse_duration as parse_duration  # noqa: PLC0414

_LIST = re.compile(r"[^/\s]+:\d+(,[^/\s]+)*|[^/\s]+,[^/\s]+")
"""Hosts as horovodrun's -H takes them, such as ``gpu1:8,gpu2:8``."""
_LONGEST_NAME = 200


def command(
    options: type[Any] | None = None, *, but: Collection[str] = (), pass_on: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function, for :func:`as_command`.

    Args:
        options: dataclass whose fields are options and arguments of the command, beside those that
            the function declares itself; a field that is such a dataclass stands for its fields.
            The function gets an instance as its first argument.
        but: names of fields that the command does not have; they keep their defaults.
        pass_on: whether what follows the first argument is a command of the user's.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        made = function if options is None else _taking(function, options, but)
        made.cls = _PassOn if pass_on else typer.core.TyperCommand  # type: ignore[attr-defined]
        return made

    return decorate


def _taking(
    function: Callable[..., None], kind: type[Any], but: Collection[str]
) -> Callable[..., None]:
    """Return a function whose parameters are those of another one, the first one as its fields."""

    @functools.wraps(function)
    def call(**given: Any) -> None:
        function(_make(kind, but, given), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    shared = [*_parameters(kind, but)]
    arguments = [each for each in shared if _is_argument(each)]
    rest = [each for each in shared if not _is_argument(each)]
    parameters = [*arguments, *(each.replace(kind=keyword) for each in own), *rest]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _parameters(kind: type[Any], but: Collection[str]) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field of a dataclass, and of those in it."""
    hints = get_type_hints(kind, include_extras=True)
    for name, default in inspect.signature(kind).parameters.items():
        if name not in but and is_dataclass(hints[name]):
            yield from _parameters(hints[name], but)
        elif name not in but:
            keyword = inspect.Parameter.KEYWORD_ONLY
            yield default.replace(kind=keyword, annotation=hints[name])


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(each, ArgumentInfo) for each in parameter.annotation.__metadata__)


def _make(kind: Any, but: Collection[str], given: dict[str, Any]) -> Any:
    """Return an instance of a dataclass, for whose fields values are taken out of ``given``."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for name in (field.name for field in fields(kind) if field.init and field.name not in but):
        inner = hints[name]
        found[name] = _make(inner, but, given) if is_dataclass(inner) else given.pop(name)
    return kind(**found)


class _PassOn(typer.core.TyperCommand):
    """Leaves everything after its first argument to a command of the user's.

    If that argument is a hostfile, options may stand before and after it.
    """

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.params[0].name == "hostfile" and self.params[0].param_type_name == "argument":
            at = self._end_of_options(args, 0)
            if at < len(args) and args[at] != "--":
                end = self._end_of_options(args, at + 1)
                # The parser stops at the first argument, so move the hostfile next to the command.
                rest = args[end + 1 :] if args[end : end + 1] == ["--"] else args[end:]
                args = [*args[:at], *args[at + 1 : end], "--", args[at], *rest]
        return super().parse_args(ctx, args)

    def _end_of_options(self, args: Sequence[str], index: int) -> int:
        valued = {
            name
            for parameter in self.params
            if getattr(parameter, "nargs", 0) == 1 and not getattr(parameter, "is_flag", True)
            for name in parameter.opts
        }
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            index += 2 if args[index] in valued else 1
        return min(index, len(args))


def as_command(name: str, target: Any, **settings: Any) -> Any:
    """Return the command of a function, or of a group of commands, ready to be invoked as ``name``.

    Args:
        target: function with typer annotations, or a ``typer.Typer``.
    """
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False, rich_markup_mode="rich")
        cls = getattr(function, "cls", typer.core.TyperCommand)
        target.command(name, cls=cls, context_settings=settings)(function)
    made = typer.main.get_command(target)
    made.name = name
    return made


def group_of(
    text: str,
    commands: Mapping[str, Callable[..., None]],
    cls: type[typer.core.TyperGroup] = typer.core.TyperGroup,
) -> typer.Typer:
    """Return a group of commands by name, with a text for its help."""
    group = typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, rich_markup_mode="rich", cls=cls
    )
    for name, function in commands.items():
        group.command(name, cls=getattr(function, "cls", None))(function)
    return group


def given_options(context: typer.Context) -> dict[str, str]:
    """Return the options that stand on the command line, as they are written, by their names."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            is_off = context.params[parameter.name or ""] is False
            words = parameter.secondary_opts if is_off else parameter.opts
            found[parameter.name or ""] = words[0]
    return found


# -- numbers -----------------------------------------------------------------------------------


def parse_whole_number(
    name: str, value: object, least: int = 1, instead: str = "", most: int | None = None
) -> int:
    """Return the integer that ``value`` represents.

    Args:
        name: name of the option or argument, for the message.
        value: text, or a default that is a number already.
        instead: further valid values in words, for the message.
        most: largest valid number; None: any.

    Raises:
        UsageError: the value is not valid; names the valid ones.

    >>> parse_whole_number("--np", "4")
    4
    """
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        valid = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} takes a whole number {valid}{instead}, not '{value}'")
    return number


def parse_number(name: str, value: object, least: float = 0.0, above: bool = False) -> float:
    """Return the number that ``value`` represents.

    Args:
        name, value: see :func:`parse_whole_number`.
        least: smallest valid number; with ``above`` it is not valid itself.
        above: whether the number must be above ``least``.

    Raises:
        UsageError: the value is not valid; names the valid ones.
    """
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not (number > least if above else number >= least) or math.isinf(number):
        limit = f"above {least:g}" if above else f"of {least:g} or more"
        raise UsageError(f"{name} takes a number {limit}, not '{value}'")
    return number


def option(text: str, *names: str, metavar: str | None = None, envvar: str | None = None) -> Any:
    """Return a typer option with a text for its help."""
    return typer.Option(*names, metavar=metavar, envvar=envvar, help=text)


def argument(text: str, metavar: str) -> Any:
    """Return a typer argument with a text for its help."""
    return typer.Argument(metavar=metavar, help=text)


def whole_number_option(
    text: str, *names: str, least: int = 1, most: int | None = None, metavar: str = "N"
) -> Any:
    """Return a typer option for an integer."""
    return _parsed(
        lambda value: parse_whole_number(names[0], value, least, most=most), names, metavar, text
    )


def port_option(text: str) -> Any:
    """Return a typer option for a TCP port; 0 is valid."""
    return whole_number_option(text, "--port", least=0, most=65535)


def number_option(
    text: str, *names: str, least: float = 0.0, above: bool = False, metavar: str = "NUMBER"
) -> Any:
    """Return a typer option for a number."""
    return _parsed(lambda value: parse_number(names[0], value, least, above), names, metavar, text)


def _parsed(
    parse: Callable[[object], float], names: tuple[str, ...], metavar: str, text: str
) -> Any:
    return typer.Option(*names, parser=parse, metavar=metavar, help=text)


# -- options that several commands share, word for word ----------------------------------------


def hostfile_of(value: object) -> Path:
    """Return the path of a hostfile: the one given, or one written for a list of hosts.

    Raises:
        HostfileError: a host of the list cannot be parsed.
        RunError: the file cannot be written.
    """
    text = str(value)
    if not _LIST.fullmatch(text) or Path(text).exists():
        return Path(text)
    from hvd_elastic.hosts.hostfile import format_hostfile, parse_hosts, write_hostfile

    # Commas inside brackets belong to a range.
    lines = re.sub(r",(?![^\[\]]*\])", "\n", text)
    hosts = parse_hosts(lines, f"the list of hosts '{text}'").hosts
    name = text if len(text) <= _LONGEST_NAME else hashlib.sha1(text.encode()).hexdigest()
    path = home().absolute() / "hostfiles" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != format_hostfile(hosts):
            write_hostfile(path, hosts)
    except OSError as error:
        raise RunError(f"cannot write the hosts to {path}: {error.strerror}") from error
    return path


def hostfile_option(text: str, *more_names: str) -> Any:
    """Return a typer option for a hostfile, or a list of hosts."""
    names = ("--hostfile", "-H", *more_names)
    return typer.Option(
        *names, parser=hostfile_of, metavar="FILE", help=f"{text}; or a list: gpu1:8,gpu2:8"
    )


SshConfigOption = Annotated[
    Path | None,
    option(
        "ssh configuration (default: ~/.ssh/config)",
        "--ssh-config",
        "-F",
        envvar="HVD_ELASTIC_SSH_CONFIG",
    ),
]

OptionalRun = Annotated[
    str | None, argument("Run id, or number or name of its job; the newest run if left out.", "RUN")
]
RequiredRun = Annotated[
    str, argument("Run id, or number or name of its job; see: hvd-elastic list, queue", "RUN")
]
AsJson = Annotated[bool, option("print JSON instead of text", "--json")]
EventsAsJson = Annotated[bool, option("print every event as a JSON line instead of text", "--json")]
