"""AGS1 streams by ring, which cargo builds when it is first asked for: a contender that is not OpenSSL."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import SkippedError

SOURCE = Path(__file__).with_name("ring_peer")
LIBRARY = "libring_peer.dylib" if sys.platform == "darwin" else "libring_peer.so"


class _Task(ctypes.Structure):
    """As lib.rs has it."""

    _fields_ = (
        ("key", ctypes.c_char_p),
        ("key_nbytes", ctypes.c_size_t),
        ("prefix", ctypes.c_char_p),
        ("prefix_nbytes", ctypes.c_size_t),
        ("block_nbytes", ctypes.c_size_t),
        ("plain", ctypes.c_void_p),
        ("plain_nbytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("nonces", ctypes.c_char_p),
    )


class Ring:
    """The compiled lib.rs. Raises SkippedError where cargo, or what it fetches, is missing."""

    def __init__(self, build: Path) -> None:
        cargo = shutil.which("cargo")
        if cargo is None:
            raise SkippedError("cargo, which builds ring, is not installed")
        target = build / "ring"
        options = ["--release", "--locked", "--manifest-path", str(SOURCE / "Cargo.toml"), "--target-dir", str(target)]
        done = subprocess.run([cargo, "build", *options], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise SkippedError(f"ring cannot be built: {done.stderr.strip()[-300:]}")
        self._library = ctypes.CDLL(str(target / "release" / LIBRARY))
        for function in (self._library.seal, self._library.open):
            function.argtypes, function.restype = [ctypes.POINTER(_Task)], ctypes.c_bool

    def run(
        self, key: bytes, prefix: bytes, block_size: int, plain: bytearray, stream: bytearray, nonces: bytes | None
    ) -> None:
        """Seal all blocks with nonces, or open them without. The stream's header is left as it is."""
        address = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (plain, stream)]
        task = _Task(key, len(key), prefix, len(prefix), block_size, address[0], len(plain), address[1], nonces)
        if not (self._library.open if nonces is None else self._library.seal)(task):
            raise ValueError("ring did not open, or seal, a block")
