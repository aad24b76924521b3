"""The example of Lightning, run as it is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")

from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.worker import context


@pytest.mark.filterwarnings("ignore")
def test_digits_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(tmp_path, sample=360)
    monkeypatch.setattr(context, "_context", None)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything() sets them
        monkeypatch.setenv(name, "0")
    monkeypatch.chdir(tmp_path)
    script = ROOT / "scripts" / "examples" / "digits_lightning.py"
    options = ["--data", tmp_path, "--epochs", 6, "--batch-size", 12]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, options)])
    found = runpy.run_path(str(script), run_name="__main__")
    accuracy = found["found"]["test_accuracy"]
    assert accuracy > 0.5
    assert f"test accuracy {accuracy:.4f}" in capsys.readouterr().out
    assert [*tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")]
