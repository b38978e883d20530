"""The memory that a long stream takes: ``python -m benchmarks.memory FILE BYTES THREADS`` writes and reads it.

It prints the peaks in bytes. Nothing but ags_fast is in its process, so that what grows is ags_fast's.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path

from ags_fast import AgsReader, AgsWriter

CHUNK_NBYTES = 1_000_003  # never ends where a block does
KEY = b"k" * 16


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def main(path: str, size: int, threads: int) -> None:
    chunk = bytearray(b"\xff") * CHUNK_NBYTES
    view = memoryview(chunk)
    peaks = {}
    before = start_counting()
    with AgsWriter(path, KEY, threads=threads) as writer:
        for begin in range(0, size, CHUNK_NBYTES):
            writer.write(view[: size - begin])
    peaks["writer"] = status("VmHWM") - before
    length = writer.file_length
    del writer
    before = start_counting()
    with AgsReader(path, KEY, length=length, threads=threads) as reader:
        while reader.readinto(chunk):
            pass
    peaks["reader"] = status("VmHWM") - before
    print(json.dumps(peaks))


def start_counting() -> int:
    """Forget the peak so far; returns the bytes in use."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
