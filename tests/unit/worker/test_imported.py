"""What a worker tells of the modules that its script has imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.worker.imported import installed_modules

ROOT = Path(__file__).resolve().parents[3]


def test_only_installed_modules_are_told_to_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_script.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("beside_the_script")
    names = installed_modules()
    assert {"json", "msgspec", "hvd_elastic.wire.messages"} <= {*names}
    assert not {"beside_the_script", "__main__", "sys", __name__} & {*names}
    assert names.index("json") < names.index("hvd_elastic.worker.imported")
    del sys.modules["beside_the_script"]


def test_the_script_and_what_lies_beside_it_have_a_digest(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/model.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text(
        "import json, parts.model\n"
        "from hvd_elastic.worker.imported import script_digests\n"
        "print(json.dumps(script_digests()))\n"
    )

    def digests() -> dict[str, str]:
        found = subprocess.run(
            [sys.executable, "train.py"],
            capture_output=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        told: dict[str, str] = json.loads(found.stdout)
        return told

    before = digests()
    script.write_text(script.read_text() + "# edited\n")
    after = digests()
    assert {*before} == {*after} == {"train.py", "parts/model.py"}
    assert {name for name in before if before[name] != after[name]} == {"train.py"}
