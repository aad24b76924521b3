"""The examples, run as they are; what the manual prints of them, held against the files."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import migration_doc

pytest.importorskip("torch")
from hvd_elastic.torch import context

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
FROM_TORCH = ("from_plain.py", "from_ddp.py")
FROM_HOROVOD = ("from_horovod.py", "from_horovod_elastic.py")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenth of scikit-learn's digits."""
    pytest.importorskip("sklearn", reason="the digits come from scikit-learn")
    from datasets_prep.digits import prepare

    folder = tmp_path_factory.mktemp("digits")
    prepare(folder, sample=180)
    return folder


@pytest.fixture(autouse=True)
def launched_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``python SCRIPT``, though another script has run in this process."""
    monkeypatch.setattr(context, "_context", None)
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "HVD_ELASTIC_"))]:
        monkeypatch.delenv(name)


def run(script: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    """Run it to its end; its variables."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    monkeypatch.syspath_prepend(str(script.parent))
    return runpy.run_path(str(script), run_name="__main__")


def test_digits_adaptive(
    digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "digits_adaptive.py"
    found = run(script, monkeypatch, "--data", digits, "--batch-size", 12, "--epochs", 6)
    assert found["loader"].adaptation.progress >= 6 * 144 / 12 * 0.9
    assert found["accuracy"] > 0.5
    output = capsys.readouterr().out
    assert "pass 5: loss" in output
    assert f"test accuracy {found['accuracy']:.4f}" in output


def test_characters_adaptive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--characters", 60000, "--width", 32, "--layers", 1, "--epochs", 3, "--sample", 30)
    quick = ("--lr", 0.01, "--warmup", 10, "--max-batch-size", 64)
    found = run(EXAMPLES / "characters_adaptive.py", monkeypatch, *small, *quick)
    assert found["loader"].adaptation.epochs == pytest.approx(3, abs=0.5)
    assert found["bits"] < 6.0, "bytes at random are 8"
    output = capsys.readouterr().out
    assert "bits per character of text it has not seen" in output
    assert "\ndef " in output


def test_characters_of_a_text_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"ab" * 3000)
    small = ("--text", text, "--width", 16, "--layers", 1, "--epochs", 10, "--sample", 0)
    quick = ("--lr", 0.03, "--warmup", 1, "--max-batch-size", 32)
    found = run(EXAMPLES / "characters_adaptive.py", monkeypatch, *small, *quick)
    assert found["bits"] < 0.5, "it is easily foretold"


@pytest.mark.parametrize("script", ["to_elastic.py", "to_adaptive.py"])
def test_where_migration_leads(
    script: str, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(migration_doc.SCRIPTS / script, monkeypatch, "--data", digits, "--epochs", 3)
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("scripts", [FROM_TORCH, FROM_HOROVOD])
def test_where_migration_begins(scripts: tuple[str, ...], digits: Path, tmp_path: Path) -> None:
    """In a process of their own: they set up communicators that are there once."""
    if scripts is FROM_HOROVOD:
        pytest.importorskip("horovod.torch", reason="Horovod is not built; see make horovod")
    snapshot = tmp_path / "snapshot.pt"
    program = f"""
import runpy, sys
for script in {scripts}:
    sys.argv = [script, "--data", {str(digits)!r}, "--epochs", "2", "--snapshot", {str(snapshot)!r}]
    runpy.run_path(script, run_name="__main__")
"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=migration_doc.SCRIPTS,
        env={**own, **rank, **where},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^test accuracy 0\.\d+$", done.stdout, re.MULTILINE)) == len(scripts)
    assert snapshot.exists() == ("from_ddp.py" in scripts)


def test_every_script_of_the_guide_compiles_and_is_shown() -> None:
    shown = {script for pair in migration_doc.PAIRS.values() for script in pair}
    for path in migration_doc.SCRIPTS.glob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
        assert path.name in shown | {"digits_task.py"}


def test_diffs_and_line_counts_of_the_guide_are_those_of_the_scripts() -> None:
    text = migration_doc.PAGE.read_text(encoding="utf-8")
    assert text == migration_doc.renew(text), "run: python scripts/migration_doc.py"
    assert text.count("<!-- diff: ") == len(migration_doc.PAIRS)
    assert "<!-- lines -->\n| from |" in text
