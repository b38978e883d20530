"""What commands about one file share: keys from files and the environment, prefixes, modes, a progress bar."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import time
from typing import TYPE_CHECKING, Literal

from ags_fast.ags1 import KeyBytes
from ags_fast.cli.terminal import warn
from ags_fast.errors import KeyAccessError

if TYPE_CHECKING:
    import argparse


def kept_mode(args: argparse.Namespace, path: str) -> int | None:
    """The permission bits for an output: its input's within the umask; 0600 if the input is not a regular file.

    None with --no-preserve.
    """
    if not args.preserve:
        return None
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        info = os.stat(path)
    except FileNotFoundError:  # a URL
        return 0o600 & ~umask
    return (info.st_mode & 0o777 if stat.S_ISREG(info.st_mode) else 0o600) & ~umask


def check_plain_output(path: str) -> None:
    """Raise ValueError for a pipe or a device, before it is opened, which may block."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path} is not a regular file: it would show plaintext before all of it is checked")


def read_key(path: str | None, variable: str | None, key_format: str) -> bytes:
    """Read a key from a file or an environment variable. KeyAccessError never shows what was read."""
    if variable is not None:
        text = os.environ.get(variable)
        if text is None:
            raise KeyAccessError(f"the environment variable {variable} is not set")
        return _parse_key(os.fsencode(text), key_format, f"the environment variable {variable}")
    assert path is not None
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
    if key_format in ("auto", "base64"):
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

        self.bar = make_bar(args.operation, total, progress(args), divisor=1024)
        self.total = total
        self.begun = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.bar.update(self.total - self.bar.n)  # the counted bytes may end before the file does
        self.bar.close()

    def update(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self.bar.update(nbytes)

    def seconds(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self.begun, 3)
