#!/usr/bin/env python3
"""Index the tar or TFRecord shards of a folder for random access, or verify indexed ones.

python datasets_prep/index_shards.py /data/shards [--classes names.txt]
python datasets_prep/index_shards.py /data/shards --verify
python datasets_prep/index_shards.py /read-only/shards --index /data/index
python datasets_prep/index_shards.py 'https://store/train-{000..127}.tar' --index /data/index

A second call reads only the shards that have changed, and what an interrupted one has not read;
one with --again reads all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets_prep.common import interrupted, result_of, whole_number
from datasets_prep.pictures import read_classes
from hvd_elastic.data.index import Index
from hvd_elastic.data.indexing import build_index, verify
from hvd_elastic.data.remote import RemoteFolder, selection
from hvd_elastic.programs.usable import usable_cores
from hvd_elastic.urls import is_url

_SHOWN = 5


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="folder with shards, or names of shards with braces; a URL")
    parser.add_argument("--classes", type=Path, help="file with a class in each line")
    parser.add_argument("--index", type=Path, help="folder of the index, if not beside the shards")
    parser.add_argument("--subfolders", action="store_true", help="index shards in subfolders too")
    parser.add_argument(
        "--labels-from",
        type=int,
        choices=(0, 1),
        help="first label of image/class/label in TFRecord (1 unless there is a label 0)",
    )
    parser.add_argument(
        "--processes", type=whole_number(1), default=usable_cores(), help="(default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="read all shards, also unchanged ones")
    parser.add_argument("--verify", action="store_true", help="compare the shards with the index")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args()
    for name in ("classes", "labels_from", "again"):
        if given.verify and getattr(given, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} goes with indexing, not with --verify")
    if given.verify and (is_url(given.folder) or selection(given.folder)[1] is not None):
        parser.error("--verify takes the folder of the shards, not a URL or names with braces")
    at_interrupt = interrupted(again=given.again)
    shown, status = result_of(lambda: _without_secrets(given.folder), "", at_interrupt)
    if shown is None:
        return status
    index, status = result_of(lambda: _index(given), shown, at_interrupt)
    if index is None:
        return status
    examples = sum(shard.examples for shard in index.shards)
    left_out = Counter[str]()
    for shard in index.shards:
        left_out.update(shard.left_out)
    lacking = {name: number for name, (number, _) in index.lacking().items()}
    if given.json:
        found = {"fields": index.fields, "lacking": lacking, "left_out": left_out}
        print(json.dumps({"examples": examples, "shards": len(index.shards), **found}))
        return 0
    what = "fit the index" if given.verify else "indexed"
    print(f"{shown}: {examples} examples in {len(index.shards)} shards {what}")
    print(f"fields: {', '.join(index.fields)}")
    for name, number in lacking.items():
        print(f"{number} examples have no field {name}; read it as optional, or leave it out")
    if left_out:
        names = ", ".join(f"{number} {name}" for name, number in left_out.most_common(10))
        print(f"{left_out.total()} members are part of no example and left out: {names}")
    if index.classes:
        more = ", …" if len(index.classes) > _SHOWN else ""
        print(f"{len(index.classes)} classes: {', '.join(index.classes[:_SHOWN])}{more}")
    if index.labelled and index.layout == "tfrecord":
        print(f"labels: {index.labels_from} is the first class (--labels-from), and read as 0")
    return 0


def _without_secrets(folder: str) -> str:
    return str(RemoteFolder(folder)) if is_url(folder) else folder


def _index(given: argparse.Namespace) -> Index:
    if given.verify:
        return verify(Path(given.folder), given.index)
    return build_index(
        given.folder,
        read_classes(given.classes) if given.classes is not None else (),
        out=given.index,
        subfolders=given.subfolders,
        labels_from=given.labels_from,
        processes=given.processes,
        again=given.again,
    )


if __name__ == "__main__":
    sys.exit(main())
