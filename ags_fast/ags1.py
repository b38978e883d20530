"""AES GCM Stream (AGS1): the arithmetic of lengths and offsets, and AgsCodec, from buffer to buffer.

A stream is a header of 8 bytes (``b"AGS1"`` and the plaintext size of a block, 4 bytes little-endian) and then
blocks. A block is a nonce of 12 bytes, the ciphertext, which is as long as its plaintext, and a tag of 16 bytes. All
blocks but the last hold ``block_size`` bytes of plaintext, and the last holds at least 1, except that an empty stream
is one empty block. The spec's sections are "File structure" and "Cipher Block structure".
"""

from __future__ import annotations

import operator

from ags_fast._core import OVERHEAD_NBYTES, Key, new_bytes
from ags_fast._threads import thread_count
from ags_fast.errors import FormatError, IntegrityError, KeyLimitError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Buffer

__all__ = ["AgsCodec", "encrypted_length", "plaintext_length"]

MAGIC = b"AGS1"
HEADER_NBYTES = 8
DEFAULT_BLOCK_SIZE = 1 << 20  # the only size that Iceberg's Java reader takes
MAX_BLOCK_SIZE = (1 << 31) - 1  # BlockLength is a signed int in Java
MAX_BLOCKS_WRITTEN = (1 << 31) - 1  # Java counts blocks in a signed int, too, and refuses the next
KEY_LIMIT = 1 << 32  # messages under one key: NIST SP 800-38D, section 8.3
MAX_BLOCKS_READ = 1 << 32  # what four bytes of AAD can tell apart


def nbytes_of(size: int | str) -> int:
    """Return a size in bytes. Text is such as 4096, 64K, 64 KiB or 1M, in powers of 1024. ValueError for other text."""
    if not isinstance(size, str):
        return operator.index(size)
    import re  # late: who gives a number does not wait for it

    match = re.fullmatch(r"([0-9]+)\s*(?:([kmgt])i?b?|b)?", size.strip().lower())
    if match is None:
        raise ValueError(f"a number of bytes is required, such as 4096, '64K', '64 KiB' or '1M', not {size!r}")
    return int(match[1]) << 10 * " kmgt".index(match[2] or " ")


def check_block_size(block_size: int | str) -> int:
    block_size = nbytes_of(block_size)
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size must be 1 to {MAX_BLOCK_SIZE} bytes, not {block_size}")
    return block_size


def encode_header(block_size: int) -> bytes:
    return MAGIC + block_size.to_bytes(4, "little")


USUAL_HEADER = encode_header(DEFAULT_BLOCK_SIZE)


def decode_header(stream: bytes | memoryview) -> int:
    """Return the block size that a stream's header claims. The format does not authenticate this number."""
    header = bytes(stream[:HEADER_NBYTES])
    if header == USUAL_HEADER:
        return DEFAULT_BLOCK_SIZE
    if header[:4] != MAGIC:
        raise FormatError(f"not an AGS1 stream: it begins with {header[:4]!r}, not with {MAGIC!r}")
    claimed = int.from_bytes(header[4:], "little")
    if not 1 <= claimed <= MAX_BLOCK_SIZE:
        raise FormatError(f"the header claims blocks of {claimed} bytes, possible are 1 to {MAX_BLOCK_SIZE}")
    return claimed


def encrypted_length(plain_length: int, block_size: int | str = DEFAULT_BLOCK_SIZE) -> int:
    """Return the length in bytes of the stream that holds `plain_length` bytes, `block_size` of them in a block.

    A stream is a header of 8 bytes, the plaintext, and 28 bytes for each block (section "File structure").

    ValueError if the length is negative, or the block size is not 1 to 2**31 - 1. FormatError if the stream would have
    more than 2**31 - 1 blocks: some readers take no more.
    """
    plain_length, block_size = operator.index(plain_length), check_block_size(block_size)
    if plain_length < 0:
        raise ValueError(f"a length cannot be negative: {plain_length}")
    blocks = max(1, -(-plain_length // block_size))
    if blocks > MAX_BLOCKS_WRITTEN:
        raise FormatError(
            f"{plain_length} bytes are more than {MAX_BLOCKS_WRITTEN} blocks of {block_size}: use larger ones"
        )
    return HEADER_NBYTES + plain_length + blocks * OVERHEAD_NBYTES


def plaintext_length(file_length: int, block_size: int | str = DEFAULT_BLOCK_SIZE) -> int:
    """Return how many bytes of plaintext a stream of `file_length` bytes holds: the inverse of `encrypted_length`.

    A header without a block (8 bytes) is an empty stream, too. FormatError if no stream with this block size has this
    length, ValueError if the block size is not 1 to 2**31 - 1.
    """
    return plaintext_in(operator.index(file_length), check_block_size(block_size))


def plaintext_in(file_length: int, block_size: int) -> int:
    """Like `plaintext_length`, for ints that were checked before."""
    full, rest = divmod(file_length - HEADER_NBYTES, block_size + OVERHEAD_NBYTES)
    if full < 0:
        raise FormatError(f"{file_length} bytes are too short for an AGS1 stream: its header alone has {HEADER_NBYTES}")
    if 0 < rest <= OVERHEAD_NBYTES and not (rest == OVERHEAD_NBYTES and full == 0):
        raise FormatError(
            f"no AGS1 stream with blocks of {block_size} bytes has {file_length} bytes: "
            f"{rest} would be left for the last block"
        )
    if full + (rest > 0) > MAX_BLOCKS_READ:
        raise FormatError(f"{file_length} bytes are more than {MAX_BLOCKS_READ} blocks of {block_size}")
    return full * block_size + (rest - OVERHEAD_NBYTES if rest else 0)


def block_offset(block: int, block_size: int) -> int:
    """Return the offset in bytes where a block begins in its stream."""
    return HEADER_NBYTES + block * (block_size + OVERHEAD_NBYTES)


def check_length(length: int | None) -> int | None:
    if length is not None and (length := operator.index(length)) < 0:
        raise ValueError(f"a length cannot be negative: {length}")
    return length


def trusted_length(length: int | None, available: int) -> int:
    """Return the length to rely on: `length`, if that many bytes are available, or `available` if `length` is None."""
    if length is None:
        return available
    if available < length:
        raise IntegrityError(f"the stream was cut: {available} bytes are there, its trusted length is {length}")
    return length


def clamp(offset: int, size: int, end: int) -> int:
    """Return how many of `size` bytes from `offset` lie before `end`, as in a slice."""
    offset, size = operator.index(offset), operator.index(size)
    if offset < 0 or size < 0:
        raise ValueError(f"offset and size cannot be negative: {offset}, {size}")
    left = end - offset
    return size if size <= left else max(0, left)


def bytes_view(data: Buffer) -> memoryview:
    """Return a view of a buffer's bytes, for items and shapes of any kind."""
    if isinstance(data, str):
        raise TypeError("bytes are required, not text: encode the text first, as 'text'.encode() does")
    view = memoryview(data)
    if not view.c_contiguous:
        raise BufferError("the buffer must be C-contiguous: pass a copy of it")
    if view.nbytes == 0:  # some empty shapes cannot be cast
        return memoryview(b"" if view.readonly else bytearray())
    return view.cast("B")


def prefix_bytes(aad_prefix: Buffer | None) -> bytes:
    """Return an AAD prefix as bytes. Refuses text, and numbers, which bytes() would take."""
    if aad_prefix is None:
        return b""
    return aad_prefix if type(aad_prefix) is bytes else bytes(bytes_view(aad_prefix))


class KeyBytes(bytes):
    """A key that is wrapped, unwrapped or handed on: tools that print the locals of a traceback do not show it."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes of key>"

    __str__ = __repr__


def as_key(key: Any) -> Any:
    """Return a Key, in place of bytes that the locals of a traceback would show."""
    return key if isinstance(key, Key) else Key(key)


def sealing_key(key: Key, sealed_before: int) -> Key:
    """Return the Key. Its limit counts the `sealed_before` messages of other processes."""
    sealed_before = operator.index(sealed_before)
    if sealed_before < 0:
        raise ValueError(f"sealed_before cannot be negative: {sealed_before}")
    if sealed_before > KEY_LIMIT:
        raise KeyLimitError(f"a key seals at most {KEY_LIMIT} messages, this one has sealed {sealed_before}")
    key.carry(sealed_before)
    return key


class AgsCodec:
    """Encrypt and decrypt AGS1 streams, or parts of them, from buffer to buffer, under one key and one AAD prefix.

    Buffers are C-contiguous bytes-like objects. Many threads may use a codec at once. A codec keeps no nonce and cannot
    be pickled. If a buffer changes while a call uses it, the result is garbage.

    Args:
        key: 16, 24 or 32 bytes.
        aad_prefix: Bytes that tell this stream from others under the key; None is ``b""`` (section "Cipher Block
            structure").
        block_size: Bytes of plaintext in a block, for encryption, as a number or as text such as ``"64K"`` or
            ``"1 MiB"``. Decryption uses the size in the header.
        threads: The most threads that work on one call. None is ``AGS_FAST_THREADS``, else the CPUs of a Spark task,
            else the usable CPUs.
        sealed_before: Messages that other processes have sealed with this key. They count against its limit of 2**32.

    Raises:
        ValueError: The key, the block size or another number is impossible.
        KeyLimitError: `sealed_before` is above the limit.
    """

    __slots__ = ("_aad_prefix", "_block_size", "_key", "_threads")

    def __init__(
        self,
        key: Buffer,
        *,
        aad_prefix: Buffer | None = b"",
        block_size: int | str = DEFAULT_BLOCK_SIZE,
        threads: int | None = None,
        sealed_before: int = 0,
    ) -> None:
        self._block_size = self._threads = 0  # repr shows them, also if what follows raises
        self._key = sealing_key(key := as_key(key), sealed_before)
        self._aad_prefix = prefix_bytes(aad_prefix)
        self._block_size = check_block_size(block_size)
        self._threads = thread_count(threads)

    def __repr__(self) -> str:
        return f"<AgsCodec block_size={self._block_size} threads={self._threads}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "a codec holds a key and is never pickled: send key metadata, and build the codec where it is used"
        )

    @property
    def sealed(self) -> int:
        """Messages (blocks) that this process has sealed with this key's value, by any object."""
        return self._key.sealed

    def encrypt(self, data: Buffer) -> bytes:
        """Return `data` as a stream of ``encrypted_length(len(data), block_size)`` bytes.

        KeyLimitError if the key would pass its limit. Nothing was sealed.
        """
        out, view = new_bytes(encrypted_length(bytes_view(data).nbytes, self._block_size))
        self.encrypt_into(data, view)
        return out

    def encrypt_into(self, data: Buffer, out: Buffer) -> int:
        """Like `encrypt`, but write the stream to the start of the writable buffer `out`. Returns its length in bytes.

        Bytes of `out` behind the stream stay. ValueError if `out` is too small, BufferError if it overlaps `data`.
        """
        view = bytes_view(out)
        needed = encrypted_length(bytes_view(data).nbytes, self._block_size)
        if view.nbytes < needed:
            raise ValueError(f"the output needs {needed} bytes, it has {view.nbytes}")
        self._key.seal_run(self._aad_prefix, self._block_size, 0, data, view, HEADER_NBYTES, self._threads)
        view[:HEADER_NBYTES] = encode_header(self._block_size)
        return needed

    def decrypt(self, stream: Buffer, *, length: int | None) -> bytes:
        """Return the plaintext of `stream`.

        Args:
            stream: The sealed bytes. Bytes behind `length` are not read.
            length: The length of the stream in bytes, from a trusted place. AGS1 has no end marker: only this length
                shows that blocks were cut from the end. None must be written out, and trusts all of `stream`.

        Raises:
            FormatError: `stream` is not an AGS1 stream, or `length` is impossible for its block size.
            IntegrityError: The stream is shorter than `length`, or a block does not authenticate: `block_index` is the
                lowest such block.
        """
        sealed = bytes_view(stream)
        out, view = new_bytes(_measure(sealed, length)[1])
        self.decrypt_into(sealed, view, length=length)
        return out

    def decrypt_into(self, stream: Buffer, out: Buffer, *, length: int | None) -> int:
        """Like `decrypt`, but write to the start of the writable buffer `out`. Returns the plaintext's length in bytes.

        Bytes of `out` behind the plaintext stay. ValueError if `out` is too small, BufferError if it overlaps `stream`.
        After an IntegrityError all bytes that the plaintext would have taken are zero.
        """
        sealed = bytes_view(stream)
        block_size, size, file_length = _measure(sealed, length)
        if memoryview(out).nbytes < size:
            raise ValueError(f"the output needs {size} bytes, it has {memoryview(out).nbytes}")
        if file_length > HEADER_NBYTES:
            self._open(block_size, 0, sealed, size, out)
        return size

    def _open(self, block_size: int, first: int, stream: memoryview, size: int, out: Buffer) -> None:
        offset = block_offset(first, block_size)
        self._key.open_run(self._aad_prefix, block_size, first, stream, offset, size, out, self._threads)

    def decrypt_range(self, stream: Buffer, offset: int, size: int, *, length: int | None) -> bytes:
        """Return `size` bytes of plaintext from `offset`; like a slice, the result ends where the plaintext ends.

        Only the blocks that hold these bytes are opened. `length` and errors are those of `decrypt`; ValueError if
        `offset` or `size` is negative.
        """
        view = bytes_view(stream)
        block_size, total, file_length = _measure(view, length)
        offset, size = operator.index(offset), clamp(offset, size, total)
        if total == 0 and file_length > HEADER_NBYTES:
            self._open(block_size, 0, view, 0, bytearray())  # its one block is empty, but can be another's
        if size == 0:
            return b""
        first = offset // block_size
        begin = first * block_size
        end = min(total, -(-(offset + size) // block_size) * block_size)
        opened, out = new_bytes(end - begin)
        self._open(block_size, first, view, end - begin, out)
        return opened if len(opened) == size else opened[offset - begin : offset - begin + size]


def _measure(stream: memoryview, length: int | None) -> tuple[int, int, int]:
    """Return block size, plaintext length and stream length of a stream in memory, all in bytes."""
    file_length = trusted_length(check_length(length), stream.nbytes)
    if file_length < HEADER_NBYTES:
        raise FormatError(f"{file_length} bytes are too short for an AGS1 stream: its header alone has {HEADER_NBYTES}")
    block_size = decode_header(stream)
    return block_size, plaintext_length(file_length, block_size), file_length
