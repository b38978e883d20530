"""Helpers of all tests: an independent AGS1, tampered streams, files that misbehave, processes."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import ags_fast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

P = ParamSpec("P")
E = TypeVar("E", bound=Exception)

KEYS = {size: bytes(range(size, 2 * size)) for size in (16, 24, 32)}
KEY = KEYS[16]
OTHER_KEY = bytes(reversed(KEY))

# ---------------------------------------------------------------- an independent AGS1


def seal_stream(plain: bytes, key: bytes = KEY, prefix: bytes = b"", block_size: int = 1 << 20) -> bytes:
    """Seal a stream by the spec in a few lines, over another AES-GCM. ags_fast must read it."""
    blocks = [plain[begin : begin + block_size] for begin in range(0, max(1, len(plain)), block_size)]
    sealed = (block_of(block, i, key, prefix) for i, block in enumerate(blocks))
    return b"AGS1" + struct.pack("<I", block_size) + b"".join(sealed)


def block_of(plain: bytes, index: int, key: bytes = KEY, prefix: bytes = b"") -> bytes:
    nonce = os.urandom(12)
    return nonce + AESGCM(key).encrypt(nonce, plain, prefix + struct.pack("<I", index))


def open_stream(stream: bytes, key: bytes = KEY, prefix: bytes = b"") -> bytes:
    """Open a stream: the inverse of `seal_stream`. Raises cryptography's InvalidTag if a block was changed."""
    aes = AESGCM(key)
    header, blocks = split_stream(stream)
    assert header[:4] == b"AGS1"
    return b"".join(aes.decrypt(b[:12], b[12:], prefix + struct.pack("<I", i)) for i, b in enumerate(blocks))


def split_stream(stream: bytes) -> tuple[bytes, list[bytes]]:
    """Split a stream into its header and sealed blocks."""
    step = struct.unpack("<I", stream[4:8])[0] + 28
    return stream[:8], [stream[i : i + step] for i in range(8, len(stream), step)]


def nonces_of(stream: bytes) -> list[bytes]:
    return [block[:12] for block in split_stream(stream)[1]]


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Make bytes, quickly, in which every position is recognisable."""
    words = struct.pack("<1024Q", *((i * 0x9E3779B97F4A7C15 + seed) & (1 << 64) - 1 for i in range(1024)))
    pages = [struct.pack("<Q", page ^ seed) + words[8:] for page in range(-(-nbytes // len(words)))]
    return b"".join(pages)[:nbytes]


def flip(data: bytes, bit: int) -> bytes:
    """Return `data` with one bit flipped, counted from the lowest bit of the first byte."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# ---------------------------------------------------------------- files that misbehave


class Source:
    """A seekable binary file-like object over bytes that counts its requests and answers them as told.

    answer: called with the offset and the right bytes of a request; what it returns or raises is the answer.
    """

    def __init__(self, data: bytes, answer: Callable[[int, bytes], Any] = lambda offset, right: right) -> None:
        self.data = data
        self.answer = answer
        self.at = 0
        self.requests: list[tuple[int, int]] = []  # offset, bytes asked for
        self.closed = False

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.data)}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> Any:
        assert size >= 0, "a reader asks for what it needs"
        self.requests.append((self.at, size))
        answer = self.answer(self.at, self.data[self.at : self.at + size])
        self.at += len(answer) if answer is not None else 0
        return answer

    def close(self) -> None:
        self.closed = True


class Target:
    """A file-like object to write to that keeps what it has taken, and takes it as told.

    take: called with the bytes of a write, and with how many it has taken before; it returns how many of them it takes,
    or what else `write` should return, or raises.
    """

    def __init__(self, take: Callable[[bytes, int], Any] = lambda data, before: len(data)) -> None:
        self.taken = bytearray()
        self.take = take
        self.closed = False

    def write(self, data: Any) -> Any:
        answer = self.take(bytes(data), len(self.taken))
        self.taken += data if answer is None else data[: max(0, answer)]
        return answer

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


# ---------------------------------------------------------------- processes


def python_env(**env: str) -> dict[str, str]:
    """Return the environment in which a child imports the ags_fast under test, and this module."""
    paths = [str(Path(ags_fast.__file__).parents[1]), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env}


def program(function: Callable[P, object], *args: P.args, **options: P.kwargs) -> list[str]:
    """What Python is called with to call a function of programs/ in a process of its own."""
    return ["-m", "programs", pickle.dumps((function, args, options)).hex()]


def start_python(program: str | list[str], *args: object, **env: str) -> subprocess.Popen[str]:
    """A Python program in a process of its own, to be ended by `finish_python`. A str is some lines of source."""
    command = [sys.executable, "-X", "faulthandler", "-W", "error::ResourceWarning"]
    command += ["-c", textwrap.dedent(program)] if isinstance(program, str) else program
    return subprocess.Popen(
        [*command, *map(str, args)],
        env=python_env(**env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_python(child: subprocess.Popen[str], timeout: float = 60) -> str:
    """Return what the program prints. It must end by itself, in time, and without an error, also in a finalizer."""
    try:
        out, err = child.communicate(timeout=timeout)
    except BaseException:
        child.kill()
        child.wait()
        raise
    assert child.returncode == 0, f"exit code {child.returncode}\n{out}{err}"
    assert "Exception ignored" not in err, f"exit code {child.returncode}\n{out}{err}"
    return out


def run_python(program: str | list[str], *args: object, timeout: float = 60, **env: str) -> str:
    return finish_python(start_python(program, *args, **env), timeout)


def error_of(kind: type[E], call: Callable[[], object]) -> E:
    """Return the exception of a call, in a program that should not need pytest."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def lengths_around(block_size: int, blocks: Sequence[int] = (0, 1, 2, 3)) -> list[int]:
    """Return plaintext sizes on and beside the edges of blocks."""
    return sorted({n * block_size + d for n in blocks for d in (-1, 0, 1) if n * block_size + d >= 0})
