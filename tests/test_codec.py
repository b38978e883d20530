"""AgsCodec and the lengths: against an independent AGS1, with every kind of buffer, from many threads, interrupted."""

from __future__ import annotations

import array
import copy
import ctypes
import io
import itertools
import mmap
import pickle
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import streams
from support import (
    KEY,
    KEYS,
    finish_python,
    flip,
    lengths_around,
    nonces_of,
    open_stream,
    pattern,
    program,
    seal_stream,
    split_stream,
    start_python,
)

import ags_fast
from ags_fast import AgsCodec, FormatError, IntegrityError, KeyLimitError, encrypted_length, plaintext_length

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20

# ---------------------------------------------------------------- lengths


@given(st.integers(0, 1 << 50), st.integers(1, (1 << 31) - 1))
def test_lengths_are_inverses(plain_length: int, block_size: int) -> None:
    blocks = max(1, -(-plain_length // block_size))
    if blocks >= 1 << 31:
        with pytest.raises(FormatError):
            encrypted_length(plain_length, block_size)
    else:
        file_length = encrypted_length(plain_length, block_size)
        assert file_length == 8 + 28 * blocks + plain_length
        assert plaintext_length(file_length, block_size) == plain_length


@pytest.mark.parametrize("block_size", [1, 2, 27, 28, 29, 100])
def test_every_file_length_is_reached_or_refused(block_size: int) -> None:
    possible = {encrypted_length(n, block_size): n for n in range(400)} | {8: 0}
    for file_length in range(400):
        if file_length in possible:
            assert plaintext_length(file_length, block_size) == possible[file_length]
        else:
            with pytest.raises(FormatError):
                plaintext_length(file_length, block_size)
    with pytest.raises(ValueError, match="too short"):
        plaintext_length(-1, block_size)


def test_length_limits() -> None:
    assert encrypted_length(10) == 46
    assert plaintext_length(46) == 10
    assert encrypted_length((1 << 31) - 1, 1) == 8 + 29 * ((1 << 31) - 1)
    with pytest.raises(FormatError):  # Java counts blocks in a signed int
        encrypted_length(1 << 31, 1)
    assert plaintext_length(8 + 29 * (1 << 32), 1) == 1 << 32  # Rust in an unsigned one
    with pytest.raises(FormatError):
        plaintext_length(8 + 29 * ((1 << 32) + 1), 1)
    for block_size in (0, -1, 1 << 31):
        for function in (encrypted_length, plaintext_length):
            with pytest.raises(ValueError, match="block_size"):
                function(100, block_size)
    with pytest.raises(ValueError, match="negative"):
        encrypted_length(-1)


# ---------------------------------------------------------------- against an independent AGS1


@pytest.mark.parametrize("key_size", KEYS)
@pytest.mark.parametrize("block_size", [1, 15, 16, 17, 100, 4096, 65536, MIB])
def test_interoperates(key_size: int, block_size: int) -> None:
    """Ours is read by the independent one and the other way round, on the edges of blocks and of AAD sizes."""
    key = KEYS[key_size]
    for plain_length in lengths_around(block_size, (0, 1, 2) if block_size == MIB else (0, 1, 2, 5)):
        prefix = bytes(random.Random(plain_length).randrange(200))
        plain = pattern(plain_length)
        codec = AgsCodec(key, aad_prefix=prefix, block_size=block_size, threads=1 + plain_length % 3)
        stream = codec.encrypt(plain)
        assert len(stream) == encrypted_length(plain_length, block_size)
        assert stream[:8] == b"AGS1" + block_size.to_bytes(4, "little")
        assert open_stream(stream, key, prefix) == plain
        theirs = seal_stream(plain, key, prefix, block_size)
        assert AgsCodec(key, aad_prefix=prefix).decrypt(theirs, length=len(theirs)) == plain  # honours their header


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize(
    ("block_size", "plain_length"), [(1, 70_000), (4096, 3 * MIB + 1), (300_000, 5 * MIB), (MIB, 9 * MIB)]
)
def test_parallel_runs(threads: int, block_size: int, plain_length: int) -> None:
    """More blocks than one slice of nonces, than lanes, than threads: the same stream by any number of threads."""
    plain = pattern(plain_length)
    codec = AgsCodec(KEY, block_size=block_size, threads=threads)
    stream = codec.encrypt(plain)
    assert open_stream(stream) == plain
    assert codec.decrypt(stream, length=len(stream)) == plain
    nonces = nonces_of(stream)
    assert len(set(nonces)) == len(nonces)


def test_prefix_none_is_empty() -> None:
    stream = AgsCodec(KEY, aad_prefix=None).encrypt(b"abc")
    assert open_stream(stream, prefix=b"") == b"abc"
    assert AgsCodec(KEY, aad_prefix=None).decrypt(stream, length=len(stream)) == b"abc"
    huge = bytes(3 * MIB)
    assert open_stream(AgsCodec(KEY, aad_prefix=huge).encrypt(b"abc"), prefix=huge) == b"abc"


def test_empty_streams() -> None:
    codec = AgsCodec(KEY)
    stream = codec.encrypt(b"")
    assert len(stream) == 36
    assert codec.decrypt(stream, length=36) == b"" == codec.decrypt(stream[:8], length=8)
    assert codec.decrypt_range(stream, 0, 10, length=36) == b""
    for call in (codec.decrypt, lambda s, length: codec.decrypt_range(s, 0, 10, length=length)):
        with pytest.raises(IntegrityError) as caught:  # its one block is checked, as a reader does
            call(flip(stream, 8 * 35), length=36)
        assert caught.value.block_index == 0


# ---------------------------------------------------------------- length


@pytest.mark.parametrize("plain_length", [0, 1, 16, 17, 48])
def test_length_is_what_counts(plain_length: int) -> None:
    codec = AgsCodec(KEY, block_size=16)
    plain = pattern(plain_length)
    stream = codec.encrypt(plain)
    n = len(stream)
    for call in (codec.decrypt, lambda s, length: codec.decrypt_range(s, 0, 99, length=length)):
        assert call(stream, length=n) == plain == call(stream, length=None)
        assert call(stream + b"trailing", length=n) == plain  # bytes behind it are not looked at
        with pytest.raises(IntegrityError, match="cut"):  # shorter than the trusted length
            call(stream[:-1], length=n)
        with pytest.raises(IntegrityError, match="cut"):
            call(stream, length=n + 1)
        with pytest.raises(ValueError, match="negative"):
            call(stream, length=-1)
        with pytest.raises(TypeError):
            call(stream)  # type: ignore[call-arg]
    cut = split_stream(stream)[1]
    if len(cut) > 1:  # length=None cannot see a cut between blocks, and says so in its documentation
        shorter = stream[: n - len(cut[-1])]
        assert codec.decrypt(shorter, length=None) == plain[: 16 * (len(cut) - 1)]
        with pytest.raises(IntegrityError):
            codec.decrypt(shorter, length=n)


@pytest.mark.parametrize("junk", [b"", b"AGS1", b"AGS1\x10\0\0", b"AGS2\x10\0\0\0" + bytes(29), b"PAR1" + bytes(100)])
def test_no_stream(junk: bytes) -> None:
    with pytest.raises(FormatError):
        AgsCodec(KEY).decrypt(junk, length=len(junk))
    with pytest.raises(FormatError):
        AgsCodec(KEY).decrypt_range(junk, 0, 1, length=len(junk))


# ---------------------------------------------------------------- ranges


@given(st.data())
def test_range_is_a_slice(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 7, 16, 100]))
    plain = pattern(data.draw(st.integers(0, 5 * block_size)))
    codec = AgsCodec(KEY, block_size=block_size)
    stream = codec.encrypt(plain)
    offset = data.draw(st.integers(0, len(plain) + block_size))
    size = data.draw(st.integers(0, len(plain) + block_size) | st.sampled_from([1 << 40, 1 << 70]))
    assert codec.decrypt_range(stream, offset, size, length=len(stream)) == plain[offset : offset + size]


def test_range_opens_its_blocks_only() -> None:
    codec = AgsCodec(KEY, block_size=100)
    plain = pattern(1000)
    stream = codec.encrypt(plain)
    header, blocks = split_stream(stream)
    bad = header + b"".join([*blocks[:5], flip(blocks[5], 77), *blocks[6:]])
    for first, end in ((0, 500), (499, 500), (600, 1000)):
        assert codec.decrypt_range(bad, first, end - first, length=len(bad)) == plain[first:end]
    for first, end in ((499, 501), (599, 600), (0, 1000)):
        with pytest.raises(IntegrityError) as caught:
            codec.decrypt_range(bad, first, end - first, length=len(bad))
        assert caught.value.block_index == 5
    for offset, size in ((-1, 5), (0, -1), (-1, 0)):
        with pytest.raises(ValueError, match="negative"):
            codec.decrypt_range(stream, offset, size, length=len(stream))


# ---------------------------------------------------------------- buffers


def buffers(data: bytes, folder: Path) -> dict[str, Any]:
    """Writable exporters of as many bytes as `data`, a multiple of 8, holding them."""
    path = folder / "mapped"
    path.write_bytes(data)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), len(data))
    exporters: dict[str, Any] = {
        "bytearray": bytearray(data),
        "memoryview": memoryview(bytearray(data)),
        "memoryview of a slice": memoryview(bytearray(b"x" + data + b"y"))[1:-1],
        "2-D memoryview": memoryview(bytearray(data)).cast("B", (len(data) // 8, 8)),
        "array of int": array.array("i", data),
        "array of double": array.array("d", data),
        "mmap": mapped,
        "ctypes array of char": (ctypes.c_char * len(data)).from_buffer_copy(data),
        "ctypes array of int": (ctypes.c_uint32 * (len(data) // 4)).from_buffer_copy(data),
    }
    try:
        import numpy as np
    except ImportError:
        return exporters
    for dtype in ("u1", "i2", ">i4", "<f8", "?", "S8", [("a", "<i4"), ("b", ">i4")]):
        exporters[f"numpy {dtype}"] = np.frombuffer(bytearray(data), dtype=dtype)
    exporters["numpy 2-D"] = np.frombuffer(bytearray(data), dtype="u1").reshape(-1, 4)
    return exporters


def test_any_contiguous_exporter(tmp_path: Path) -> None:
    """Input and output of any shape and item size; sizes are in bytes."""
    codec = AgsCodec(KEY, block_size=64)
    plain = pattern(500 * 8)
    stream = codec.encrypt(plain)
    padded = stream + bytes(-len(stream) % 8)
    for name, data in buffers(plain, tmp_path).items():
        assert open_stream(codec.encrypt(data)) == plain, name
    for name, data in buffers(padded, tmp_path).items():
        assert codec.decrypt(data, length=len(stream)) == plain, name
        assert codec.decrypt_range(data, 10, 100, length=len(stream)) == plain[10:110], name
    for name, out in buffers(bytes(len(padded)), tmp_path).items():
        assert codec.encrypt_into(plain, out) == len(stream), name
        assert open_stream(bytes(memoryview(out))[: len(stream)]) == plain, name
    for name, out in buffers(bytes(len(plain)), tmp_path).items():
        assert codec.decrypt_into(stream, out, length=len(stream)) == len(plain), name
        assert bytes(memoryview(out)) == plain, name


def test_arrow_buffers() -> None:
    pa = pytest.importorskip("pyarrow")
    codec = AgsCodec(KEY)
    stream = codec.encrypt(pa.py_buffer(b"some bytes"))
    assert codec.decrypt(pa.py_buffer(stream), length=len(stream)) == b"some bytes"
    out = pa.allocate_buffer(10)
    assert codec.decrypt_into(stream, out, length=len(stream)) == 10
    assert out.to_pybytes() == b"some bytes"
    with pytest.raises(TypeError):  # immutable
        codec.decrypt_into(stream, pa.py_buffer(bytes(10)), length=len(stream))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_buffers_of_any_shape(shape: tuple[int, ...]) -> None:
    np = pytest.importorskip("numpy")
    empty = np.empty(shape, dtype="u1")
    codec = AgsCodec(KEY)
    stream = codec.encrypt(empty)
    assert codec.decrypt_into(stream, empty, length=36) == 0
    with pytest.raises(FormatError):
        codec.decrypt(empty, length=None)


def test_buffers_that_cannot_be_used() -> None:
    codec = AgsCodec(KEY)
    stream = codec.encrypt(bytes(10))
    strided = memoryview(bytearray(200))[::2]
    for call in (
        lambda: codec.encrypt(strided),
        lambda: codec.decrypt(strided, length=None),
        lambda: codec.decrypt_range(strided, 0, 1, length=None),
        lambda: codec.encrypt_into(b"", strided),
        lambda: codec.decrypt_into(stream, strided, length=len(stream)),
    ):
        with pytest.raises(BufferError, match="contiguous"):
            call()
    with pytest.raises(TypeError, match="writable"):
        codec.encrypt_into(b"", bytes(100))
    with pytest.raises(TypeError, match="writable"):
        codec.decrypt_into(stream, bytes(100), length=len(stream))
    for junk in ("text", 5, None, [1, 2]):
        with pytest.raises(TypeError):
            codec.encrypt(junk)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            codec.decrypt(junk, length=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("plain_length", [0, 1, 64, 65, 1000])
def test_into_writes_its_bytes_only(plain_length: int) -> None:
    codec = AgsCodec(KEY, block_size=64)
    plain = pattern(plain_length)
    stream = codec.encrypt(plain)
    for extra in (0, 1, 100):
        out = bytearray(b"\xa5" * (len(stream) + extra))
        assert codec.encrypt_into(plain, out) == len(stream)
        assert open_stream(bytes(out[: len(stream)])) == plain
        assert out[len(stream) :] == b"\xa5" * extra
        out = bytearray(b"\xa5" * (plain_length + extra))
        assert codec.decrypt_into(stream, out, length=len(stream)) == plain_length
        assert out == plain + b"\xa5" * extra
    for call, needed in (
        (lambda out: codec.encrypt_into(plain, out), len(stream)),
        (lambda out: codec.decrypt_into(stream, out, length=len(stream)), plain_length),
    ):
        for size in {0, needed // 2, needed - 1} - {needed, -1}:
            out = bytearray(b"\xa5" * size)
            with pytest.raises(ValueError, match=f"needs {needed} bytes"):
                call(out)
            assert out == b"\xa5" * size


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("block_size", "plain_length"), [(16, 100), (4096, 2 * MIB), (MIB, 5 * MIB + 7)])
def test_failure_leaves_zeros_and_names_the_lowest_block(threads: int, block_size: int, plain_length: int) -> None:
    """Also where the blocks before it have passed their tags, and never behind the plaintext's end."""
    rng = random.Random(plain_length)
    codec = AgsCodec(KEY, block_size=block_size, threads=threads)
    header, blocks = split_stream(codec.encrypt(pattern(plain_length)))
    for _ in range(10):
        bad = sorted(rng.sample(range(len(blocks)), rng.randint(1, 3)))
        changed = [flip(b, rng.randrange(8 * len(b))) if i in bad else b for i, b in enumerate(blocks)]
        stream = header + b"".join(changed)
        out = bytearray(b"\xa5" * (plain_length + 50))
        with pytest.raises(IntegrityError) as caught:
            codec.decrypt_into(stream, out, length=len(stream))
        assert caught.value.block_index == bad[0]
        assert out == bytes(plain_length) + b"\xa5" * 50


@pytest.mark.parametrize("shift", [-100, -36, -9, -8, -1, 0, 1, 8, 20, 36, 63, 64, 100])
def test_overlap_is_right_or_refused(shift: int) -> None:
    """Output that begins `shift` bytes behind the input, in one buffer."""
    codec = AgsCodec(KEY, block_size=16)
    plain = pattern(64)
    stream = codec.encrypt(plain)
    for data, size, call in (
        (plain, len(stream), codec.encrypt_into),
        (stream, len(plain), lambda data, out: codec.decrypt_into(data, out, length=len(data))),
    ):
        whole = memoryview(bytearray(b"\xa5" * 400))
        given_in = whole[100 : 100 + len(data)]
        given_in[:] = data
        out = whole[100 + shift : 100 + shift + size]
        before = bytes(whole)
        try:
            call(given_in, out)
        except BufferError:
            assert bytes(whole) == before
        else:
            assert bytes(out) == plain if data is stream else open_stream(bytes(out)) == plain


# ---------------------------------------------------------------- keys, counters, secrets


@pytest.mark.parametrize("size", [0, 1, 15, 17, 31, 33, 64])
def test_bad_key_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="16, 24 or 32"):
        AgsCodec(bytes(size))


@pytest.mark.parametrize("junk", ["text", 16, 1.5, [0] * 16])
def test_keys_and_prefixes_are_bytes(junk: object) -> None:
    """bytes(16) is sixteen zeros, and bytes of a list whatever it holds: neither is what somebody meant."""
    for make in (
        lambda: AgsCodec(junk),  # type: ignore[arg-type]
        lambda: AgsCodec(KEY, aad_prefix=junk),  # type: ignore[arg-type]
        lambda: ags_fast.AgsReader(seal_stream(b""), KEY, length=36, aad_prefix=junk),  # type: ignore[arg-type]
        lambda: ags_fast.open(io.BytesIO(), "wb", key=KEY, aad_prefix=junk),  # type: ignore[call-overload]
    ):
        with pytest.raises(TypeError):
            make()


def test_impossible_numbers() -> None:
    for threads in (0, -1):
        with pytest.raises(ValueError, match="threads"):
            AgsCodec(KEY, threads=threads)
    for block_size in (0, -1, 1 << 31):
        with pytest.raises(ValueError, match="block_size"):
            AgsCodec(KEY, block_size=block_size)


def test_negative_sealed_before() -> None:
    with pytest.raises(ValueError, match="negative"):
        AgsCodec(KEY, sealed_before=-1)


def test_more_threads_than_there_can_be() -> None:
    """More are clamped, as agsf.h says."""
    for threads in (10_000, 1 << 31, 1 << 40):
        assert len(AgsCodec(KEY, threads=threads).encrypt(bytes(3 * MIB))) == encrypted_length(3 * MIB)


def test_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGS_FAST_THREADS", "7")
    assert "threads=7" in repr(AgsCodec(KEY))
    assert "threads=2" in repr(AgsCodec(KEY, threads=2))
    for junk in ("0", "-3", "x", "1.5"):
        monkeypatch.setenv("AGS_FAST_THREADS", junk)
        with pytest.raises(ValueError, match=r"(?i)threads"):
            AgsCodec(KEY)
    monkeypatch.delenv("AGS_FAST_THREADS")
    assert "threads=" in repr(AgsCodec(KEY))


def test_numbers_may_be_numpys() -> None:
    """Lengths and sizes come out of tables."""
    np = pytest.importorskip("numpy")
    codec = AgsCodec(KEY, block_size=np.int32(64), threads=np.int64(1))
    plain = pattern(200)
    stream = codec.encrypt(plain)
    length = np.int32(len(stream))
    assert codec.decrypt(stream, length=length) == plain
    assert codec.decrypt_range(stream, np.uint8(190), np.uint8(250), length=length) == plain[190:]
    assert encrypted_length(np.int32(200), np.int64(64)) == len(stream)
    reader = ags_fast.AgsReader(stream, KEY, length=length)
    assert reader.read() == plain
    assert type(reader.length) is int
    assert type(reader.seek(np.int16(7))) is int
    assert reader.read_at(np.uint8(190), np.uint8(250)) == plain[190:]


def test_sealed_counts_messages_of_a_key_value() -> None:
    key = random.Random("a key of its own").randbytes(16)
    one, other = AgsCodec(key, block_size=10), AgsCodec(bytearray(key), aad_prefix=b"other", block_size=1000)
    assert one.sealed == other.sealed == 0
    one.encrypt(bytes(100))
    assert one.sealed == other.sealed == 10
    stream = other.encrypt(b"")
    other.encrypt_into(bytes(1001), bytearray(2000))
    assert one.sealed == other.sealed == 13
    other.decrypt(stream, length=len(stream))
    with pytest.raises(ValueError, match="the output needs"):
        one.encrypt_into(bytes(100), bytearray(100))
    assert one.sealed == 13
    del one, other
    with ags_fast.AgsWriter(io.BytesIO(), key, block_size=10) as writer:
        writer.write(bytes(15))
    assert AgsCodec(key).sealed == 15
    assert AgsCodec(bytes(16) + key).sealed == 0


def test_key_limit_is_exact() -> None:
    key = random.Random("a tired key").randbytes(32)
    limit = 1 << 32
    codec = AgsCodec(key, block_size=1, sealed_before=limit - 10)
    assert codec.sealed == 0  # others' are not counted as this process's
    with pytest.raises(KeyLimitError):
        codec.encrypt(bytes(11))
    assert codec.sealed == 0  # all or none
    out = bytearray(b"\xa5" * 500)
    with pytest.raises(KeyLimitError):
        codec.encrypt_into(bytes(11), out)
    assert out == b"\xa5" * 500
    codec.encrypt(bytes(8))
    AgsCodec(key, sealed_before=5).encrypt(b"")  # told less: what is known stays
    assert len(codec.encrypt(bytes(1))) == 8 + 29  # message 2**32
    for tired in (codec, AgsCodec(key)):
        with pytest.raises(KeyLimitError):
            tired.encrypt(b"")
    with pytest.raises(KeyLimitError), ags_fast.AgsWriter(io.BytesIO(), key):
        pass
    stream = seal_stream(b"still opens", key)
    assert AgsCodec(key).decrypt(stream, length=len(stream)) == b"still opens"
    AgsCodec(random.Random(1).randbytes(16), sealed_before=limit)
    with pytest.raises(KeyLimitError):
        AgsCodec(key, sealed_before=limit + 1)


def test_key_limit_is_exact_for_many_threads() -> None:
    key = random.Random("a key for ten threads").randbytes(16)
    codecs = [AgsCodec(key, sealed_before=(1 << 32) - 1000, block_size=1) for _ in range(10)]

    def work(codec: AgsCodec) -> int:
        sealed = 0
        for size in itertools.cycle((1, 2, 3)):
            assert sealed <= 1000
            try:
                codec.encrypt(bytes(size))
            except KeyLimitError:
                if size == 1:
                    return sealed
            else:
                sealed += size
        return sealed

    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(work, codecs)) == 1000 == codecs[0].sealed


def test_errors_travel_between_processes() -> None:
    stream = AgsCodec(KEY, block_size=10).encrypt(bytes(100))
    with pytest.raises(IntegrityError) as caught:
        AgsCodec(KEY).decrypt(flip(stream, 8 * 200), length=len(stream))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is IntegrityError
    assert str(copied) == str(caught.value)
    assert copied.block_index == caught.value.block_index == 5
    for error in (FormatError("x"), KeyLimitError("x")):
        assert repr(pickle.loads(pickle.dumps(error))) == repr(error)


def test_refuses_pickles_and_copies() -> None:
    codec = AgsCodec(KEY)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(codec, protocol)
    for function in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            function(codec)


# ---------------------------------------------------------------- threads and interrupts


def test_one_codec_in_many_threads() -> None:
    """Ten threads seal and open with one codec, all sizes at once: every result is right and no nonce comes twice."""
    codec = AgsCodec(KEY, block_size=4096, threads=3)

    def work(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        nonces = []
        for _ in range(30):
            plain = pattern(rng.choice([0, 10, 4096, 100_000, 2 * MIB]), seed)
            stream = codec.encrypt(plain)
            assert codec.decrypt(stream, length=len(stream)) == plain
            with pytest.raises(IntegrityError):
                codec.decrypt(flip(stream, rng.randrange(64, 8 * len(stream))), length=len(stream))
            nonces += nonces_of(stream)
        return nonces

    with ThreadPoolExecutor(10) as pool:
        nonces = [nonce for result in pool.map(work, range(10)) for nonce in result]
    assert len(set(nonces)) == len(nonces)


@pytest.mark.parametrize("large", [True, False])
def test_gil_is_released_for_large_calls(large: bool) -> None:
    """Another thread runs during a large call; during small ones it does not, so the instrument can fail."""
    codec = AgsCodec(KEY, threads=1)
    data = bytes(64 * MIB if large else 1000)
    out = bytearray(encrypted_length(len(data)))
    ready, go, ran = threading.Event(), threading.Event(), []

    def other() -> None:
        ready.set()
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    thread.start()
    ready.wait()
    try:
        sys.setswitchinterval(1000)  # from now on, a thread has the GIL until it lets go of it
        go.set()
        for _ in range(1000):
            codec.encrypt_into(data, out)
            if ran:
                break
        seen = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen == large


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(streams.interrupt_encrypt, id="encrypt"),
        pytest.param(streams.interrupt_decrypt, id="decrypt"),
        pytest.param(streams.interrupt_write, id="write"),
        pytest.param(streams.interrupt_readinto, id="readinto"),
        pytest.param(streams.interrupt_verify, id="verify"),
    ],
)
def test_interrupt_is_answered(call: Callable[[Path], None], tmp_path: Path) -> None:
    """SIGINT in the middle of a long call raises KeyboardInterrupt within a second and hands out nothing."""
    child = start_python(program(call, tmp_path / "file"))
    assert child.stdout.readline() == "go\n"  # type: ignore[union-attr]
    time.sleep(0.2)  # to be in the middle; too early or too late fails no test that should pass
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    answered = float(finish_python(child))
    assert answered - sent < 1
