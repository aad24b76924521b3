"""The process of a host pod, before it dials."""

from __future__ import annotations

import json
import signal
import sys

from hvd_elastic.engines.kubernetes import host


def test_an_image_with_another_version_is_refused_in_words(tmp_path, monkeypatch, capsys) -> None:
    invitation = tmp_path / "invitation"
    invitation.write_text(json.dumps({"version": "0.0.1"}))
    monkeypatch.setattr(sys, "argv", ["host", str(invitation)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert host.main() == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "that of the leader has 0.0.1: use one image for both" in capsys.readouterr().err
