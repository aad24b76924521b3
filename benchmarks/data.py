"""Measures preparing and reading shards of pictures beside other tools; see README.md here.

Run it: ``python benchmarks/data.py --out benchmarks/results/data.json``. In every round each way
runs once, in another order, in the same number of processes. A figure is the median over the
rounds of ours / the other way, both in pictures per second, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image

from benchmarks.step_time import interval
from benchmarks.testbed.command import Say, at_least_one, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from datasets_prep import frame, pictures
from datasets_prep.processes import in_processes
from hvd_elastic.data import RandomCrop, ShardDataset, load_index
from hvd_elastic.model.sharding import block_order, blocks_from

ROOT = Path(__file__).resolve().parents[1]
SIZE = (500, 375)
SHORT_SIDE, QUALITY, CROP = 256, 92, 224
PER_SHARD = 125
UNIQUE = 20
BATCH = 50
WINDOW = 4
DELAY_S, LINK_BYTES_PER_S = 0.02, 50e6
MANY = (20_000, 200_000)
NEEDS = {"webdataset": "webdataset", "litdata": "litdata"}
CONVERT = pictures.ToJpeg(SHORT_SIDE, QUALITY)


def write_pictures(folder: Path, count: int) -> list[Path]:
    """Write JPEG files of noise of several scales, of about the size of ImageNet's."""
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
    paths = [folder / f"{number:06d}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(kinds[number % UNIQUE])
    return paths


# -- preparing -------------------------------------------------------------------------------


def _settings(processes: int, convert: Any) -> frame.Settings:
    return frame.Settings("tar", ("jpg",), PER_SHARD, convert, processes=processes)


def prepare_ours(paths: Sequence[Path], out: Path, processes: int, convert: Any = CONVERT) -> None:
    """Write shards with an index, read back."""
    sources = [frame.Source(str(path), path.name, 0) for path in paths]
    frame.prepare(out, sources, ("one",), _settings(processes, convert))


def _pieces(paths: Sequence[Path]) -> list[list[Path]]:
    return [list(paths[at : at + PER_SHARD]) for at in range(0, len(paths), PER_SHARD)]


def _convert_all(paths: Sequence[Path]) -> int:
    for path in paths:
        CONVERT(path.read_bytes())
    return len(paths)


def prepare_bare(paths: Sequence[Path], _: Path, processes: int) -> None:
    """Decode, resize and encode in the same processes, and write nothing."""
    list(in_processes(_convert_all, _pieces(paths), processes))


def _write_webdataset(out: Path, piece: tuple[int, list[Path]]) -> int:
    import webdataset

    number, paths = piece
    with webdataset.TarWriter(str(out / f"{number:06d}.tar")) as writer:
        for path in paths:
            ((jpeg,),) = CONVERT(path.read_bytes())
            writer.write({"__key__": path.stem, "jpg": jpeg, "cls": 0})
    return len(paths)


def prepare_webdataset(paths: Sequence[Path], out: Path, processes: int) -> None:
    """Write shards with WebDataset's writer, one in each of our processes."""
    out.mkdir()
    pieces = list(enumerate(_pieces(paths)))
    list(in_processes(partial(_write_webdataset, out), pieces, processes))


def _litdata_sample(path: str) -> dict[str, Any]:
    ((jpeg,),) = CONVERT(Path(path).read_bytes())
    return {"jpg": jpeg, "cls": 0}


def prepare_litdata(paths: Sequence[Path], out: Path, processes: int) -> None:
    """Write chunks with ``litdata.optimize``."""
    import litdata

    litdata.optimize(
        fn=_litdata_sample,
        inputs=[str(path) for path in paths],
        output_dir=str(out),
        num_workers=processes,
        chunk_bytes="16MB",
    )


PREPARING: dict[str, Callable[..., None]] = {
    "ours": prepare_ours,
    "bare loop": prepare_bare,
    "webdataset": prepare_webdataset,
    "litdata": prepare_litdata,
}


# -- reading ---------------------------------------------------------------------------------


class Files:
    """PyTorch's usual data set: files, decoded whole by Pillow."""

    def __init__(self, paths: Sequence[Path], crop: Callable[[bytes], Any]) -> None:
        self._paths, self._crop = paths, crop

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.array(self._crop(self._paths[index].read_bytes())), 0


def _epoch(dataset: Any, processes: int, *, shuffle: bool = True) -> None:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(dataset, BATCH, num_workers=processes, shuffle=shuffle or None)
    for _ in loader:
        pass


def read_ours(_: Sequence[Path], shards: Path, processes: int) -> None:
    """Read our shards with a scaled decode."""
    _epoch(ShardDataset(shards, np.array, decode=RandomCrop(CROP)), processes)


def read_files(paths: Sequence[Path], _: Path, processes: int) -> None:
    """Read files with a full decode."""
    _epoch(Files(paths, RandomCrop(CROP, scaled=False)), processes)


def _webdataset_sample(sample: tuple[bytes, bytes]) -> tuple[np.ndarray, int]:
    return np.array(RandomCrop(CROP, scaled=False)(sample[0])), int(sample[1])


def read_webdataset(_: Sequence[Path], shards: Path, processes: int) -> None:
    """Read the same shards with WebDataset and a full decode."""
    import webdataset

    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    read = webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(1000)
    _epoch(read.to_tuple("jpg", "cls").map(_webdataset_sample), processes, shuffle=False)


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
) -> Iterator[tuple[str, dict[str, list[float]]]]:
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


def rounds(
    ways: Mapping[str, Callable[[], object]], count: int, items: int, say: Say
) -> dict[str, list[float]]:
    """Return the rate of each way in every round [1/s]."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    rng = random.Random(0)
    for number in range(count):
        for name in rng.sample(list(ways), len(ways)):
            began = time.monotonic()
            ways[name]()
            rates[name].append(items / (time.monotonic() - began))
            say(f"round {number + 1}: {name} {rates[name][-1]:.0f}/s")
    return rates


def rows(rates: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each way: its median rate, and ours relative to it."""
    for name, samples in rates.items():
        ratios = [ours / other for ours, other in zip(rates["ours"], samples, strict=True)]
        low, high = interval(ratios)
        yield {
            "way": name,
            "per_s": round(median(samples), 1),
            "ours_relative": round(median(ratios), 3),
            "interval": [round(low, 3), round(high, 3)],
            "samples": [round(sample, 1) for sample in samples],
        }


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure all parts."""
    load_before = os.getloadavg()
    body: dict[str, Any] = {
        "missing": [{"way": name} for name, module in NEEDS.items() if not _installed(module)]
    }
    folder = Path(tempfile.mkdtemp(prefix="hvd-elastic-data-", dir=options.folder))
    try:
        paths = write_pictures(folder / "files", options.pictures)
        if "prepare" in options.parts:
            body["prepare"] = list(rows(_preparing(options, paths, folder, say)))
        for part, convert in (("read", pictures.ToJpeg(0, QUALITY)), ("read_small", CONVERT)):
            if part in options.parts:
                shards = folder / part
                prepare_ours(paths, shards, options.processes, convert)
                body[part] = list(rows(_reading(options, paths, shards, say)))
        if "url" in options.parts:
            shards = folder / "url"
            prepare_ours(paths, shards, options.processes, pictures.ToJpeg(0, QUALITY))
            for part, rates in _from_url(options, folder, shards, say):
                body[part] = list(rows(rates))
        if "memory" in options.parts:
            body["memory"] = list(preparing_many(options, folder, say))
    finally:
        shutil.rmtree(folder)
    return Result("data", conditions("no hosts", _note(options), load_before), body)


def _preparing(
    options: argparse.Namespace, paths: Sequence[Path], folder: Path, say: Say
) -> dict[str, list[float]]:
    def run(way: Callable[..., None]) -> None:
        out = folder / "out"
        way(paths, out, options.processes)
        shutil.rmtree(out, ignore_errors=True)

    ways = {name: partial(run, way) for name, way in PREPARING.items() if _wanted(options, name)}
    return rounds(ways, options.rounds, len(paths), say)


def _reading(
    options: argparse.Namespace, paths: Sequence[Path], shards: Path, say: Say
) -> dict[str, list[float]]:
    ways = {"ours": read_ours, "full decode of files": read_files}
    if _wanted(options, "webdataset"):
        ways["webdataset"] = read_webdataset
    return rounds(
        {name: partial(way, paths, shards, options.processes) for name, way in ways.items()},
        options.rounds,
        len(paths),
        say,
    )


def _wanted(options: argparse.Namespace, name: str) -> bool:
    if name in NEEDS:
        return name in options.peers and _installed(NEEDS[name])
    return name != "bare loop" or name in options.peers


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


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
    peers = ("bare loop", *NEEDS)
    told = "beside what preparing and reading are measured (default: all)"
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers, help=told)
    parser.add_argument("--pictures", type=at_least_one, default=2000, help="(default: 2000)")
    parser.add_argument("--rounds", type=at_least_one, default=12, help="(default: 12)")
    parser.add_argument("--processes", type=at_least_one, default=2, help="(default: 2)")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
