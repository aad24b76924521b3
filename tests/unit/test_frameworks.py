"""What the versions of installed frameworks are judged to be."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hvd_elastic import frameworks
from hvd_elastic.errors import ScriptError


@pytest.mark.parametrize(
    ("tensorflow", "keras", "environment", "told"),
    [
        ("2.21.0", "3.15.1", {}, None),
        ("2.21.1", "3.12.0", {"TF_USE_LEGACY_KERAS": "0"}, None),
        (None, "3.15.1", {}, "TensorFlow is not installed"),
        ("2.15.1", "3.15.1", {}, "TensorFlow 2.15.1 is installed, and .* needs TensorFlow 2.21"),
        ("2.22.0-rc1", "3.15.1", {}, "TensorFlow 2.22.0-rc1 is installed"),
        ("2.21.0", None, {}, "Keras is not installed"),
        ("2.21.0", "2.15.0", {}, "Keras 2.15.0 does not fit TensorFlow 2.21.0, .* 3.12 to 3.x"),
        ("2.21.0", "3.9.2", {}, "Keras 3.9.2 does not fit"),
        ("2.21.0", "4.0.0", {}, "Keras 4.0.0 does not fit"),
        ("2.21.0", "3.15.1", {"TF_USE_LEGACY_KERAS": "1"}, "TF_USE_LEGACY_KERAS .* tf_keras"),
    ],
)
def test_versions_that_do_not_fit_are_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch,
    tensorflow: str | None,
    keras: str | None,
    environment: dict[str, str],
    told: str | None,
) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(frameworks, "tensorflow_version", lambda: tensorflow)
    monkeypatch.setattr(frameworks, "version_of", lambda _: keras)
    if told is None:
        frameworks.check_tensorflow()
        return
    keras_that_fits = "'keras>=3.12.3,!=3.13.*,!=3.14.*,<4'"
    fits = f".*; run: .*pip install 'tensorflow-cpu>=2.21,<2.22' {keras_that_fits}"
    if environment:
        fits = ".*; unset the variable$"
    with pytest.raises(ScriptError, match=told + fits):
        frameworks.check_tensorflow()


def test_a_torch_that_runs_code_of_files_is_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frameworks.check_torch("2.10.0+cu128")
    fits = r"PyTorch 2\.9\.1\+cpu .*CVE-2026-24747.* needs 2\.10; run: .*'torch>=2\.10,<2\.15'"
    with pytest.raises(ScriptError, match=fits):
        frameworks.check_torch("2.9.1+cpu")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    monkeypatch.delitem(sys.modules, "hvd_elastic.torch", raising=False)
    with pytest.raises(ScriptError, match=fits):
        importlib.import_module("hvd_elastic.torch")


@pytest.fixture
def no_keras_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let Keras be not imported, and read its settings from the folder that is returned."""
    monkeypatch.delitem(sys.modules, "keras.src.backend.config", raising=False)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return tmp_path


def test_keras_on_tensorflow_is_taken(no_keras_yet: Path) -> None:
    frameworks.check_keras_backend()
    (no_keras_yet / "keras.json").write_text('{"backend": "tensorflow"}')
    frameworks.check_keras_backend()


def test_keras_on_torch_is_sent_to_the_side_of_pytorch(
    no_keras_yet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_keras_yet / "keras.json").write_text('{"backend": "torch"}')
    with pytest.raises(ScriptError, match=r"backend torch.*torch\.nn\.Module.*hvd_elastic\.torch"):
        frameworks.check_keras_backend()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(ScriptError, match=r"backend jax.*KERAS_BACKEND=tensorflow"):
        frameworks.check_keras_backend()
    loaded = types.SimpleNamespace(backend=lambda: "tensorflow")
    monkeypatch.setitem(sys.modules, "keras.src.backend.config", loaded)
    frameworks.check_keras_backend()


def test_a_model_of_tf_keras_is_refused() -> None:
    legacy = type("Model", (), {"__module__": "tf_keras.src.engine.training"})
    own = type("Net", (legacy,), {"__module__": "__main__"})
    with pytest.raises(ScriptError, match=r"Net is of tf_keras .* needs Keras 3: `import keras`"):
        frameworks.check_keras_model(own())
    frameworks.check_keras_model(object())


def test_a_check_imports_no_framework() -> None:
    program = (
        "import sys; from hvd_elastic import frameworks as f; f.tensorflow_version();"
        "f.version_of('torch', 'keras'); f._keras_backend();"
        "assert not {'torch', 'tensorflow', 'keras', 'horovod'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_triton_after_tensorflow_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would end the process by signal 11."""
    (tmp_path / "triton.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    frameworks.refuse_triton_after_tensorflow()
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    with pytest.raises(ScriptError, match="`import triton` before the first import of TensorFlow"):
        importlib.import_module("triton")
    monkeypatch.delitem(sys.modules, "tensorflow")
    importlib.import_module("triton")
    del sys.modules["triton"]  # later tests of this process would take the empty file for it
