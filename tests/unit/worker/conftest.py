"""What the tests of this folder share."""

from tests.unit.torch.conftest import alone

__all__ = ["alone"]
