"""What the demo needs is in the package, or named with the command that brings it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from hvd_elastic.bench import demo
from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.cli import app

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("absent", "mend"),
    [("torch", "pip install 'torch>="), ("horovod", "hvd-elastic build-horovod")],
)
def test_what_is_not_installed_is_named(
    absent: str, mend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name == absent else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(SystemExit) as ended:
        app.main(["demo"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the demo trains with {absent}, which is not installed")
    assert mend in error


def test_its_script_is_the_example() -> None:
    example = ROOT / "scripts/examples/digits.py"
    assert demo._TRAINING.read_text() == example.read_text()


def test_the_data_is_scikit_learns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    assert write_digits(tmp_path) == (1437, 360)
    with np.load(tmp_path / "test.npz") as arrays:
        assert np.array_equal(arrays["images"].reshape(-1, 64) * 16, images[::5])
        assert np.array_equal(arrays["labels"], labels[::5])
