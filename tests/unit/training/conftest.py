"""A training process of PyTorch's for the tests of this folder."""

from tests.unit.torch.conftest import alone

__all__ = ["alone"]
