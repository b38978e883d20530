"""Chromium, which looks at pages by a page of its own (site_probe.html)."""

from __future__ import annotations

import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = Path(__file__).with_name("site_probe.html")


def probe(site: Path, home: Path, *flags: str, query: str = "") -> dict[str, dict[str, Any]]:
    """Serve the site to Chromium until the probe has sent what it finds.

    Args:
        site: The folder, with the probe and pages.json.
        home: An empty folder for Chromium.
        flags: More options for Chromium.
        query: The widths to look at, such as ``"?widths=360,800"``.
    """
    answers: queue.Queue[bytes] = queue.Queue()

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(site))

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={home}"]
        command = [str(CHROMIUM), *fixed, *flags, f"http://127.0.0.1:{server.server_port}/{PROBE.name}{query}"]
        quiet = subprocess.DEVNULL
        chromium = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            found: dict[str, dict[str, Any]] = json.loads(answers.get(timeout=200))
        finally:
            os.killpg(chromium.pid, signal.SIGKILL)
            chromium.wait()
            server.shutdown()
    return found
