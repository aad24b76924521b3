"""The examples, run as they are; what the manual prints of them, held against the files."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.bench.digits_data import write_digits
from scripts import migration_doc
from tests.paths import WORKER_PYTHONPATH

pytest.importorskip("torch")
import torch

from hvd_elastic.worker import context

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
FROM_TORCH = ("from_plain.py", "from_ddp.py")
FROM_HOROVOD = ("from_horovod.py", "from_horovod_elastic.py")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenth of the digits."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder, sample=180)
    return folder


@pytest.fixture(scope="module")
def two_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of two classes in the layout of ImageNet."""
    pytest.importorskip("PIL", reason="Pillow draws the pictures")
    from datasets_prep.imagenet_layout import Settings, prepare

    folder = tmp_path_factory.mktemp("shapes")
    prepare(folder, Settings(classes=2, per_class=40, val_per_class=20, size=32, seed=0))
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
    assert found["loader"].planner.progress >= 6 * 144 / 12 * 0.9
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
    assert found["loader"].planner.epochs == pytest.approx(3, abs=0.5)
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


def test_imagenet(
    two_shapes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--depth", 18, "--width", 16, "--image-size", 32, "--crop", 0.6, "--workers", 0)
    quick = ("--epochs", 12, "--batch-size", 16, "--max-batch-size", 32, "--warmup", 0.5)
    # The default rate, 0.1 for 256 examples, would be too low for the few steps of a small set.
    options = (*small, *quick, "--lr", 0.1)
    run(EXAMPLES / "imagenet.py", monkeypatch, "--data", two_shapes, *options)
    output = capsys.readouterr().out
    assert re.search(
        r"^pass 11: loss 0\.\d+, top-1 accuracy [01]\.\d+, top-5", output, re.MULTILINE
    )
    best = re.search(r"^best top-1 accuracy ([\d.]+) on 40 pictures$", output, re.MULTILINE)
    assert best is not None, output
    assert float(best[1]) > 0.7, "a coin reaches a half"


def test_imagenet_reads_shards(
    two_shapes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # before the import, which adds to it too
    from datasets_prep import imagenet

    data = tmp_path / "shards"
    words = ("--source", two_shapes, "--out", data, "--processes", 1, "--per-shard", 25)
    monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
    assert imagenet.main() == 0
    small = ("--depth", 18, "--width", 8, "--image-size", 32, "--workers", 1, "--epochs", 1)
    quick = ("--batch-size", 20, "--max-batch-size", 20, "--warmup", 0)
    found = run(EXAMPLES / "imagenet.py", monkeypatch, "--data", data, *small, *quick)
    assert found["ShardDataset"](data / "train").classes == ("n00000000", "n00000001")
    assert "on 40 pictures" in capsys.readouterr().out
    index = data / "train" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "classes": []}))
    monkeypatch.setattr(context, "_context", None)
    with pytest.raises(SystemExit, match=r"index_shards\.py .*/train --classes FILE"):
        run(EXAMPLES / "imagenet.py", monkeypatch, "--data", data, *small, *quick)


def classes_of_imagenet() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "imagenet.py"), run_name="not started")


def test_the_resnets_are_those_of_the_paper() -> None:
    resnet = classes_of_imagenet()["ResNet"]
    for depth, parameters in ((18, 11_689_512), (50, 25_557_032)):
        model = resnet(depth, 64, 1000)
        assert sum(each.numel() for each in model.parameters()) == parameters
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


def test_pictures_are_read_whatever_their_size_and_kind(two_shapes: Path, tmp_path: Path) -> None:
    from PIL import Image

    pictures = classes_of_imagenet()["Pictures"]
    ours = pictures(two_shapes / "val", ["n00000000", "n00000001"], 48)
    assert ours.labels == [0] * 20 + [1] * 20
    for mode, name, size in (("L", "a.jpg", (90, 40)), ("CMYK", "b.JPEG", (9, 200))):
        (tmp_path / "cat").mkdir(exist_ok=True)
        Image.new(mode, size, 100 if mode == "L" else (0, 255, 255, 0)).save(
            tmp_path / "cat" / name
        )
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    for crop in (None, 0.1):
        images, labels = zip(*pictures(tmp_path, ["ant", "cat"], 48, crop), strict=True)
        assert labels == (1, 1)
        assert all(image.shape == (3, 48, 48) and image.dtype == torch.uint8 for image in images)
        grey, red = (image.float().mean((1, 2)).tolist() for image in images)
        assert grey == pytest.approx([100] * 3, abs=2)
        assert red == pytest.approx([255, 0, 0], abs=4)
    (tmp_path / "cat" / "a.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(RuntimeError, match=r"cat/a\.jpg cannot be read .*--verify finds"):
        pictures(tmp_path, ["cat"], 48)[0]


def test_a_folder_without_pictures_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "imagenet.py"
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "--data", tmp_path)
    assert f"imagenet_layout.py --out {tmp_path}" in capsys.readouterr().err
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"no pictures in .*train/CLASS/"):
        run(script, monkeypatch, "--data", tmp_path)


def test_a_batch_that_is_larger_than_all_there_is_is_said(
    two_shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"--batch-size 256: it must be at most .*80 pictures"):
        run(EXAMPLES / "imagenet.py", monkeypatch, "--data", two_shapes)


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
        env={**own, **rank, **where, "PYTHONPATH": WORKER_PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^test accuracy 0\.\d+$", done.stdout, re.MULTILINE)) == len(scripts)
    assert snapshot.exists() == ("from_ddp.py" in scripts)


def test_a_machine_of_the_rack_whose_host_is_gone_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACK_RECORDS", str(tmp_path / "rack.json"))
    rack = runpy.run_path(str(EXAMPLES / "rack" / "machines.py"), run_name="not started")
    machines = [{"host": name, "state": "running", "tags": {"cloud": "c"}} for name in ("1", "4")]
    rack["save"](machines)
    status = json.dumps({"hosts": [{"name": "1", "status": "up"}]})
    monkeypatch.setitem(rack["act"].__globals__, "virtclust", lambda *_: status)
    listed = rack["act"]("list", {"tags": {"cloud": "c"}})["machines"]
    assert [machine["state"] for machine in listed] == ["running", "ended"]


def test_every_script_of_the_guide_compiles_and_is_shown() -> None:
    pages = migration_doc.PAGES.values()
    shown = {script for pairs in pages for pair in pairs.values() for script in pair}
    for path in migration_doc.SCRIPTS.glob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
        assert path.name in shown | {"digits_task.py", "keras_task.py"}


@pytest.mark.parametrize("page", migration_doc.PAGES, ids=lambda page: page.stem)
def test_diffs_and_line_counts_of_the_guide_are_those_of_the_scripts(page: Path) -> None:
    text, pairs = page.read_text(encoding="utf-8"), migration_doc.PAGES[page]
    assert text == migration_doc.renew(text, pairs), "run: python scripts/migration_doc.py"
    assert text.count("<!-- diff: ") == len(pairs)
    assert "<!-- lines -->\n| from |" in text
