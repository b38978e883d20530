"""What commands about one file share: where bytes come from and go to, keys, prefixes, a progress bar."""

from __future__ import annotations

import base64
import binascii
import errno
import io
import os
import re
import stat
import sys
import time
from typing import TYPE_CHECKING, Literal

from ags_fast.ags1 import KeyBytes
from ags_fast.cli.codes import OutputClosedError
from ags_fast.cli.places import STANDARD
from ags_fast.cli.terminal import warn
from ags_fast.errors import KeyAccessError
from ags_fast.fs import NewFile, NewObject, file_at, local_path

if TYPE_CHECKING:
    import argparse


def standard_input(args: argparse.Namespace) -> io.FileIO:
    """Open standard input for bytes; a usage error if it is a terminal."""
    if sys.stdin is None:  # it was closed when Python began
        raise OSError("standard input is closed")
    if os.isatty(0):
        args.usage("standard input is a terminal: redirect it, as by `< FILE`, or name the file")
    return io.FileIO(0, closefd=False)


class StandardOutput(NewObject):
    """Standard output, for bytes. whole: nothing is written before all is there. OutputClosedError if it is closed."""

    path = STANDARD

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self._held = bytearray() if whole else None

    def _write(self, view: memoryview) -> None:
        if self._held is not None:
            self._held += view
            return
        try:
            if sys.stdout is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            while view:  # with PYTHONUNBUFFERED a write may take less than all
                view = view[sys.stdout.buffer.write(view) :]
            sys.stdout.buffer.flush()
        except OSError as error:
            raise OutputClosedError from error

    def _publish(self) -> None:
        held, self._held = self._held, None
        self._write(memoryview(held or b""))

    def _discard(self) -> None:
        self._held = None


def new_output(
    args: argparse.Namespace, output: str, *, private: bool = False, whole: bool = False
) -> NewFile | NewObject:
    """Begin the output of a command: a path, a URL, or standard output if that is no terminal.

    private: It is plaintext, which appears only when all of it is checked. whole: see `StandardOutput`.
    """
    if output == STANDARD:
        if sys.stdout is not None and sys.stdout.isatty():
            args.usage("standard output is a terminal: redirect it, as by `> FILE`, or name the output with -o FILE")
        return StandardOutput(whole=whole)
    path = local_path(output)
    if path is None:
        store, name = file_at(output)
        return store.begin(name, exclusive=not args.overwrite, private=private, fsync=args.fsync)
    if private and os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # to open it may block
        raise ValueError(f"{path} is not a regular file: it would show plaintext before all of it is checked")
    mode = _kept_mode(args.file) if args.preserve else None
    return NewFile(path, exclusive=not args.overwrite, private=private, fsync=args.fsync, mode=mode)


def _kept_mode(source: str) -> int:
    """Return the permission bits of a source within the umask; 0600 if the source is not a regular file."""
    umask = os.umask(0o077)
    os.umask(umask)
    path = local_path(source)
    info = None if path is None else os.stat(0 if path == STANDARD else path)
    return (info.st_mode & 0o777 if info is not None and stat.S_ISREG(info.st_mode) else 0o600) & ~umask


def read_key(path: str | None, variable: str | None, key_format: str) -> bytes:
    """Read a key from a file or an environment variable. KeyAccessError never shows what was read."""
    if variable is not None:
        text = os.environ.get(variable)
        if text is None:
            raise KeyAccessError(f"the environment variable {variable} is not set")
        return _parse_key(os.fsencode(text), key_format, f"the environment variable {variable}")
    assert path is not None
    if path == STANDARD:
        raise ValueError("a key is not read from standard input: name a file, or take the option for the environment")
    try:
        with open(path, "rb") as file:
            data = file.read(1024)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise KeyAccessError(f"the key file cannot be read: {error}") from error
    if stat.S_ISREG(mode):
        warn_if_readable(path, mode)
    return _parse_key(data, key_format, path)


def warn_if_readable(path: str, mode: int) -> None:
    """Warn if other users may read a file with a secret."""
    if mode & 0o077:
        warn(f"others can read {path}: chmod 600 it")


def _parse_key(data: bytes, key_format: str, origin: str) -> bytes:
    readings = {}
    text = data.strip()
    if key_format in ("auto", "raw"):
        readings["raw"] = data
    if key_format in ("auto", "hex") and re.fullmatch(rb"[0-9A-Fa-f]*", text) and len(text) % 2 == 0:
        readings["hex"] = bytes.fromhex(text.decode())
    if key_format == "base64" or (key_format == "auto" and "hex" not in readings):  # no random base64 looks like hex
        try:
            readings["base64"] = base64.b64decode(text, validate=True)
        except binascii.Error:
            pass
    keys = {name: key for name, key in readings.items() if len(key) in (16, 24, 32)}
    if len(keys) > 1:
        raise KeyAccessError(f"{origin} can be read as {' or as '.join(keys)}: say which with --key-format")
    if not keys:
        raise KeyAccessError(f"{origin} holds no AES key: 16, 24 or 32 bytes, as they are, in hex or in base64")
    return KeyBytes(keys.popitem()[1])


def aad_prefix(args: argparse.Namespace, new: str = "") -> bytes:
    """The bytes of --aad-prefix or --aad-prefix-hex; with new="new_", of --new-aad-prefix and its like."""
    text, digits = getattr(args, f"{new}aad_prefix"), getattr(args, f"{new}aad_prefix_hex")
    if digits is not None:
        try:
            return bytes.fromhex(digits)
        except ValueError:
            option = f"{new}aad-prefix-hex".replace("_", "-")
            raise ValueError(f"--{option} is not hexadecimal") from None
    return os.fsencode(text or "")


def progress(args: argparse.Namespace) -> Literal["lines", False]:
    """What to show while a command works: a bar on a terminal, a line now and then elsewhere, or nothing."""
    return False if args.quiet or args.verbose or args.json else "lines"


class Progress:
    """A bar on a terminal, a line now and then elsewhere, and the time that the command took."""

    def __init__(self, args: argparse.Namespace, total: int) -> None:
        from ags_fast.jobs.bars import make_bar

        self.bar = make_bar(args.operation, total, progress(args))
        self.total = total
        self.begun = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.bar.update(max(0, self.total - self.bar.n))  # the counted bytes may end before the file does
        self.bar.close()

    def update(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self.bar.update(nbytes)

    def seconds(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self.begun, 3)
