"""``hvd.export``: the exported model runs by itself, and gives the outputs of the live one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch import export
from hvd_elastic.worker.context import Context

EXAMPLE = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(alone: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    )


def live(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    model.eval()
    try:
        with torch.no_grad():
            found: torch.Tensor = model(inputs)
            return found
    finally:
        model.train()


def test_torch_export(model: torch.nn.Module) -> None:
    export(model, EXAMPLE, "net.pt2")
    loaded = torch.export.load("saved/net.pt2").module()
    for rows in (1, 4, 7):
        inputs = torch.randn(rows, 3)
        torch.testing.assert_close(loaded(inputs), live(model, inputs))
    assert all(module.training for module in model.modules())


def test_onnx(model: torch.nn.Module) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(model, EXAMPLE, "net.onnx")
    session = onnxruntime.InferenceSession("saved/net.onnx", providers=["CPUExecutionProvider"])
    inputs = torch.randn(7, 3)
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), live(model, inputs))


class Branching(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2 if inputs.sum() > 0 else inputs


class Noisy(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.rand_like(inputs)


def test_what_a_format_cannot_hold_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ScriptError, match=r"net\.pt2 cannot hold this model"):
        export(Branching(), EXAMPLE, "net.pt2")
    with pytest.raises(ScriptError, match="differ from the model's by"):
        export(Noisy(), EXAMPLE, "net.pt2")
    with pytest.raises(ScriptError, match=r"ends in \.pt2"):
        export(model, EXAMPLE, "net.pt")
    assert not Path("saved").exists()
