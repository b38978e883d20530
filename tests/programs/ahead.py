"""Readers and writers that helper threads work for: threads counted, forked in the middle, out of room."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from pathlib import Path

from killing import ended, fork
from support import KEY, pattern, seal_stream

from ags_fast import AgsReader, AgsWriter

BLOCK = 100_000
BLOCKS = 30


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def count_threads(path: Path, cpus: int) -> None:
    """Prints the most threads there were while a stream was read a block at a time, which needs no help."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    plain = pattern(BLOCKS * BLOCK)
    path.write_bytes(seal_stream(plain, block_size=BLOCK))
    most = threads()
    with AgsReader(path, KEY, length=None, threads=2) as reader:
        for begin in range(0, len(plain), BLOCK):
            assert reader.read(BLOCK) == plain[begin : begin + BLOCK]
            most = max(most, threads())
    with AgsWriter(path, KEY, block_size=BLOCK, threads=2) as writer:
        for begin in range(0, len(plain), BLOCK):
            writer.write(plain[begin : begin + BLOCK])
            most = max(most, threads())
    print(most)


def write_too_much(folder: Path, late: str) -> None:
    """The file may not have a whole block. The first is sealed behind: no other has a helper yet."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    writer = AgsWriter(folder / "file", KEY, block_size=BLOCK, threads=2)
    writer.write(bytes(BLOCK))
    try:
        if late == "write":
            while True:
                writer.write(bytes(BLOCK))
        writer.close()
    except OSError as error:
        assert error.errno == errno.EFBIG  # noqa: PT017
    else:
        raise AssertionError
    assert writer.closed


def fork_in_the_middle(path: Path) -> None:
    """The children go on, too. None has a thread of its parent's, so that Python 3.12 has nothing to warn of."""
    plain = pattern(BLOCKS * BLOCK)
    sealed = seal_stream(plain, block_size=BLOCK)
    path.write_bytes(sealed)

    def go_on() -> None:
        assert threads() == 1
        rest = bytearray(plain)
        for reader in readers:
            begin = reader.tell()
            assert reader.read(BLOCK) == plain[begin : begin + BLOCK]
            size = reader.readinto(rest)
            assert rest[:size] == plain[begin + BLOCK :]
            reader.close()

    alone: list[int] = []
    os.register_at_fork(after_in_parent=lambda: alone.append(threads()))
    for step in range(1, 20):
        readers = [AgsReader(source, KEY, length=None, threads=2) for source in (path, sealed)]
        for reader in readers:
            for _ in range(1 + step % 5):
                reader.read(BLOCK)
        time.sleep(0.0002 * step)  # wherever the helper is, the children are right
        children = [fork(go_on), fork(go_on)]
        go_on_here = [reader.read() for reader in readers]
        assert all(plain.endswith(rest) for rest in go_on_here)
        assert len(go_on_here[0]) == len(plain) - (1 + step % 5) * BLOCK
        assert not any(map(ended, children))
        for reader in readers:
            reader.close()
    assert set(alone) == {1}
