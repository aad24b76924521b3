"""Writes and reads pictures by one library each time that benchmarks/data.py says so.

Every library runs in a process of its own, in the Python that has it. A line of stdin is a call: a
JSON list of the name of a function here and its arguments; the answer is a line, the processor time
of the call and its processes [s] or what went wrong. All libraries get the same conversion and the
same random crops; apart from ours they decode whole pictures by Pillow.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.testbed.environments import import_streaming
from datasets_prep import frame, pictures
from hvd_elastic.data import RandomCrop, ShardDataset
from hvd_elastic.data.processes import in_processes

CROP = RandomCrop(224)
QUALITY = 92
PER_SHARD = 125
CHUNK = "8MB"
"""Size of the files of litdata and mosaicml-streaming: about that of our shards."""
BATCH = 50


def decode(data: bytes) -> np.ndarray:
    """Return a random part of a picture that is decoded whole."""
    picture = Image.open(BytesIO(data))
    left, top, width, height = CROP.part(*picture.size)
    box = (left, top, left + width, top + height)
    part = picture.convert("RGB").resize((CROP.size,) * 2, Image.Resampling.BILINEAR, box)
    if random.random() < CROP.flip:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(part)


def epoch(dataset: Any, processes: int, *, shuffle: bool = False) -> None:
    """Read an epoch through PyTorch's loader."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(dataset, BATCH, num_workers=processes, shuffle=shuffle or None)
    for _ in loader:
        pass


def files_in(folder: str) -> list[Path]:
    """Return the pictures of a folder."""
    return sorted(Path(folder).iterdir())


def pieces(paths: Sequence[Path]) -> list[list[Path]]:
    """Return the pictures of each shard."""
    return [list(paths[at : at + PER_SHARD]) for at in range(0, len(paths), PER_SHARD)]


def converted(resize: int, path: Path | str) -> bytes:
    """Return a picture as it is stored."""
    ((jpeg,),) = pictures.ToJpeg(resize, QUALITY)(Path(path).read_bytes())
    return jpeg


# -- ours


def write_ours(source: str, out: str, resize: int, processes: int) -> None:
    """Write shards with an index, read back."""
    sources = [frame.Source(str(path), path.name, 0) for path in files_in(source)]
    convert = pictures.ToJpeg(resize, QUALITY)
    settings = frame.Settings("tar", ("jpg",), PER_SHARD, convert, processes=processes)
    frame.prepare(Path(out), sources, ("one",), settings)


def read_ours(folder: str, processes: int) -> None:
    """Read our shards."""
    epoch(ShardDataset(folder, decode=CROP), processes, shuffle=True)


# -- without a library


def _convert_all(resize: int, paths: Sequence[Path]) -> int:
    for path in paths:
        converted(resize, path)
    return len(paths)


def write_nothing(source: str, _: str, resize: int, processes: int) -> None:
    """Decode, resize and encode, and write nothing."""
    list(in_processes(partial(_convert_all, resize), pieces(files_in(source)), processes))


class Files:
    """PyTorch's usual data set: files."""

    def __init__(self, folder: str) -> None:
        self._paths = files_in(folder)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return decode(self._paths[index].read_bytes()), 0


def read_files(folder: str, processes: int) -> None:
    """Read files."""
    epoch(Files(folder), processes, shuffle=True)


# -- WebDataset


def _write_webdataset(out: str, resize: int, piece: tuple[int, list[Path]]) -> int:
    import webdataset

    number, paths = piece
    with webdataset.TarWriter(f"{out}/{number:06d}.tar") as writer:
        for path in paths:
            writer.write({"__key__": path.stem, "jpg": converted(resize, path), "cls": 0})
    return len(paths)


def write_webdataset(source: str, out: str, resize: int, processes: int) -> None:
    """Write shards with WebDataset's writer, one in each of our processes."""
    Path(out).mkdir()
    numbered = list(enumerate(pieces(files_in(source))))
    list(in_processes(partial(_write_webdataset, out, resize), numbered, processes))


def _webdataset_sample(sample: tuple[bytes, bytes]) -> tuple[np.ndarray, int]:
    return decode(sample[0]), int(sample[1])


def read_webdataset(folder: str, processes: int) -> None:
    """Read shards with WebDataset."""
    import webdataset

    urls = [str(path) for path in sorted(Path(folder).glob("*.tar"))]
    read = webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(1000)
    epoch(read.to_tuple("jpg", "cls").map(_webdataset_sample), processes)


# -- litdata


def _litdata_sample(resize: int, path: str) -> dict[str, Any]:
    return {"jpg": converted(resize, path), "cls": 0}


def write_litdata(source: str, out: str, resize: int, processes: int) -> None:
    """Write chunks with ``litdata.optimize``."""
    import litdata

    litdata.optimize(
        fn=partial(_litdata_sample, resize),
        inputs=[str(path) for path in files_in(source)],
        output_dir=out,
        num_workers=processes,
        chunk_bytes=CHUNK,
    )


def _decoded(sample: dict[str, Any]) -> tuple[np.ndarray, int]:
    return decode(sample["jpg"]), sample["cls"]


@lru_cache
def _litdata(folder: str) -> Any:
    import litdata

    return litdata.StreamingDataset(folder, shuffle=True, transform=_decoded)


def read_litdata(folder: str, processes: int) -> None:
    """Read chunks with litdata and its loader."""
    import litdata

    for _ in litdata.StreamingDataLoader(
        _litdata(folder), batch_size=BATCH, num_workers=processes, shuffle=True
    ):
        pass


# -- mosaicml-streaming


def write_streaming(source: str, out: str, resize: int, _: int) -> None:
    """Write shards with ``MDSWriter``, which is one process."""
    streaming = import_streaming()

    columns = {"jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(out=out, columns=columns, size_limit=CHUNK.lower()) as writer:
        for path in files_in(source):
            writer.write({"jpg": converted(resize, path), "cls": 0})


@lru_cache
def _streaming(folder: str) -> Any:
    base: Any = import_streaming().StreamingDataset

    class Cropped(base):
        def __getitem__(self, at: Any) -> tuple[np.ndarray, int]:
            return _decoded(super().__getitem__(at))

    return Cropped(local=folder, shuffle=True, batch_size=BATCH)


def read_streaming(folder: str, processes: int) -> None:
    """Read shards with ``StreamingDataset``."""
    epoch(_streaming(folder), processes)


# -- calls

CALLS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        *(write_ours, write_nothing, write_webdataset, write_litdata, write_streaming),
        *(read_ours, read_files, read_webdataset, read_litdata, read_streaming),
    )
}


def main() -> None:
    """Do what each line of stdin says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print their progress
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        before_s = processor_time()
        try:
            CALLS[name](*arguments)
            answer: float | str = processor_time() - before_s
        except Exception as error:  # noqa: BLE001  told to the caller
            answer = f"{type(error).__name__}: {error}"
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)


def processor_time() -> float:
    """Return that of this process and those that it has waited for [s]."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
