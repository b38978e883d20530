"""The folder with the results of a tour, and what it prints about them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from pathlib import Path

from benchmarks.session import SetupError


class Output:
    """The folder with the results: encrypted/, decrypted/, the key, and a manifest of the encrypted files' lengths.

    What an earlier tour left is replaced, with its key kept, if this one makes each of its files again; so no run
    takes away what only an encrypted file still holds.
    """

    MADE_BY = "ags_fast tour"

    def __init__(self, root: Path, names: list[str]) -> None:
        self.encrypted = root / "encrypted"
        self.decrypted = root / "decrypted"
        self.key_file = root / "key"
        self._manifest = root / "manifest.json"
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            lost = self._earlier() - set(names)
            if lost:
                raise SetupError(f"{root} holds {min(lost)}.ags of an earlier run, which this run would not replace")
        self.write_manifest(dict.fromkeys(names))
        if not self.key_file.exists():
            write_private(self.key_file, os.urandom(16))

    def _earlier(self) -> set[str]:
        with contextlib.suppress(OSError, ValueError):
            manifest = json.loads(self._manifest.read_bytes())
            if isinstance(manifest, dict) and manifest.get("made_by") == self.MADE_BY:
                return set(manifest["files"])
        raise SetupError(f"{self._manifest.parent} is neither empty nor from an earlier tour: give a new folder")

    def write_manifest(self, lengths: dict[str, int | None]) -> None:
        files = {name: {"length": length, "aad_prefix": name} for name, length in lengths.items()}
        manifest = {"made_by": self.MADE_BY, "format": "AGS1", "files": files}
        write_private(self._manifest, json.dumps(manifest, indent=1).encode())


def write_private(path: Path, data: bytes) -> None:
    """A file for its owner only (mode 0600) that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


def print_output(out: Output, name: str, length: int) -> None:
    root = out.key_file.parent
    words = ["ags-fast", "stream", "decrypt", out.encrypted / f"{name}.ags", "--key-file", out.key_file]
    words += ["--aad-prefix", name, "--length", length, "-o", Path(name).name]
    print(f"\nIn {root} are now: encrypted/, decrypted/, manifest.json with the lengths to trust, and the key, which")
    print("in real life is kept elsewhere. One file by hand:\n")
    print("   " + " \\\n      ".join([shlex.join(map(str, words[:4])), shlex.join(map(str, words[4:]))]))
