#!/usr/bin/env python3
"""Index the tar or TFRecord shards of a folder for random access, or verify indexed ones.

python datasets_prep/index_shards.py /data/shards [--classes names.txt]
python datasets_prep/index_shards.py /data/shards --verify
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets_prep.pictures import read_classes
from hvd_elastic.data.index import build_index, verify
from hvd_elastic.errors import DataError


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with shards")
    parser.add_argument("--classes", type=Path, help="file with a class in each line")
    parser.add_argument("--verify", action="store_true", help="compare the shards with the index")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args()
    if given.verify and given.classes is not None:
        parser.error("--classes goes with indexing, not with --verify")
    try:
        if given.verify:
            index = verify(given.folder)
        else:
            classes = read_classes(given.classes) if given.classes is not None else ()
            index = build_index(given.folder, classes)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or given.folder}: {error.strerror}", file=sys.stderr)
        return 1
    examples = sum(shard.examples for shard in index.shards)
    if given.json:
        print(json.dumps({"examples": examples, "shards": len(index.shards)}))
    else:
        what = "fit the index" if given.verify else "indexed"
        print(f"{given.folder}: {examples} examples in {len(index.shards)} shards {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
