"""AGS1 in Python over `cryptography`: as people write it, as fast as it can be, and as a seekable file.

Also the yardstick's other end: the same blocks through pycryptodome.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HEADER, NONCE, TAG = 8, 12, 16
OVERHEAD = NONCE + TAG


def header(block_size: int) -> bytes:
    return b"AGS1" + block_size.to_bytes(4, "little")


# ---- as people write it


def naive_encrypt(key: bytes, prefix: bytes, block_size: int, data: bytes | bytearray) -> bytes:
    aes = AESGCM(key)
    parts = [header(block_size)]
    for i, begin in enumerate(range(0, len(data), block_size)):
        nonce = os.urandom(NONCE)
        parts.append(nonce + aes.encrypt(nonce, data[begin : begin + block_size], prefix + i.to_bytes(4, "little")))
    return b"".join(parts)


def naive_decrypt(key: bytes, prefix: bytes, stream: bytes | bytearray) -> bytes:
    aes = AESGCM(key)
    step = int.from_bytes(stream[4:HEADER], "little") + OVERHEAD
    parts = []
    for i, begin in enumerate(range(HEADER, len(stream), step)):
        block = stream[begin : begin + step]
        parts.append(aes.decrypt(block[:NONCE], block[NONCE:], prefix + i.to_bytes(4, "little")))
    return b"".join(parts)


def naive_write(path: str, key: bytes, prefix: bytes, block_size: int, data: memoryview) -> None:
    aes = AESGCM(key)
    with open(path, "wb") as file:
        file.write(header(block_size))
        for i, begin in enumerate(range(0, len(data), block_size)):
            nonce = os.urandom(NONCE)
            file.write(nonce + aes.encrypt(nonce, data[begin : begin + block_size], prefix + i.to_bytes(4, "little")))


def naive_read(path: str, key: bytes, prefix: bytes) -> Iterator[bytes]:
    aes = AESGCM(key)
    with open(path, "rb") as file:
        step = int.from_bytes(file.read(HEADER)[4:], "little") + OVERHEAD
        for i, block in enumerate(iter(lambda: file.read(step), b"")):
            yield aes.decrypt(block[:NONCE], block[NONCE:], prefix + i.to_bytes(4, "little"))


# ---- as fast as Python can be


class BestPython:
    """Blocks between buffers and files that exist already: nothing is copied or allocated for a block.

    The threads are there before the work is. They take blocks from one iterator, so none waits for a slower one.
    """

    def __init__(self, key: bytes, prefix: bytes, block_size: int, threads: int) -> None:
        self._aes = AESGCM(key)
        self._prefix = prefix
        self._block_size = block_size
        self._step = block_size + OVERHEAD
        self._helpers = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self._others = threads - 1

    def close(self) -> None:
        if self._helpers:
            self._helpers.shutdown()

    def _share(self, length: int, work: Callable[[Iterable[tuple[int, int, int]]], None]) -> None:
        """`work` on all blocks: (number, where its plaintext begins, where it is sealed)."""
        count = -(-length // self._block_size)
        sealed = range(HEADER, HEADER + count * self._step, self._step)
        blocks = zip(range(count), range(0, length, self._block_size), sealed, strict=True)
        helped = [self._helpers.submit(work, blocks) for _ in range(self._others)] if self._helpers else []
        work(blocks)
        for help in helped:
            help.result()

    def encrypt_into(self, data: bytearray, out: bytearray) -> None:
        plain, sealed = memoryview(data), memoryview(out)
        nonces = os.urandom(-(-len(data) // self._block_size) * NONCE)
        encrypt_into, prefix, size, step = self._aes.encrypt_into, self._prefix, self._block_size, self._step

        def work(blocks: Iterable[tuple[int, int, int]]) -> None:
            for i, p, s in blocks:
                nonce = nonces[i * NONCE : i * NONCE + NONCE]
                sealed[s : s + NONCE] = nonce
                aad = prefix + i.to_bytes(4, "little")
                encrypt_into(nonce, plain[p : p + size], aad, sealed[s + NONCE : s + step])

        sealed[:HEADER] = header(size)
        self._share(len(data), work)

    def decrypt_into(self, stream: bytearray, out: bytearray) -> None:
        sealed, plain = memoryview(stream), memoryview(out)
        decrypt_into, prefix, size, step = self._aes.decrypt_into, self._prefix, self._block_size, self._step

        def work(blocks: Iterable[tuple[int, int, int]]) -> None:
            for i, p, s in blocks:
                text = s + NONCE
                decrypt_into(
                    sealed[s:text], sealed[text : s + step], prefix + i.to_bytes(4, "little"), plain[p : p + size]
                )

        self._share(len(out), work)

    def write(self, fd: int, data: bytearray) -> None:
        plain = memoryview(data)
        nonces = os.urandom(-(-len(data) // self._block_size) * NONCE)
        encrypt_into, prefix, size, step = self._aes.encrypt_into, self._prefix, self._block_size, self._step

        def work(blocks: Iterable[tuple[int, int, int]]) -> None:
            scratch = memoryview(bytearray(step))
            for i, p, s in blocks:
                nonce = nonces[i * NONCE : i * NONCE + NONCE]
                block = plain[p : p + size]
                sealed = scratch[: len(block) + OVERHEAD]
                sealed[:NONCE] = nonce
                encrypt_into(nonce, block, prefix + i.to_bytes(4, "little"), sealed[NONCE:])
                os.pwrite(fd, sealed, s)

        os.pwrite(fd, header(size), 0)
        self._share(len(data), work)

    def read(self, fd: int, length: int, windows: list[bytearray]) -> None:
        """Opens all blocks, each thread into its own window, round and round."""
        decrypt_into, prefix, size, step = self._aes.decrypt_into, self._prefix, self._block_size, self._step
        free = iter(windows)

        def work(blocks: Iterable[tuple[int, int, int]]) -> None:
            window = memoryview(next(free))
            sealed = memoryview(bytearray(step))
            turns = len(window) // size
            for i, p, s in blocks:
                nbytes = min(size, length - p)
                block = sealed[: nbytes + OVERHEAD]
                os.preadv(fd, [block], s)
                at = i % turns * size
                decrypt_into(block[:NONCE], block[NONCE:], prefix + i.to_bytes(4, "little"), window[at : at + nbytes])

        self._share(length, work)


class PythonReader(io.RawIOBase):
    """A seekable AGS1 file in plain Python: whole blocks into the caller's buffer, the last partial one kept."""

    def __init__(self, path: str | os.PathLike[str], key: bytes, *, length: int, aad_prefix: bytes = b"") -> None:
        self._position = 0
        self._kept = -1, memoryview(b"")
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            magic = os.pread(self._fd, HEADER, 0)
            if magic[:4] != b"AGS1" or os.fstat(self._fd).st_size < length:
                raise ValueError("not an AGS1 stream, or not all of it")
        except BaseException:
            self.close()
            raise
        self._aes = AESGCM(key)
        self._prefix = aad_prefix
        self._block_size = int.from_bytes(magic[4:], "little")
        self._blocks, rest = divmod(length - HEADER, self._block_size + OVERHEAD)
        self.length = self._blocks * self._block_size + max(0, rest - OVERHEAD)
        self._blocks += rest > 0
        self._sealed = memoryview(bytearray(min(length, self._block_size + OVERHEAD)))

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self.length)[whence]
        return self._position

    def _open_block(self, index: int, out: memoryview) -> None:
        sealed = self._sealed[: len(out) + OVERHEAD]
        if os.preadv(self._fd, [sealed], HEADER + index * (self._block_size + OVERHEAD)) != len(sealed):
            raise ValueError("the stream was cut")
        try:
            self._aes.decrypt_into(sealed[:NONCE], sealed[NONCE:], self._prefix + index.to_bytes(4, "little"), out)
        except InvalidTag:
            raise ValueError(f"block {index} does not authenticate") from None

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.length - self._position))
        done = 0
        while done < wanted:
            index, begin = divmod(self._position, self._block_size)
            size = min(self._block_size, self.length - index * self._block_size)
            part = min(size - begin, wanted - done)
            if part == size:
                self._open_block(index, view[done : done + size])
            else:
                if self._kept[0] != index:
                    opened = memoryview(bytearray(size))
                    self._open_block(index, opened)
                    self._kept = index, opened
                view[done : done + part] = self._kept[1][begin : begin + part]
            self._position += part
            done += part
        return done


# ---- pycryptodome


def pycryptodome_encrypt_into(key: bytes, prefix: bytes, block_size: int, data: bytearray, out: bytearray) -> None:
    from Crypto.Cipher import AES

    plain, sealed = memoryview(data), memoryview(out)
    sealed[:HEADER] = header(block_size)
    at = HEADER
    for i, begin in enumerate(range(0, len(plain), block_size)):
        block = plain[begin : begin + block_size]
        nonce = os.urandom(NONCE)
        cipher = AES.new(key, AES.MODE_GCM, nonce=nonce)
        cipher.update(prefix + i.to_bytes(4, "little"))
        text = at + NONCE
        end = text + len(block)
        sealed[at:text] = nonce
        sealed[end : end + TAG] = cipher.encrypt_and_digest(block, output=sealed[text:end])[1]
        at = end + TAG


def pycryptodome_decrypt_into(key: bytes, prefix: bytes, block_size: int, stream: bytearray, out: bytearray) -> None:
    from Crypto.Cipher import AES

    sealed, plain = memoryview(stream), memoryview(out)
    at = HEADER
    for i, begin in enumerate(range(0, len(plain), block_size)):
        block = plain[begin : begin + block_size]
        text = at + NONCE
        end = text + len(block)
        cipher = AES.new(key, AES.MODE_GCM, nonce=sealed[at:text])
        cipher.update(prefix + i.to_bytes(4, "little"))
        cipher.decrypt_and_verify(sealed[text:end], sealed[end : end + TAG], output=block)
        at = end + TAG
