"""The example of Hugging Face's Trainer, run as it is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytest.importorskip("transformers", reason="transformers is not installed: make test-trainers")

from hvd_elastic.transformers import Trainer
from hvd_elastic.worker import context


@pytest.mark.filterwarnings("ignore")
def test_bytes_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(context, "_context", None)
    script = ROOT / "scripts" / "examples" / "bytes_transformers.py"
    text = tmp_path / "text"
    text.write_text("each example of an epoch is used exactly once\n" * 200)
    options = ["--data", text, "--output", tmp_path / "out", "--epochs", 2, "--length", 32]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, options)])
    found = runpy.run_path(str(script), run_name="__main__")
    assert isinstance(found["trainer"], Trainer)
    assert found["trainer"].state.best_metric < 4.0, "ln(256) is 5.5"
    assert "best evaluation loss" in capsys.readouterr().out
    assert [*tmp_path.glob("out/checkpoint-*/model.safetensors")]
