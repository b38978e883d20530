"""Codecs, readers and writers: interrupted, forked, killed, and out of room."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import io
import os
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killing import ended, fork
from support import KEY, error_of, open_stream, pattern, seal_stream

import ags_fast
from ags_fast import AgsCodec, AgsReader, AgsWriter, parquet

# A block with 16 MiB of AAD takes about a millisecond: a call that would take seconds, and little memory.
LONG: Any = {"block_size": 32 << 10, "aad_prefix": bytes(16 << 20), "threads": 2}


def long_plain(codec: AgsCodec, block_size: int = LONG["block_size"]) -> bytes:
    """What a codec needs two seconds and a half for."""

    def seconds() -> float:
        start = time.perf_counter()
        codec.encrypt(bytes(20 * block_size))
        return time.perf_counter() - start

    return b"\x5a" * (int(2.5 / min(seconds() for _ in range(3)) * 20) * block_size)


def interrupt(call: Callable[[], object]) -> None:
    """Says when to send SIGINT, and when the call ended with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
    print("go", flush=True)
    try:
        call()
    except KeyboardInterrupt:
        print(time.monotonic())


def interrupt_encrypt(path: Path) -> None:
    codec = AgsCodec(bytes(16), **LONG)
    plain = long_plain(codec)
    out = bytearray(b"\xa5" * ags_fast.encrypted_length(len(plain), LONG["block_size"]))
    interrupt(lambda: codec.encrypt_into(plain, out))
    assert out[:8] == b"\xa5" * 8  # no header: no stream


def interrupt_decrypt(path: Path) -> None:
    codec = AgsCodec(bytes(16), **LONG)
    plain = long_plain(codec)
    stream = codec.encrypt(plain)
    out = bytearray(b"\xa5" * len(stream))
    interrupt(lambda: codec.decrypt_into(stream, out, length=len(stream)))
    assert not any(out[: len(plain)])
    assert out[len(plain) :] == b"\xa5" * (len(out) - len(plain))


def interrupt_write(path: Path) -> None:
    plain = long_plain(AgsCodec(bytes(16), **LONG))
    writer = AgsWriter(path, bytes(16), **LONG)
    interrupt(lambda: writer.write(plain))
    assert writer.closed
    assert os.listdir(path.parent) == []


def interrupt_reader(path: Path, call: str) -> None:
    codec = AgsCodec(bytes(16), **LONG)
    plain = long_plain(codec)
    length = path.write_bytes(codec.encrypt(plain))
    reader = AgsReader(path, bytes(16), length=length, aad_prefix=LONG["aad_prefix"], threads=2)
    out = bytearray(b"\xa5" * len(plain))
    interrupt(reader.verify if call == "verify" else lambda: reader.readinto(out))
    assert call == "verify" or not any(out)
    assert reader.tell() == 0
    assert reader.read(10) == plain[:10]  # goes on


def interrupt_readinto(path: Path) -> None:
    interrupt_reader(path, "readinto")


def interrupt_verify(path: Path) -> None:
    interrupt_reader(path, "verify")


def read_a_fifo(path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: AgsReader(path, bytes(16), length=None),
        lambda: ags_fast.open(path, key=bytes(16), length=100),
        lambda: parquet.inspect(path),
        lambda: parquet.verify(path, parquet.Keys(b"k" * 16)),
    ]
    for call in calls:
        assert "cannot seek" in str(error_of(io.UnsupportedOperation, call))


def read_after_a_fork(path: Path) -> None:
    plain = pattern(1_000_000)
    sealed = seal_stream(plain, block_size=10_000)
    path.write_bytes(sealed)
    file = path.open("rb")
    readers = [AgsReader(source, KEY, length=len(sealed), threads=2) for source in (path, file, sealed)]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            offset, size = rng.randrange(len(plain)), rng.choice([10, 20_000, 700_000])
            for reader in readers:
                assert reader.read_at(offset, size) == plain[offset : offset + size]

    def child(seed: int) -> None:
        work(seed)
        readers[0].verify()
        for reader in readers:
            reader.close()

    work(0)
    children = [fork(functools.partial(child, seed)) for seed in range(4)]
    work(99)
    assert not any(map(ended, children))
    work(100)
    for reader in readers:
        reader.close()
    file.close()


def numbered(number: int, in_place: bool) -> bytes:
    """The file that is the writers' N-th: its number, and a pattern."""
    return struct.pack("<Q", number) + pattern(200_000 if in_place else random.Random(number).randrange(400_000))


def write_on(path: Path, number: int, in_place: bool) -> None:
    """File after file under one name, until the process is killed."""
    while True:
        number += 1
        plain = numbered(number, in_place)
        if in_place:
            with open(path, "r+b") as file, AgsWriter(file, KEY, block_size=4096) as writer:
                writer.write(plain)
        else:
            with AgsWriter(path, KEY, block_size=4096, threads=2) as writer:
                for begin in range(0, len(plain), 50_000):
                    writer.write(plain[begin : begin + 50_000])


def kill_writers(rounds: int, folder: Path, how: str) -> None:
    in_place, path, rng = how == "in place", folder / "file", random.Random(rounds)
    if in_place:
        path.touch()
    complete = incomplete = last = 0
    for number in range(5 * rounds):  # more than asked for, if chance kills where it proves little
        if number >= rounds and complete > rounds // 10 and incomplete > rounds // 20:
            break
        pid = fork(functools.partial(write_on, path, number * 100_000, in_place))
        time.sleep(rng.random() / 50)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        data = path.read_bytes() if path.exists() else b""
        for left in folder.iterdir():
            if left != path:
                assert left.suffix == ".agstmp"
                left.unlink()
                incomplete += 1
        if data[:4] == b"AGS1":
            plain = open_stream(data)  # every byte, by somebody else
            found = struct.unpack("<Q", plain[:8])[0]
            assert plain == numbered(found, in_place)
            assert found >= last
            complete, last = complete + 1, found
        else:
            assert in_place or not data
            incomplete += 1
    print(complete, incomplete)


def write_too_much(folder: Path, step: int) -> None:
    path = folder / "file"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    def write() -> None:
        for _ in range(0, 3 << 20, step):
            writer.write(bytes(step))

    for old in (None, b"old"):
        if old:
            path.write_bytes(old)
        writer = AgsWriter(path, bytes(16), block_size=100_000, threads=2)
        assert error_of(OSError, write).errno == errno.EFBIG
        assert writer.closed
        assert os.listdir(folder) == (["file"] if old else [])
        writer = AgsWriter(path, bytes(16), block_size=2 << 20, threads=2)
        writer.write(bytes((1 << 20) + 1))
        assert error_of(OSError, writer.close).errno == errno.EFBIG
        assert os.listdir(folder) == (["file"] if old else [])
        if old:
            assert path.read_bytes() == old


def fill_a_disk(folder: Path) -> None:
    libc, place = ctypes.CDLL(None), bytes(folder)
    if (
        libc.unshare(0x20000)
        or libc.mount(b"none", b"/", None, 0x44000, None)
        or libc.mount(b"tmpfs", place, b"tmpfs", 0, b"size=1m")
    ):
        print("not permitted")
        return

    def write() -> None:
        while True:
            writer.write(bytes(70_000))

    with AgsWriter(folder / "small", bytes(16)) as writer:
        writer.write(bytes(100_000))
    for threads, block_size in ((1, 1000), (2, 1000), (2, 1 << 20)):
        writer = AgsWriter(folder / "large", bytes(16), block_size=block_size, threads=threads)
        assert error_of(OSError, write).errno == errno.ENOSPC
        assert os.listdir(folder) == ["small"]
    with AgsReader(folder / "small", bytes(16), length=None) as reader:
        assert reader.read() == bytes(100_000)


def end_in_a_child(writer: AgsWriter, how: str) -> None:
    """What a child may try with a writer of its parent."""
    if how == "close":
        writer.close()
    elif how == "abort":
        writer.abort()
    elif how.startswith("write"):
        error_of(ValueError, lambda: writer.write(bytes(5000 if how == "write" else 1)))  # it would be lost
    elif how == "with":
        with writer:
            pass
    elif how == "exit":
        sys.exit(0)


def fork_while_writing(folder: Path) -> None:
    path = folder / "file"
    for how in ("close", "abort", "write", "write one byte", "with", "collect", "exit", "_exit"):
        writer = AgsWriter(path, KEY, block_size=1000, threads=2)
        plain = pattern(1_500_555)
        writer.write(plain[:1_500_000])
        for begin in range(1_500_000, len(plain), 10):  # and a part of a block is kept
            writer.write(plain[begin : begin + 10])
        pid = os.fork()  # not killing.fork: nothing else may hold the writer, or catch the end
        if pid == 0:
            if how == "collect":
                del writer
                gc.collect()
            else:
                end_in_a_child(writer, how)
            os._exit(0)
        assert ended(pid) == 0
        assert not path.exists(), how
        writer.write(b"the rest")
        writer.close()
        assert open_stream(path.read_bytes()) == plain + b"the rest", how
        path.unlink()
        assert os.listdir(folder) == [], how


def close_in_a_child(folder: Path) -> None:
    writer = AgsWriter(folder / "file", bytes(16))

    def child() -> None:
        writer.close()
        held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not [path for path in held if path.startswith(str(folder))], held

    assert ended(fork(child)) == 0
    writer.close()


def read_as_claimed(source: Any, length: int | None) -> None:
    options: dict[str, Any] = {"length": length, "max_block_size": (1 << 32) - 1, "threads": 1}
    with AgsReader(source, bytes(16), **options) as reader:
        reader.read(10)


def claim_block_sizes(path: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    blocks = path.read_bytes()
    lie = path.with_suffix(".lie")
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
    for claimed in [*(1 << n for n in range(32)), *((1 << n) - 1 for n in range(5, 33)), len(blocks) - 28]:
        stream = b"AGS1" + struct.pack("<I", claimed) + blocks
        lie.write_bytes(stream)
        for length in (len(stream), None, len(stream) + 1, 1 << 40, (1 << 63) - 1, 1 << 70, 8 + 29 * (1 << 32)):
            calls: list[Callable[[], object]] = [
                functools.partial(AgsCodec(bytes(16)).decrypt, stream, length=length),
                *(functools.partial(read_as_claimed, source, length) for source in (lie, stream, io.BytesIO(stream))),
            ]
            for call in calls:
                assert isinstance(error_of(ags_fast.AgsError, call), ags_fast.FormatError | ags_fast.IntegrityError), (
                    claimed,
                    length,
                )
