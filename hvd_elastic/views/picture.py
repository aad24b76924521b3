"""Draw a page as a PNG picture, with Chromium or Chrome without a window."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.install.prerequisites import BROWSERS, find_program

_LIMIT_S = 60.0
"""How long a browser may take; on a busy machine it starts slowly."""
_NO_CONTROLS = "<style>button, details { display: none }</style></head>"


def find_browser() -> str:
    """Return the path of a browser that draws pages.

    Raises:
        UsageError: there is none.
    """
    found = find_program(*BROWSERS)
    if found is None:
        raise UsageError(
            "a PNG is drawn by Chromium or Chrome, and neither is installed here. Install one (apt "
            "install chromium), or write an .html file: its chart has a button that saves a PNG"
        )
    return found


def write_picture(page: str, path: Path, width: int, height: int) -> None:
    """Draw the top of a page as a PNG file.

    Args:
        page: page as HTML, without parts from elsewhere.
        path: file to write.
        width, height: size of the picture [pixels].

    Raises:
        UsageError: there is no browser.
        RunError: the browser failed, or the file cannot be written.
    """
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-picture-") as name:
        folder = Path(name)
        still = page.replace("</head>", _NO_CONTROLS, 1)
        (folder / "page.html").write_text(still, encoding="utf-8")
        drawn = folder / "page.png"
        options = [f"--screenshot={drawn}", f"--window-size={width},{height}"]
        options += [f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # a browser of root has none
        command = [browser, "--headless", *options, (folder / "page.html").as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"{path} cannot be drawn: {error}") from error
        if not drawn.exists():
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise RunError(f"{path} cannot be drawn: {browser} says: {last[0]}")
        try:
            path.write_bytes(drawn.read_bytes())
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from error
