"""Checks the versions of frameworks that this release trains with; imports none of them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from hvd_elastic.errors import ScriptError

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
"""Names of the frameworks for users, by the name of their module."""
TORCH_REQUIREMENT = "torch>=2.10,<2.15"
"""Versions that the patched Horovod compiles with; the same as in pyproject.toml, as the next."""
TENSORFLOW_REQUIREMENTS = ("tensorflow-cpu>=2.21,<2.22", "keras>=3.12.3,!=3.13.*,!=3.14.*,<4")
LIGHTNING_REQUIREMENT = "lightning>=2.5,<2.7"
"""Releases whose loops hvd_elastic.lightning knows."""
TRANSFORMERS_REQUIREMENTS = ("transformers>=5.4,<6", "accelerate>=1.12,<2")
"""Releases whose Trainer hvd_elastic.transformers knows."""
TRITON_FIRST = (
    "write `import triton` before the first import of TensorFlow, or use one framework alone"
)
_OLDEST_TORCH = (2, 10)
_TENSORFLOW = (2, 21)
_OLDEST_KERAS, _NO_KERAS = (3, 12), (4, 0)
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tf-nightly")


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def tensorflow_version() -> str | None:
    """Return the version of the installed TensorFlow, or None."""
    return version_of(*_DISTRIBUTIONS)


def install_command(*requirements: str) -> str:
    """Return the command that installs requirements for this interpreter.

    >>> from unittest import mock
    >>> with mock.patch("sys.executable", "/home/ada/my env/bin/python"):
    ...     install_command("keras>=3.12.3,<4")
    "'/home/ada/my env/bin/python' -m pip install 'keras>=3.12.3,<4'"
    """
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def why_no_torch(version: str) -> str | None:
    """Return why this PyTorch cannot train with this release; None: it can.

    >>> why_no_torch("2.13.0+cpu")
    >>> why_no_torch("2.9.1")
    'PyTorch 2.9.1 runs code of files that it loads (CVE-2026-24747), and hvd_elastic needs 2.10'
    """
    if _numbers(version) >= _OLDEST_TORCH:
        return None
    return (
        f"PyTorch {version} runs code of files that it loads (CVE-2026-24747), and hvd_elastic "
        f"needs {'.'.join(map(str, _OLDEST_TORCH))}"
    )


def check_torch(version: str) -> None:
    """Refuse a PyTorch that runs code of files that it loads with ``weights_only=True``.

    Raises:
        ScriptError: names what is installed, and the command that installs what fits.
    """
    why = why_no_torch(version)
    if why is not None:
        raise ScriptError(f"{why}; run: {install_command(TORCH_REQUIREMENT)}")


def why_no_lightning(version: str) -> str | None:
    """Return why this Lightning cannot train with this release; None: it can.

    >>> why_no_lightning("2.6.6")
    >>> why_no_lightning("2.4.0")
    'Lightning 2.4.0 is installed, and hvd_elastic.lightning works with lightning>=2.5,<2.7'
    """
    if (2, 5) <= _numbers(version) < (2, 7):
        return None
    works = f"hvd_elastic.lightning works with {LIGHTNING_REQUIREMENT}"
    return f"Lightning {version} is installed, and {works}"


def why_no_transformers(transformers: str | None, accelerate: str | None) -> str | None:
    """Return why these libraries of Hugging Face cannot train with this release; None: they can.

    Args:
        transformers, accelerate: their versions, or None.

    >>> why_no_transformers("5.24.0", "1.15.0")
    >>> why_no_transformers("5.3.0", "1.15.0")
    'transformers 5.3.0 is installed, and hvd_elastic.transformers works with transformers>=5.4,<6'
    """
    known = [("transformers", transformers, (5, 4), (6, 0))]
    known.append(("accelerate", accelerate, (1, 12), (2, 0)))
    for (name, version, oldest, end), works in zip(known, TRANSFORMERS_REQUIREMENTS, strict=True):
        there = f"{name} is not installed" if version is None else f"{name} {version} is installed"
        if version is None or not oldest <= _numbers(version) < end:
            return f"{there}, and hvd_elastic.transformers works with {works}"
    return None


def why_no_tensorflow(
    tensorflow: str | None, keras: str | None, environment: Mapping[str, str]
) -> str | None:
    """Return why this TensorFlow cannot train with this release; None: it can.

    Args:
        tensorflow: version of TensorFlow, or None.
        keras: version of Keras, or None.
        environment: variables that choose another Keras.

    >>> why_no_tensorflow("2.21.0", "3.15.1", {})
    >>> why_no_tensorflow("2.15.1", "2.15.0", {})
    'TensorFlow 2.15.1 is installed, and hvd_elastic needs TensorFlow 2.21 with Keras 3'
    """
    wanted = "hvd_elastic needs TensorFlow 2.21 with Keras 3"
    if tensorflow is None:
        return f"TensorFlow is not installed, and {wanted}"
    if _numbers(tensorflow) != _TENSORFLOW:
        return f"TensorFlow {tensorflow} is installed, and {wanted}"
    if keras is None:
        return f"Keras is not installed, and {wanted}"
    if not _OLDEST_KERAS <= _numbers(keras) < _NO_KERAS:
        oldest = ".".join(map(str, _OLDEST_KERAS))
        return f"Keras {keras} does not fit TensorFlow {tensorflow}, which needs {oldest} to 3.x"
    if environment.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        return f"TF_USE_LEGACY_KERAS selects tf_keras (Keras 2), and {wanted}; unset the variable"
    return None


def check_tensorflow() -> None:
    """Refuse a TensorFlow or Keras that does not fit; call it before the import of TensorFlow.

    Raises:
        ScriptError: names what is installed, what fits, and the command that installs it.
    """
    versions = tensorflow_version(), version_of("keras")
    why = why_no_tensorflow(*versions, {})
    if why is not None:
        raise ScriptError(f"{why}; run: {install_command(*TENSORFLOW_REQUIREMENTS)}")
    why = why_no_tensorflow(*versions, os.environ)
    if why is not None:
        raise ScriptError(why)


def check_keras_backend() -> None:
    """Refuse a Keras whose backend is not TensorFlow; it is chosen before Keras is imported.

    Raises:
        ScriptError: names the backend, and what trains with it instead.
    """
    backend = _keras_backend()
    if backend == "tensorflow":
        return
    if backend == "torch":
        instead = (
            "a model of that backend is a torch.nn.Module: train it with hvd_elastic.torch in a "
            "loop of PyTorch, or set KERAS_BACKEND=tensorflow for model.fit"
        )
    else:
        instead = "set KERAS_BACKEND=tensorflow"
    raise ScriptError(
        f"Keras has the backend {backend}, and hvd_elastic.keras trains with TensorFlow; {instead}"
    )


def check_keras_model(model: Any) -> None:
    """Refuse a model or optimizer of tf_keras.

    Raises:
        ScriptError: names its class, and what fits.
    """
    kind = next((c for c in type(model).__mro__ if c.__module__.startswith("tf_keras.")), None)
    if kind is not None:
        raise ScriptError(
            f"{type(model).__name__} is of tf_keras (Keras 2), and hvd_elastic needs Keras 3: "
            "`import keras` instead of tf_keras, and save the weights again with it"
        )


class _RefuseTriton(MetaPathFinder):
    """Refuses to import triton after TensorFlow, by which the process dies of signal 11."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Return None, for the finders that follow.

        Raises:
            ScriptError: it is triton, TensorFlow is loaded, and triton is installed.
        """
        if name == "triton" and "tensorflow" in sys.modules and has_triton():
            raise ScriptError(
                "PyTorch loads triton here (for torch.compile, or an optimizer), and the script "
                "has imported TensorFlow before: the process would die of signal 11. In the "
                f"script, {TRITON_FIRST}"
            )


def refuse_triton_after_tensorflow() -> None:
    """Have a script that imports triton after TensorFlow get an error; later calls do nothing."""
    if not any(isinstance(finder, _RefuseTriton) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RefuseTriton())


def has_triton() -> bool:
    """Return whether triton is installed, as with a PyTorch for GPUs; it is not imported."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, _RefuseTriton)]
    return any(finder.find_spec("triton", None) for finder in others)


def _keras_backend() -> str:
    """Return Keras's backend as Keras itself chooses it, without importing its backend."""
    if loaded := sys.modules.get("keras.src.backend.config"):
        return str(loaded.backend())
    named = os.environ.get("KERAS_BACKEND")
    if not named:
        home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            named = json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend")
    return named or "tensorflow"


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
