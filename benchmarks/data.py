"""Measures preparing and reading shards of pictures beside other tools; see README.md here.

Run it: ``python benchmarks/data.py --out benchmarks/results/data.json``. In every round each way
runs once, in another order, in the same number of processes. A figure is the median over the
rounds of ours / the other way, both in pictures per second, with its 95 % interval; and of the
processor time of the other way / ours, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image

from benchmarks.peers.pictures import BATCH, QUALITY, write_ours
from benchmarks.step_time import interval
from benchmarks.testbed.command import Say, at_least_one, run_benchmark
from benchmarks.testbed.environments import LITDATA, STREAMING, PeerMissingError
from benchmarks.testbed.figures import Result, conditions
from hvd_elastic.data import ShardDataset, load_index
from hvd_elastic.errors import RunError
from hvd_elastic.model.sharding import block_order, blocks_from

ROOT = Path(__file__).resolve().parents[1]
SIZE = (500, 375)
SHORT_SIDE = 256
UNIQUE = 20
WINDOW = 4
DELAY_S, LINK_BYTES_PER_S = 0.02, 50e6
MANY = (20_000, 200_000)


def write_pictures(folder: Path, count: int) -> None:
    """Write JPEG files of noise of several scales."""
    rng = np.random.default_rng(0)
    width, height = SIZE
    kinds = []
    for _ in range(UNIQUE):
        image = np.full((height, width, 3), 128.0)
        for cells, strength in ((4, 50), (16, 20), (64, 8), (200, 5)):
            noise = rng.normal(0, strength, (cells * 3 // 4, cells, 3)).astype(np.float32)
            for colour in range(3):
                plane = Image.fromarray(noise[..., colour])
                image[..., colour] += np.asarray(plane.resize(SIZE, Image.Resampling.BICUBIC))
        out = BytesIO()
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=QUALITY)
        kinds.append(out.getvalue())
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(kinds[number % UNIQUE])


# -- libraries, each in a process of its own ---------------------------------------------------

ENVIRONMENTS = {"litdata": LITDATA, "mosaicml-streaming": STREAMING}
CALLS = {
    "ours": "ours",
    "bare loop": "nothing",
    "full decode of files": "files",
    "webdataset": "webdataset",
    "litdata": "litdata",
    "mosaicml-streaming": "streaming",
}
"""How the ways are called in peers/pictures.py."""
PREPARING = ("ours", "bare loop", "webdataset", "litdata")
READING = ("ours", "full decode of files", "webdataset", "litdata", "mosaicml-streaming")
OPTIONAL = tuple(name for name in CALLS if name not in ("ours", "full decode of files"))


class Library:
    """A process that writes and reads by one library.

    Raises:
        PeerMissingError: the library cannot be installed.
    """

    def __init__(self, name: str) -> None:
        self._name, self._call = name, CALLS[name]
        python = sys.executable
        if name in ENVIRONMENTS:
            ENVIRONMENTS[name].make()
            python = str(ENVIRONMENTS[name].python)
        elif name == "webdataset" and importlib.util.find_spec(name) is None:
            raise PeerMissingError("webdataset is not installed; use: pip install webdataset")
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.pictures"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def write(self, *arguments: object) -> float:
        """Write pictures of a folder to another one; return the processor time [s]."""
        return self._do("write", *arguments)

    def read(self, *arguments: object) -> float:
        """Read an epoch; return the processor time [s]."""
        return self._do("read", *arguments)

    def _do(self, verb: str, *arguments: object) -> float:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        call = [f"{verb}_{self._call}", *arguments]
        process.stdin.write(json.dumps(call, default=str) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        answer = json.loads(line) if line else "its process ended"
        if isinstance(answer, str):
            raise RunError(f"{self._name} cannot {verb}: {answer}")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -- shards behind a URL -----------------------------------------------------------------------


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder from a process of its own, with a delay, at the rate of a link."""
    command = [sys.executable, "-m", "benchmarks.testbed.file_server"]
    command += [str(folder), str(DELAY_S), str(LINK_BYTES_PER_S)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.stdin.close()
        server.wait()


def fetch_all(url: str, folder: Path) -> None:
    """Get all shards and keep nothing: what the link gives to as many connections as we open."""

    def get(name: str) -> None:
        with urllib.request.urlopen(f"{url}/{name}") as file:
            while file.read(1 << 20):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(get, [shard.name for shard in load_index(folder).shards]))


def read_in_order(dataset: ShardDataset) -> None:
    """Read the bytes of an epoch in its order, as a loader of one rank does."""
    blocks, examples = dataset.blocks, len(dataset)
    order = block_order(0, 0, *blocks)
    position = told = 0
    while position < examples:
        if position >= told:
            coming, told = blocks_from(0, 0, blocks, position)
            dataset.prefetch_blocks(coming)
        stop = min(examples, position + BATCH)
        dataset.__getitems__(order(np.arange(position, stop)).tolist())
        position = stop


def _behind(url: str, cache: Path) -> ShardDataset:
    return ShardDataset(url, decode=bytes, cache=cache, shuffle_window=WINDOW)


def read_url(url: str, cache: Path) -> None:
    """Read an epoch through an empty cache."""
    shutil.rmtree(cache, ignore_errors=True)
    read_in_order(_behind(url, cache))


def _from_url(
    options: argparse.Namespace, folder: Path, shards: Path, say: Say
) -> Iterator[tuple[str, Rates]]:
    cache, count = folder / "cache", options.pictures
    with serving(shards) as url:
        ways = {
            "ours": partial(read_url, url, cache),
            "link": partial(fetch_all, url, shards),
        }
        yield "url", rounds(ways, options.rounds, count, say)
        local = ShardDataset(shards, decode=bytes, shuffle_window=WINDOW)
        ways = {
            "ours": partial(read_in_order, _behind(url, cache)),
            "local files": partial(read_in_order, local),
        }
        yield "cached", rounds(ways, options.rounds, count, say)


# -- memory of preparing many files ------------------------------------------------------------

# The largest memory of this process alone; getrusage() would count that of its parent before exec.
PREPARE_AND_TELL = """
import re, sys
from pathlib import Path
from benchmarks.data import as_it_is
from datasets_prep import frame, pictures
source, out, processes = sys.argv[1:]
settings = frame.Settings("tar", ("jpg",), 2000, as_it_is, processes=int(processes))
frame.prepare(Path(out), pictures.list_folder(Path(source), ()), (), settings)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def as_it_is(data: bytes) -> list[tuple[bytes]]:
    """Keep a file as it is."""
    return [(data,)]


def preparing_many(options: argparse.Namespace, folder: Path, say: Say) -> Iterator[dict[str, Any]]:
    """Yield the memory of the command that prepares many tiny files, without its processes."""
    picture = BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "JPEG")
    for count in MANY:
        source, out = folder / "many", folder / "out"
        source.mkdir()
        (source / "0.jpg").write_bytes(picture.getvalue())
        for number in range(1, count):
            (source / f"{number}.jpg").symlink_to("0.jpg")
        command = [sys.executable, "-c", PREPARE_AND_TELL, source, out, options.processes]
        began = time.monotonic()
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        took_s = time.monotonic() - began
        megabytes = int(done.stdout.split()[-1]) / 1e3
        say(f"{count} files: {megabytes:.0f} MB, {took_s:.0f} s")
        yield {"files": count, "most_mb": round(megabytes, 1), "per_s": round(count / took_s)}
        shutil.rmtree(source)
        shutil.rmtree(out)


# -- the measurement -------------------------------------------------------------------------


class Rates(NamedTuple):
    """What the rounds of some ways gave, by their names.

    Attributes:
        per_s: pictures per second in every round.
        cpu_ms: processor time of a picture in every round [ms], of ways that tell it.
    """

    per_s: dict[str, list[float]]
    cpu_ms: dict[str, list[float]]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each way: its median rate, and how ours compares with it."""
        for name, samples in self.per_s.items():
            row = {
                "way": name,
                "per_s": round(median(samples), 1),
                **_relative("ours_relative", self.per_s["ours"], samples),
                "samples": [round(sample, 1) for sample in samples],
            }
            if costs := self.cpu_ms[name]:
                row["cpu_ms"] = round(median(costs), 3)
                row |= _relative("cpu_relative_to_ours", costs, self.cpu_ms["ours"])
            yield row


def _relative(name: str, ours: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    ratios = [one / two for one, two in zip(ours, other, strict=True)]
    return {name: round(median(ratios), 3), f"{name}_95": [round(x, 3) for x in interval(ratios)]}


def rounds(
    ways: Mapping[str, Callable[[], float | None]], count: int, items: int, say: Say
) -> Rates:
    """Call each way in every round, in another order."""
    found = Rates({name: [] for name in ways}, {name: [] for name in ways})
    rng = random.Random(0)
    for number in range(count):
        for name in rng.sample(list(ways), len(ways)):
            began = time.monotonic()
            cpu_s = ways[name]()
            found.per_s[name].append(items / (time.monotonic() - began))
            if cpu_s is not None:
                found.cpu_ms[name].append(1e3 * cpu_s / items)
            say(f"round {number + 1}: {name} {found.per_s[name][-1]:.0f}/s")
    return found


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure all parts."""
    load_before = os.getloadavg()
    body: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="hvd-elastic-data-", dir=options.folder))
    try:
        source = folder / "files"
        write_pictures(source, options.pictures)
        libraries, missing = _libraries(options)
        with contextlib.ExitStack() as ending:
            for library in libraries.values():
                ending.callback(library.close)
            if "prepare" in options.parts:
                body["prepare"] = list(_preparing(options, libraries, source, say).rows())
            for part, resize in (("read", 0), ("read_small", SHORT_SIDE)):
                if part in options.parts:
                    out = folder / part
                    out.mkdir()
                    found, failed = _reading(options, libraries, source, out, resize, say)
                    body[part] = list(found.rows())
                    missing += failed
        body["missing"] = missing
        if "url" in options.parts:
            shards = folder / "url"
            write_ours(str(source), str(shards), 0, options.processes)
            for part, rates in _from_url(options, folder, shards, say):
                body[part] = list(rates.rows())
        if "memory" in options.parts:
            body["memory"] = list(preparing_many(options, folder, say))
    finally:
        shutil.rmtree(folder)
    versions = {name: each.version(name) for name, each in ENVIRONMENTS.items()}
    return Result("data", conditions("no hosts", _note(options), load_before, versions), body)


def _libraries(
    options: argparse.Namespace,
) -> tuple[dict[str, Library], list[dict[str, str]]]:
    """Return the libraries that are measured, and those that cannot be, with the reason."""
    ways = {
        *(PREPARING if "prepare" in options.parts else ()),
        *(READING if {"read", "read_small"} & {*options.parts} else ()),
    }
    found, missing = {}, []
    for name in CALLS:
        if name in ways and (name not in OPTIONAL or name in options.peers):
            try:
                found[name] = Library(name)
            except PeerMissingError as error:
                missing.append({"way": name, "why": str(error)})
    return found, missing


def _preparing(
    options: argparse.Namespace, libraries: Mapping[str, Library], source: Path, say: Say
) -> Rates:
    out = source.with_name("out")

    def write(library: Library) -> float:
        cpu_s = library.write(source, out, SHORT_SIDE, options.processes)
        shutil.rmtree(out, ignore_errors=True)
        return cpu_s

    ways = {name: partial(write, libraries[name]) for name in PREPARING if name in libraries}
    return rounds(ways, options.rounds, options.pictures, say)


def _reading(
    options: argparse.Namespace,
    libraries: Mapping[str, Library],
    source: Path,
    out: Path,
    resize: int,
    say: Say,
) -> tuple[Rates, list[dict[str, str]]]:
    ways, failed = {}, []
    for name in READING:
        if name in libraries:
            folder = source if name == "full decode of files" else out / CALLS[name]
            try:
                if folder != source:
                    libraries[name].write(source, folder, resize, options.processes)
                libraries[name].read(folder, options.processes)  # imports what it needs
            except RunError as error:
                failed.append({"way": name, "why": str(error)})
            else:
                ways[name] = partial(libraries[name].read, folder, options.processes)
    return rounds(ways, options.rounds, options.pictures, say), failed


def _note(options: argparse.Namespace) -> str:
    width, height = SIZE
    return (
        f"{options.pictures} pictures of {width} x {height}, {options.processes} processes; the "
        "times include the start of the processes."
    )


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = ("prepare", "read", "read_small", "url", "memory")
    usual = [part for part in parts if part != "read_small"]
    told = f"what to measure (default: {' '.join(usual)})"
    parser.add_argument("--parts", nargs="+", choices=parts, default=usual, help=told)
    told = "beside what preparing and reading are measured (default: all)"
    parser.add_argument("--peers", nargs="+", choices=OPTIONAL, default=OPTIONAL, help=told)
    parser.add_argument("--pictures", type=at_least_one, default=2000, help="(default: 2000)")
    parser.add_argument("--rounds", type=at_least_one, default=12, help="(default: 12)")
    parser.add_argument("--processes", type=at_least_one, default=2, help="(default: 2)")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
