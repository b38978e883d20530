"""Forks, threads, little memory, and copies of keys in memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from killing import ended, fork
from support import KEY, nonces_of, pattern, seal_stream

import ags_fast
from ags_fast import AgsCodec, AgsReader, AgsWriter


def fork_generations() -> None:
    codec = AgsCodec(KEY, block_size=1, threads=2)
    reading, writing = os.pipe()
    seen = nonces_of(codec.encrypt(bytes(500)))

    def child(depth: int) -> None:
        stream = codec.encrypt(bytes(100))
        children = [fork(lambda: child(depth - 1)) for _ in range(2 if depth else 0)]
        os.write(writing, stream)  # less than PIPE_BUF, so in one piece
        assert not any(map(ended, children))

    children = []
    for _ in range(10):
        children.append(fork(lambda: child(2)))
        seen += nonces_of(codec.encrypt(bytes(100)))
    os.close(writing)
    with open(reading, "rb") as pipe:
        streams = pipe.read()
    assert not any(map(ended, children))
    size = 8 + 29 * 100
    assert len(streams) == 10 * (1 + 2 + 4) * size
    for i in range(0, len(streams), size):
        seen += nonces_of(streams[i : i + size])
    assert len(seen) == 500 + 1000 + 7000
    assert len(set(seen)) == len(seen)


pooled = AgsCodec(KEY, block_size=1)  # the parent's own if forked, else one that holds the same key


def seal_pooled(_: object) -> list[bytes]:
    return nonces_of(pooled.encrypt(bytes(200)))


def use_a_pool(method: str) -> None:
    seen = seal_pooled(0)
    with multiprocessing.get_context(method).Pool(4, maxtasksperchild=3) as pool:
        for nonces in pool.imap_unordered(seal_pooled, range(24)):
            seen += nonces + seal_pooled(0)
    assert len(seen) == 200 * 49
    assert len(set(seen)) == len(seen)


def fork_into_namespaces() -> None:
    unshare = ctypes.CDLL(None).unshare
    codec = AgsCodec(KEY, block_size=1, threads=1)
    reading, writing = os.pipe()

    def first_in_a_namespace(then: Callable[[], None]) -> None:
        if unshare(0x20000000) != 0:  # CLONE_NEWPID: for the children
            print("not permitted")
            os._exit(0)

        def first() -> None:
            assert os.getpid() == 1
            then()

        assert ended(fork(first)) == 0

    def seal():
        os.write(writing, codec.encrypt(bytes(100)))

    def outer():
        codec.encrypt(b"the generator is running")
        first_in_a_namespace(seal)
        seal()

    first_in_a_namespace(outer)
    os.close(writing)
    with open(reading, "rb") as pipe:
        streams = pipe.read()
    size = 8 + 29 * 100
    if len(streams) == 2 * size:
        seen = nonces_of(streams[:size]) + nonces_of(streams[size:])
        assert len(set(seen)) == 200, f"{200 - len(set(seen))} of 200 nonces came twice"
    else:
        print("not permitted")


@contextlib.contextmanager
def busy_threads(works: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Threads that do the works again and again while the block runs."""
    stop = threading.Event()

    def loop(work: Callable[[], object]) -> None:
        while not stop.is_set():
            work()

    threads = [threading.Thread(target=loop, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


class Works:
    """All that may be going on in a process when it forks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plain = pattern(3 << 20)
        self.codec = AgsCodec(KEY, block_size=1 << 16, threads=4)
        self.tiny_codec = AgsCodec(KEY, block_size=1, threads=1)
        sealed = self.codec.encrypt(self.plain)
        path.write_bytes(sealed)
        self.reader = AgsReader(path, KEY, length=len(sealed), threads=4)
        self.bad = sealed[:-1] + bytes([sealed[-1] ^ 1])
        self.all = (self.large, self.tiny, self.small, self.read, self.fail, self.write)

    def large(self) -> None:
        assert self.codec.decrypt(self.codec.encrypt(self.plain), length=None) == self.plain

    def tiny(self) -> None:  # most of whose time goes to random numbers, under a lock
        self.tiny_codec.encrypt(self.plain[:5000])

    def small(self) -> None:
        key = os.urandom(32)  # a new key: contexts are made, its counter is made
        one = AgsCodec(key, block_size=1000)
        assert one.decrypt(one.encrypt(b"small"), length=None) == b"small"

    def read(self) -> None:
        assert self.reader.read_at(random.randrange(1000), 2 << 20)

    def fail(self) -> None:
        try:
            self.codec.decrypt(self.bad, length=None)
        except ags_fast.IntegrityError:
            return
        raise AssertionError

    def write(self) -> None:
        with AgsWriter(f"{self.path}.{os.getpid()}.{threading.get_ident()}", KEY, threads=4) as writer:
            writer.write(self.plain)

    def do_all(self, generations: int = 1) -> None:
        """In a child, and in a child of that."""
        signal.alarm(30)  # a lock that nobody will ever release
        for work in self.all:
            work()
        if generations > 1:
            assert ended(fork(self.do_all)) == 0


def fork_in_every_state(forks: int, path: Path) -> None:
    works = Works(path)
    rng = random.Random(1)
    with busy_threads(works.all):
        for i in range(forks):
            time.sleep(rng.random() / 100)  # another state each time
            status = ended(fork(functools.partial(works.do_all, 2 if i % 10 == 0 else 1)))
            assert status == 0, f"fork {i}: status {status}"
    works.reader.close()


class Slow(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        for _ in range(1000):  # long enough for another thread's turn
            pass
        return super().read(size)


def fork_while_a_reader_is_shared(path: Path) -> None:
    plain = pattern(200_000)
    sealed = seal_stream(plain, block_size=1000)
    path.write_bytes(sealed)
    readers = [AgsReader(source, KEY, length=len(sealed)) for source in (path, sealed, Slow(sealed))]

    def read() -> None:
        for offset in (100, 5100):  # in turn, so that each goes through the cache
            for reader in readers:
                reader.read_at(offset, 10)
        offset = random.randrange(100_000)
        assert readers[2].read_at(offset, 90_000) == plain[offset : offset + 90_000]

    def child() -> None:
        signal.alarm(2)
        for reader in readers:
            assert reader.read_at(5100, 10) == plain[5100:5110]
            assert reader.read_at(9100, 90_000) == plain[9100:99_100]  # more than anything has kept

    with busy_threads([read] * 3):
        sys.setswitchinterval(1e-5)
        stuck = any(ended(fork(child)) for _ in range(100))
    for reader in readers:
        reader.close()
    assert not stuck, "a child hangs"


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def fork_beside_helpers() -> None:
    codec = AgsCodec(KEY, block_size=1 << 16, threads=3)

    def use():
        assert codec.decrypt(codec.encrypt(bytes(4 << 20)), length=8 + (4 << 20) + 64 * 28) == bytes(4 << 20)
        assert count_threads() > 1, "this test needs helpers"

    for _ in range(3):
        use()
        child = fork(use)  # which has helpers of its own
        assert count_threads() == 1
        assert ended(child) == 0


def run_in_512_mib(path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)
    plain = pattern(5 << 20)
    codec = AgsCodec(KEY, threads=64, block_size=1 << 17)
    stream = codec.encrypt(plain)
    with open(path, "wb") as file:
        file.write(stream)
    reader = AgsReader(path, KEY, length=len(stream), threads=64)
    done = []
    threading.stack_size(256 << 10)

    def work():
        out = bytearray(len(plain))
        for _ in range(5):
            assert codec.decrypt_into(stream, out, length=len(stream)) == len(plain)
            assert out == plain
            assert reader.readinto_at(0, out) == len(plain)
            assert out == plain
            assert len(codec.encrypt(plain)) == len(stream)
        done.append(True)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert len(done) == 8


def run_out_of_memory() -> None:
    plain = pattern(2 << 20)
    codec = AgsCodec(KEY, threads=16, block_size=1 << 16)
    stream = AgsCodec(KEY, threads=1, block_size=1 << 16).encrypt(plain)
    out = bytearray(len(plain))
    AgsCodec(KEY, threads=1).decrypt_into(stream, out, length=len(stream))
    results: set[object] = set()
    for spare in [*range(0, 3 << 20, 64 << 10), *range(3 << 20, 12 << 20, 1 << 20)]:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        out[:] = bytes(len(out))
        fresh = AgsCodec(KEY, threads=16)
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
        calls: list[Callable[[], object]] = [
            functools.partial(fresh.decrypt_into, stream, out, length=len(stream)),
            lambda: codec.encrypt(plain),
        ]
        for call in calls:
            try:
                results.add(call() is not None)
            except MemoryError:
                results.add(MemoryError)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        assert out == plain or not any(out)
    assert codec.decrypt_into(stream, out, length=len(stream)) == len(plain)
    assert out == plain
    assert results == {True, MemoryError}, results


def use_one_thread(path: Path) -> None:
    codec = AgsCodec(KEY, threads=1)
    assert codec.decrypt(codec.encrypt(bytes(20 << 20)), length=None) == bytes(20 << 20)
    with AgsWriter(path, KEY, threads=1) as writer:
        writer.write(bytes(20 << 20))
    assert len(AgsReader(path, KEY, length=writer.file_length, threads=1).read()) == 20 << 20
    assert count_threads() == 1
    AgsCodec(KEY, threads=4).encrypt(bytes(20 << 20))
    assert count_threads() == 4
    deadline = time.monotonic() + 30
    while count_threads() > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert count_threads() == 1


def bind_to_a_cpu() -> None:
    os.environ.pop("AGS_FAST_THREADS", None)
    codec = AgsCodec(bytes(16))
    usable = sorted(os.sched_getaffinity(0))
    assert f"threads={len(usable)}" in repr(codec) or len(usable) > 1  # a container may have fewer than it sees

    def child() -> None:
        os.sched_setaffinity(0, usable[:1])
        one = AgsCodec(bytes(16))
        assert "threads=1" in repr(one), repr(one)
        one.encrypt(bytes(10 << 20))
        assert count_threads() == 1

    assert ended(fork(child)) == 0


class Needle:
    """A key, held with every bit turned over, so that looking for it makes no copies."""

    def __init__(self, size: int) -> None:
        self._invert = bytes(255 - i for i in range(256))
        self._inverse = os.urandom(size)

    @contextlib.contextmanager
    def key(self) -> Iterator[bytearray]:
        """The key itself, wiped afterwards."""
        key = bytearray(len(self._inverse))
        for i in range(len(key)):
            key[i] = self._invert[self._inverse[i]]
        yield key
        for i in range(len(key)):
            key[i] = 0

    def copies(self) -> int:
        """How often the key is in the memory of this process."""
        found = 0
        with open("/proc/self/maps") as maps:
            regions = [line.split()[0].split("-") for line in maps if line.split()[1].startswith("rw")]
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        for begin, end in ((int(begin, 16), int(end, 16)) for begin, end in regions):
            for at in range(begin, end, 1 << 20):
                try:
                    chunk = os.pread(memory, min(end - at, 1 << 20), at)
                except OSError:
                    break
                found += chunk.translate(self._invert).count(self._inverse)
        os.close(memory)
        return found


def look_for_codec_keys() -> None:
    needle = Needle(16)
    with needle.key() as key:
        codec = AgsCodec(key, threads=2, block_size=4096)
        reader = AgsReader(codec.encrypt(bytes(3 << 20)), key, length=None, threads=2)
    assert len(reader.read()) == 3 << 20
    held = needle.copies()
    assert held >= 2, held  # otherwise this looks in the wrong places
    del codec
    reader.close()
    del reader
    gc.collect()
    left = needle.copies()
    assert left == 0, f"{left} of {held} copies are left"
