"""The bare loop over EVP of evp.c, and the kernels of csrc/vaes, compiled against the libcrypto of ags_fast's build."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shlex
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SOURCES = [*(Path(__file__).with_name(name) for name in ("evp.c", "kernel.c", "ports.c")), *CSRC.glob("vaes/*.c")]
BUILT_WITH = ROOT / "build" / "libcrypto.json"  # written by setup.py
PIECES = (128 << 10, 256 << 10, 512 << 10, 2 << 20)  # bytes
TUNING_RUNS = 4  # with each setting; then a loop keeps the fastest


class EvpError(Exception):
    """There is no EVP loop to measure with."""


class Module(NamedTuple):
    """A module of a Parquet file: where it is in the plain file and its frame in the sealed one, how many bytes of
    plaintext it has, and what its AAD ends in.
    """

    plain: int
    sealed: int
    nbytes: int
    suffix: bytes

    def packed(self) -> bytes:
        """As evp.c has it."""
        return struct.pack("<QQI7sB4x", self.plain, self.sealed, self.nbytes, self.suffix, len(self.suffix))


class _Loop(ctypes.Structure):
    _fields_ = (
        ("piece_nbytes", ctypes.c_size_t),
        ("update_nbytes", ctypes.c_size_t),
        ("key", ctypes.c_char_p),
        ("key_nbytes", ctypes.c_size_t),
        ("prefix", ctypes.c_char_p),
        ("prefix_nbytes", ctypes.c_size_t),
        ("block_nbytes", ctypes.c_size_t),
        ("plain", ctypes.c_void_p),
        ("plain_nbytes", ctypes.c_size_t),
        ("window_nbytes", ctypes.c_size_t),
        ("sealed", ctypes.c_void_p),
        ("nonces", ctypes.c_char_p),
        ("order", ctypes.c_void_p),
        ("norder", ctypes.c_size_t),
        ("modules", ctypes.c_char_p),
        ("nmodules", ctypes.c_size_t),
        ("fd", ctypes.c_int),
        ("source", ctypes.c_int),
        ("seal", ctypes.c_int),
        ("threads", ctypes.c_uint),
    )


class Evp:
    """The compiled evp.c, kernel.c and ports.c."""

    def __init__(self, build: Path) -> None:
        if not BUILT_WITH.is_file():
            raise EvpError(f"{BUILT_WITH} is missing: build ags_fast in its source tree first")
        libcrypto: dict[str, Any] = json.loads(BUILT_WITH.read_text())
        command = [
            *(shlex.split(os.environ.get("CC", "")) or ["cc"]),
            *libcrypto["cflags"],
            *(f"-I{d}" for d in [*libcrypto["include_dirs"], CSRC]),
            *("-shared", "-fPIC", "-fvisibility=default", *map(str, SOURCES)),
            *libcrypto["objects"],
            *libcrypto["link_args"],
        ]
        texts = [source.read_text() for source in (*SOURCES, *CSRC.glob("vaes/*.h"))]
        what = json.dumps([libcrypto["version"], command, texts]).encode()
        library = build / f"evp-{hashlib.sha256(what).hexdigest()[:16]}.so"
        if not library.is_file():
            build.mkdir(parents=True, exist_ok=True)
            made = library.with_suffix(f".{os.getpid()}")
            result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if result.returncode != 0:
                raise EvpError(f"evp.c, kernel.c or ports.c does not compile:\n{result.stderr}")
            made.rename(library)
        self._functions = ctypes.CDLL(str(library))
        for name, arguments in {
            "evp_run": [ctypes.POINTER(_Loop)],
            "evp_small": [ctypes.POINTER(_Loop), ctypes.c_char_p, ctypes.c_uint],
            "evp_rewrap": [
                *[ctypes.POINTER(_Loop)] * 2,
                *[ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t],
            ],
            "evp_copy": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t],
            "ports_run": [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint)],
            "kernel_run": [ctypes.c_uint, ctypes.c_int, ctypes.c_size_t],
        }.items():
            function = getattr(self._functions, name)
            function.argtypes, function.restype = arguments, ctypes.c_double

    def copy(self, out: bytearray, data: bytearray) -> float:
        """The seconds that memcpy() takes."""
        seconds: float = self._functions.evp_copy(_address(out), _address(data), len(data))
        return seconds

    def ports(self, nbytes: int) -> tuple[float, int]:
        """The seconds that AES-128-GCM's instructions for `nbytes` take, and how many bits each has: 128, 256 or 512.

        They are those of AES and the carry-less products, at the widest that this CPU has. Raises EvpError without.
        """
        bits = ctypes.c_uint()
        seconds: float = self._functions.ports_run(nbytes, bits)
        if seconds < 0:
            raise EvpError("the loop of AES and carry-less products is for x86-64 CPUs that have both")
        return seconds, bits.value

    def widest_kernel(self) -> int:
        """Bits of a vector of the widest kernel of csrc/vaes that this CPU runs; 0 without one."""
        bits: int = self._functions.kernel_widest()
        return bits

    def kernel(self, bits: int, nbytes: int, *, seal: bool) -> float:
        """The seconds that the kernel with so wide vectors takes for a message; bits = 0 is EVP, driven by C."""
        seconds: float = self._functions.kernel_run(bits, seal, nbytes)
        if seconds < 0:
            raise EvpError(f"a message of {nbytes} bytes does not open, or no kernel has {bits} bits here")
        return seconds

    def loop(
        self,
        key: bytes,
        prefix: bytes,
        block_size: int,
        plain: bytearray,
        *,
        stream: bytearray | None = None,
        plain_length: int | None = None,
        window: int | None = None,
        nonces: bytes | None = None,
        order: Any = None,
        threads: int = 1,
    ) -> Loop:
        """A loop over a stream, in memory or, without `stream`, in a file: it seals with nonces, opens without.

        window: bytes of `plain` for each thread to go round in; None if `plain` is all the plaintext. order: an array
        of 4-byte block numbers.
        """
        length = plain_length or len(plain)
        if nonces is not None and len(nonces) < 12 * -(-length // block_size):
            raise ValueError("a nonce for each block is needed")
        if len(plain) < (length if window is None else window * threads):
            raise ValueError("the plaintext buffer is too small")
        fields = _Loop(
            piece_nbytes=PIECES[1],
            update_nbytes=block_size,
            key=key,
            key_nbytes=len(key),
            prefix=prefix,
            prefix_nbytes=len(prefix),
            block_nbytes=block_size,
            plain=_address(plain),
            plain_nbytes=length,
            window_nbytes=window or length,
            sealed=None if stream is None else _address(stream),
            nonces=nonces,
            seal=nonces is not None,
            threads=threads,
        )
        if order is not None:
            fields.order, fields.norder = order.buffer_info()
        return Loop(self._functions, fields, (plain, stream, nonces, order))

    def modules(
        self,
        key: bytes,
        aad: bytes,
        modules: Sequence[Module],
        *,
        seal: bool,
        source: int = -1,
        buffers: tuple[bytearray, bytearray] | None = None,
        threads: int = 1,
    ) -> Loop:
        """A loop over a Parquet file's modules, in files or between two buffers, plain and sealed.

        source: descriptor of the plain file, if they are sealed from it. Opened ones of a file go nowhere.
        """
        packed = b"".join(module.packed() for module in modules)
        nonces = os.urandom(12 * len(modules)) if seal else None
        largest = max(module.nbytes for module in modules)
        fields = _Loop(
            piece_nbytes=PIECES[1],
            update_nbytes=largest,
            key=key,
            key_nbytes=len(key),
            prefix=aad,
            prefix_nbytes=len(aad),
            block_nbytes=largest,
            plain_nbytes=sum(module.nbytes for module in modules),
            nonces=nonces,
            modules=packed,
            nmodules=len(modules),
            source=source,
            seal=seal,
            threads=threads,
        )
        if buffers is not None:
            fields.plain, fields.sealed = map(_address, buffers)
        return Loop(self._functions, fields, (packed, nonces, buffers))

    def rewrap(
        self, old: bytes, new: bytes, prefix: bytes, names: bytes, wrapped: bytes, out: bytearray, count: int
    ) -> Callable[[], float]:
        """A loop over `count` wrapped keys of one size, whose AADs are `prefix` and a name, all of one size, too.

        Each is opened under `old` and sealed under `new`, to the same place in `out`. Calling it returns the seconds.
        """
        if not (len(names) % count == len(wrapped) % count == 0 and len(out) == len(wrapped)):
            raise ValueError("the names, or the wrapped keys, are not of one size")
        dek_nbytes = len(wrapped) // count - 28

        def fields(key: bytes, nonces: bytes | None) -> _Loop:
            return _Loop(
                piece_nbytes=PIECES[0],
                update_nbytes=dek_nbytes,
                key=key,
                key_nbytes=len(key),
                prefix=prefix,
                prefix_nbytes=len(prefix),
                block_nbytes=dek_nbytes,
                plain_nbytes=dek_nbytes,
                window_nbytes=dek_nbytes,
                nonces=nonces,
                seal=nonces is not None,
                threads=1,
            )

        before, after = fields(old, None), fields(new, os.urandom(12 * count))

        def run() -> float:
            seconds: float = self._functions.evp_rewrap(
                before, after, names, len(names) // count, wrapped, _address(out), count
            )
            if seconds < 0:
                raise EvpError("the EVP loop failed")
            return seconds

        return run


class Loop:
    """One loop, ready to go. Calling it returns the seconds it took, by its own clock."""

    def __init__(self, functions: ctypes.CDLL, fields: _Loop, keep: Any) -> None:
        self._functions = functions
        self._fields = fields
        self._keep = keep  # the buffers that fields points into
        self._tuned = False

    def __call__(self, fd: int = -1) -> float:
        self._fields.fd = fd
        if not self._tuned:
            block = self._fields.block_nbytes
            self._tune("update_nbytes", tuple(max(16, n) for n in (block, block // 2, block // 4, 256 << 10)))
            if not self._fields.sealed:
                self._tune("piece_nbytes", PIECES)
            self._tuned = True
        return self._run()

    def _tune(self, setting: str, choices: tuple[int, ...]) -> None:
        best: dict[int, float] = {}
        for choice in choices * TUNING_RUNS:
            setattr(self._fields, setting, choice)
            best[choice] = min(self._run(), best.get(choice, 1e9))
        setattr(self._fields, setting, min(best, key=best.__getitem__))

    def _run(self) -> float:
        if self._fields.seal and self._fields.fd >= 0:
            os.ftruncate(self._fields.fd, 0)  # what is sealed goes to new pages, as in a new file
        seconds: float = self._functions.evp_run(ctypes.byref(self._fields))
        if seconds < 0:
            raise EvpError("the EVP loop failed")
        return seconds

    def small(self, path: str, times: int) -> float:
        """The seconds that opening, reading and closing a file of one block takes, `times` over."""
        seconds: float = self._functions.evp_small(ctypes.byref(self._fields), os.fsencode(path), times)
        if seconds < 0:
            raise EvpError("the EVP loop failed")
        return seconds


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
