"""The folder with the results of a tour, and what it prints about them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

from benchmarks.session import SetupError
from benchmarks.tour.files import hidden


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


def print_end(out: Output | None, lengths: list[tuple[str, int]], sizes: dict[str, int]) -> None:
    """Say where things are, and which commands look into them.

    out: the folder, unless it was a temporary one. sizes: of the plain files, in bytes.
    """
    if out is None:
        _print_next()
        return
    root = out.key_file.parent
    # An empty file, or a marker, would show nothing.
    name, length = max(lengths, key=lambda row: (sizes[row[0]] > 0, row[0].endswith(".avro"), not hidden(row[0])))
    program = str(Path(sys.executable).with_name("ags-fast"))
    listing = [program, "ls", "-l", root / "dataset"]
    listing += ["--keystore", root / "keystore.json", "--key-file", root / "keystore.key"]
    words = [program, "stream", "decrypt", out.encrypted / f"{name}.ags", "--data-key-file", out.key_file]
    words += ["--aad-prefix", name, "--length", length, "--overwrite", "-o", root / f"by-hand{Path(name).suffix}"]
    print(f"\nIn {root} are now: encrypted/ and decrypted/, manifest.json with the lengths to trust,")
    print("dataset/ and restored/, and the keys, which in real life are kept elsewhere. What the dataset has:\n")
    print(_pasted(listing, 4))
    print("\nOne file by hand:\n")
    print(_pasted(words, 4))


def _print_next() -> None:
    program = Path(sys.executable).with_name("ags-fast")
    print("\nThe files were in a temporary folder, and are gone. To keep them, and to see how to look into them:\n")
    print("   make run OUTPUT=build/tour")
    print(f"\nThe command of ags_fast is {program}; its environment:\n")
    print(f"   . {shlex.quote(str(program.with_name('activate')))}")


def _pasted(words: list[object], first: int) -> str:
    """A command in two lines for a shell, the first with `first` words."""
    return "   " + " \\\n      ".join(shlex.join(map(str, part)) for part in (words[:first], words[first:]))
