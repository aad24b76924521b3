"""Write the tables of options in ``docs/commands.md`` from the commands themselves.

Between ``<!-- options: NAME -->`` and ``<!-- end -->`` stands what the command line defines; the
text around it is written by hand. ``--check`` changes nothing and ends with 1 if a table is old.

    .venv/bin/python scripts/commands_doc.py
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

PAGE = HERE.parent / "docs" / "commands.md"
_TABLE = re.compile(r"<!-- options: (?P<name>[\w -]+) -->\n.*?<!-- end -->", re.DOTALL)


def all_commands() -> dict[str, Any]:
    """Every command of every program by its full name, such as ``virtclust up``."""
    import typer

    from hvd_elastic.cli.app import COMMANDS, load_command
    from hvd_elastic.cli.entry import prepare
    from hvd_elastic.cli.machine import virtclust

    found: dict[str, Any] = {}

    def add(name: str, command: Any) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            found[name] = command
            return
        for child_name, child in children.items():
            if not child.hidden:
                add(f"{name} {child_name}", child)

    for name in COMMANDS:
        add(f"hvd-elastic {name}", load_command(name))
    programs = {"runclust": "run", "copyclust": "copy", "killclust": "kill", "checkclust": "check"}
    for program, name in programs.items():
        found[program] = found[f"hvd-elastic cluster {name}"]
    add("virtclust", prepare(typer.main.get_command(virtclust.app)))
    return found


def options_of(command: Any) -> dict[str, Any]:
    """Every spelling of every option of a command, ``--help`` included, with its parameter."""
    found: dict[str, Any] = {"--help": None, "-h": None}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            for spelling in (*parameter.opts, *parameter.secondary_opts):
                found[spelling] = parameter
    return found


def table(command: Any) -> str:
    """The options of a command as a Markdown table."""
    lines = ["| option | meaning |", "|---|---|"]
    for parameter in command.params:
        if parameter.param_type_name != "option" or parameter.name == "help":
            continue
        spellings = [f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)]
        if not parameter.is_flag:
            spellings[0] = f"`{parameter.opts[0]} {parameter.metavar}`"
        text = " ".join(str(parameter.help or "").split()).rstrip(".")
        if not parameter.is_flag and parameter.default not in (None, [], ()):
            text += f" (default: {parameter.default})"
        if parameter.envvar:
            text += f"; also from `{parameter.envvar}`"
        lines.append(f"| {', '.join(spellings)} | {text.replace('|', '&#124;')} |")
    return "\n".join(lines)


def renew(text: str) -> str:
    """``text`` with every table made anew."""
    commands = all_commands()

    def replace(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- options: {name} -->\n{table(commands[name])}\n<!-- end -->"

    return _TABLE.sub(replace, text)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Renew the option tables of docs/commands.md.")
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    arguments = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    renewed = renew(text)
    if arguments.check:
        return int(text != renewed)
    PAGE.write_text(renewed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
