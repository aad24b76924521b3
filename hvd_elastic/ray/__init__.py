"""Ray: a Ray cluster on the hosts of a hostfile, and elastic training on any Ray cluster."""

from hvd_elastic.engines.ray.data import RayDataset
from hvd_elastic.engines.ray.trainer import ElasticTrainer, Result

__all__ = ["ElasticTrainer", "RayDataset", "Result"]
