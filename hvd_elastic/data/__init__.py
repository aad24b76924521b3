"""Data sets in shards, read by index: for every frontend, without PyTorch or TensorFlow.

>>> from hvd_elastic.data import ShardDataset, RandomCrop  # doctest: +SKIP
>>> train = ShardDataset("/data/imagenet/train", decode=RandomCrop(224))  # doctest: +SKIP
"""

from hvd_elastic.data.dataset import ShardDataset
from hvd_elastic.data.decoding import decode_mask
from hvd_elastic.data.images import CentreCrop, RandomCrop
from hvd_elastic.data.index import load_index
from hvd_elastic.data.indexing import build_index, verify
from hvd_elastic.data.mixture import Mixture
from hvd_elastic.data.stream import Stream
from hvd_elastic.data.writer import ShardWriter

__all__ = [
    "CentreCrop",
    "Mixture",
    "RandomCrop",
    "ShardDataset",
    "ShardWriter",
    "Stream",
    "build_index",
    "decode_mask",
    "load_index",
    "verify",
]
