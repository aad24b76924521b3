"""The command line of the scripts that write shards."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets_prep.common import interrupted, result_of, whole_number
from datasets_prep.frame import Convert, Settings
from datasets_prep.on_hosts import DISAGREES, ON_HOST, OnHost
from datasets_prep.resuming import SKIPPED
from hvd_elastic.programs.usable import usable_cores

_SHOWN = 5


def options(description: str, *, per_shard: int | None = 1000) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have; ``per_shard``: None: not that one."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,  # the hosts get the options as they are written, less --hostfile
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 all well, 1 something is wrong and was named, 2 wrong usage, 130\n"
        "interrupted. The same call, without --again, goes on where an interrupted or killed one\n"
        "stopped.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--format", choices=("tar", "tfrecord"), default="tar", help="of the shards (tar)"
    )
    if per_shard is not None:
        parser.add_argument(
            "--per-shard",
            type=whole_number(1),
            default=per_shard,
            help=f"files of the source in a shard ({per_shard})",
        )
    parser.add_argument("--sample", type=whole_number(1), help="use this many of them, for a trial")
    parser.add_argument("--strict", action="store_true", help="stop at a damaged one")
    parser.add_argument(
        "--again", action="store_true", help="make --out anew, such as from a source that changed"
    )
    parser.add_argument(
        "--processes",
        type=whole_number(1),
        default=usable_cores(),
        help="one for each core that may be used",
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        help="share the work among these hosts, which see script and source at the same paths; "
        "afterwards all have all shards",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(ON_HOST, nargs="+", default=(), help=argparse.SUPPRESS)
    return parser


def picture_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts that encode pictures."""
    parser.add_argument(
        "--resize", type=whole_number(0), default=0, help="shorter side, if longer (0: as it is)"
    )
    parser.add_argument("--quality", type=whole_number(1, 100), default=92, help="of JPEG (92)")


def settings_of(
    given: argparse.Namespace, fields: tuple[str, ...], convert: Convert, **more: Any
) -> Settings:
    """Return the settings that the common options ask for."""
    made_from = asdict(convert) if hasattr(convert, "__dataclass_fields__") else {}  # type: ignore[call-overload]
    return Settings(
        given.format,
        fields,
        getattr(given, "per_shard", 0),
        convert,
        made_from,
        strict=given.strict,
        again=given.again,
        sample=given.sample,
        processes=given.processes,
        hostfile=given.hostfile,
        on_host=OnHost(*given.on_host) if given.on_host else None,
        **more,
    )


def main(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], list[dict[str, Any]]]
) -> int:
    """Parse the command line, run, and print what was done or what is wrong; exit status."""
    given = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    made, status = result_of(lambda: run(given), given.out, interrupted(again=given.again))
    if made is None:
        return 1 if status == DISAGREES and not given.on_host else status
    found = [each for each in made if each]
    if given.json:
        print(json.dumps(found))
        return 0
    for each in found:
        for line in each["skipped"][:_SHOWN]:
            print(f"skipped {line}")
        if len(each["skipped"]) > _SHOWN:
            print(f"and {len(each['skipped']) - _SHOWN} more, in {each['folder']}/{SKIPPED}")
        if "tokens" in each:
            print(f"{each['tokens']:,} tokens used, {each['tokens_lost']:,} lost at ends of pieces")
        print(
            f"{each['folder']}: {each['examples']} examples in {each['shards']} shards, "
            f"{each['bytes'] / 1e6:,.1f} MB; {len(each['skipped'])} skipped"
        )
    return 0
