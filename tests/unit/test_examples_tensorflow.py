"""The examples of TensorFlow and Keras, run as they are."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.bench.digits_data import write_digits
from scripts import migration_doc
from tests.paths import COSTLY, WORKER_PYTHONPATH

EXAMPLES = migration_doc.SCRIPTS.parent
NEEDED = ("tensorflow", "horovod", "hvd_elastic.keras")

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED),
    reason=f"one of {', '.join(NEEDED)} is not there",
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenth of the digits."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder, sample=180)
    return folder


@pytest.mark.parametrize(
    "scripts",
    [
        ("digits_keras.py", "digits_tensorflow.py"),
        pytest.param(("migration/keras_elastic.py", "migration/loop_elastic.py"), marks=COSTLY),
        pytest.param(("migration/keras_plain.py", "migration/loop_plain.py"), marks=COSTLY),
        pytest.param(("migration/keras_multiworker.py",), marks=COSTLY),
        pytest.param(("migration/loop_horovod.py",), marks=COSTLY),
    ],
    ids=lambda scripts: Path(scripts[0]).stem,
)
def test_examples_train(scripts: tuple[str, ...], digits: Path, tmp_path: Path) -> None:
    """In a process of their own, so that TensorFlow is imported once for several."""
    program = f"""
import runpy, sys
for script in {[str(EXAMPLES / script) for script in scripts]}:
    if "hvd_elastic" in sys.modules:
        from hvd_elastic.worker import context
        context._context = None
    sys.path[0] = script.rpartition("/")[0]
    sys.argv = [script, "--data", {str(digits)!r}, "--epochs", "3"]
    runpy.run_path(script, run_name="__main__")
"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": WORKER_PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**own, **quiet},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^test accuracy ([01]\.\d+)$", done.stdout, re.MULTILINE)
    assert len(found) == len(scripts)
    assert min(map(float, found)) > 0.2, "at random it is a tenth"


@COSTLY
def test_characters_keras(tmp_path: Path) -> None:
    small = ("--characters", "40000", "--width", "32", "--layers", "1", "--epochs", "2")
    quick = ("--context", "16", "--lr", "5e-3", "--warmup", "10", "--sample", "12")
    own = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": WORKER_PYTHONPATH}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "characters_keras.py", *small, *quick],
        cwd=tmp_path,
        env={**own, **quiet},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"^(\d\.\d+) bits per character", done.stdout, re.MULTILINE)
    assert found is not None
    assert float(found[1]) < 5, "at random it is 8"
