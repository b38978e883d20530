"""What commands about one file share: keys from files and the environment, sizes, and a progress bar."""

from __future__ import annotations

import argparse
import base64
import binascii
import os
import re
import stat
import time
from typing import TYPE_CHECKING

from ags_fast._terminal import warn
from ags_fast.errors import KeyAccessError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ConfigurationError",
    "OutputClosedError",
    "Progress",
    "aad_prefix",
    "add_key_format",
    "check_plain_output",
    "code_of",
    "code_of_all",
    "code_of_rows",
    "kept_mode",
    "positive",
    "read_key",
    "size",
]

# Exit codes. 0 is success; argparse ends with 2, too.
EXIT_FAILED, EXIT_USAGE, EXIT_INTEGRITY, EXIT_KEY_ACCESS, EXIT_NOT_FOUND, EXIT_CONFIGURATION = 1, 2, 3, 4, 5, 6
EXIT_INTERRUPTED = 130
CODES = {
    "IntegrityError": EXIT_INTEGRITY,
    "FormatError": EXIT_INTEGRITY,
    "KeyAccessError": EXIT_KEY_ACCESS,
    "KeyLimitError": EXIT_KEY_ACCESS,
    "UnaccountedError": EXIT_KEY_ACCESS,
    "FileNotFoundError": EXIT_NOT_FOUND,
    "NotADirectoryError": EXIT_NOT_FOUND,
    "PermissionError": EXIT_NOT_FOUND,
    "ConfigurationError": EXIT_CONFIGURATION,
    "ImportError": EXIT_CONFIGURATION,
    "ValueError": EXIT_USAGE,
    "OSError": EXIT_FAILED,  # also such as are a ValueError, too
}


class ConfigurationError(Exception):
    """What properties or an environment say cannot be, or something that they need is not installed."""


class OutputClosedError(Exception):
    """Whoever reads standard output has seen enough."""


def code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this."""
    return next((CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in CODES), EXIT_FAILED)


def code_of_rows(classes: Iterable[str | None]) -> int:
    """The exit code for files that failed with errors of these classes."""
    codes = {CODES.get(name or "", EXIT_FAILED) for name in classes}
    return code_of_all(code if code in (EXIT_INTEGRITY, EXIT_KEY_ACCESS) else EXIT_FAILED for code in codes)


def code_of_all(codes: Iterable[int]) -> int:
    """The exit code for many: 0 if all are, what is not intact before all else, and one cause if there is one only."""
    bad = {code for code in codes if code}
    if EXIT_INTEGRITY in bad:
        return EXIT_INTEGRITY
    return bad.pop() if len(bad) == 1 else EXIT_FAILED if bad else 0


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 is required, not {text!r}")
    return int(text)


def size(text: str) -> int:
    """Bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a number of bytes is required, such as 4096, 64K or 1M, not {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def add_key_format(operation: argparse.ArgumentParser) -> None:
    operation.add_argument(
        "--key-format",
        choices=("auto", "raw", "hex", "base64"),
        default="auto",
        help="how the key is written; auto (the default) refuses to guess where two would fit",
    )


def kept_mode(path: str) -> int:
    """The permission bits of what is made from a local file: its own, as far as the umask allows. Of a pipe, a device
    or a URL, which say nothing, 0600."""
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        info = os.stat(path)
    except OSError:
        return 0o600 & ~umask
    return (info.st_mode & 0o777 if stat.S_ISREG(info.st_mode) else 0o600) & ~umask


def check_plain_output(path: str) -> None:
    """ValueError for a pipe or a device, before it is opened, which may block."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path} is no regular file: it would show plaintext before all of it is checked")


def read_key(path: str | None, variable: str | None, key_format: str) -> bytes:
    """The key in a file, or in an environment variable; or KeyAccessError. The messages never show what was read."""
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
    if stat.S_ISREG(mode) and mode & 0o077:
        warn(f"others can read {path}: chmod 600 it")
    return _parse_key(data, key_format, path)


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
    return keys.popitem()[1]


def aad_prefix(args: argparse.Namespace, new: str = "") -> bytes:
    """Of --aad-prefix and --aad-prefix-hex; with new="new_", of --new-aad-prefix and the like."""
    text, digits = getattr(args, f"{new}aad_prefix"), getattr(args, f"{new}aad_prefix_hex")
    if digits is not None:
        try:
            return bytes.fromhex(digits)
        except ValueError:
            option = f"{new}aad-prefix-hex".replace("_", "-")
            raise ValueError(f"--{option} is not hexadecimal") from None
    return os.fsencode(text or "")


class Progress:
    """A bar on a terminal, and the time it took."""

    def __init__(self, args: argparse.Namespace, total: int) -> None:
        from tqdm import tqdm

        disable = True if args.json or args.quiet else None  # None: only where stderr is a terminal
        self.bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=args.operation, disable=disable)
        self.total = total
        self.begun = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.bar.update(self.total - self.bar.n)  # what is counted may end before the file does
        self.bar.close()

    def update(self, nbytes: int) -> None:
        self.bar.update(nbytes)

    def seconds(self) -> float:
        return round(time.monotonic() - self.begun, 3)
