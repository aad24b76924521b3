"""The metadata service of Google's cloud on a virtual host: `preempted` is what a file says."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ADDRESS = "169.254.169.254"
SAYS = Path(sys.argv[1])


class Service(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        text = SAYS.read_text() if name == "preempted" else "NONE"
        known = self.headers.get("Metadata-Flavor") == "Google"
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


subprocess.run(["ip", "address", "replace", f"{ADDRESS}/32", "dev", "lo"], check=True)
HTTPServer((ADDRESS, 80), Service).serve_forever()
