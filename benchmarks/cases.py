"""What is measured: the codec, the reader and the writer."""

from __future__ import annotations

import functools
import io
import os
import random
import shutil
import tempfile
import time
from array import array
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ags_fast import AgsCodec, AgsReader, AgsWriter, crypto, encrypted_length
from benchmarks import peers
from benchmarks.evp import Evp, EvpError
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError
from benchmarks.ring_peer import Ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFIX = b"benchmarks/00000"  # as long as the AAD prefixes that Iceberg makes
MIB = 1 << 20
BLOCK = MIB
KEYS = (b"k" * 16, b"k" * 32)


@dataclass(frozen=True)
class Bench:
    """Where and how much. threads: how many to measure with, 1 first. scratch: a folder in memory, if there is one.

    part: the data are a whole, or a half, a quarter and so on: 1, 2, 4. What is whole is for claims.
    """

    build: Path
    scratch: Path
    threads: list[int]
    part: int = 1

    @property
    def quick(self) -> bool:
        return self.part > 1

    @functools.cached_property
    def evp(self) -> Evp:
        return Evp(self.build)

    @functools.cached_property
    def ring(self) -> Ring:
        return Ring(self.build)

    def size(self, nbytes: int) -> int:
        return nbytes // self.part


@contextmanager
def scratch_folder() -> Iterator[Path]:
    shm = Path("/dev/shm")
    memory = shm if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2 << 30 else None
    with tempfile.TemporaryDirectory(prefix="ags_fast-", dir=memory) as folder:
        yield Path(folder)


def size_name(nbytes: int) -> str:
    if nbytes < 1024:
        return f"{nbytes} B"
    return f"{nbytes >> 20} MiB" if nbytes % MIB == 0 else f"{nbytes >> 10} KiB"


def short(nbytes: int) -> str:
    return size_name(nbytes).replace(" ", "")


def threads_name(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


@functools.cache
def random_data(nbytes: int) -> bytearray:
    return bytearray(os.urandom(nbytes))


def touched(nbytes: int) -> bytearray:
    """A buffer whose pages exist: the first use of a page costs more than AES."""
    return bytearray(b"\xff") * nbytes


def nothing(function: Callable[..., object], *args: object, **named: object) -> Run:
    """Return the function as a run. Its result, which is not a time, is released while the clock runs."""

    def run() -> None:
        function(*args, **named)

    return run


def contest(row: Row, runs: dict[str, Run], calls: int, check: Callable[[str], bool] = lambda column: True) -> Contest:
    """For one row."""
    return Contest([row], {(row.name, column): run for column, run in runs.items()}, calls, check)


# ---- codec


def codec(bench: Bench) -> Group:
    cases = []
    for block in (4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB):
        for key in KEYS:
            for what in ("encrypt_into", "decrypt_into"):
                name = f"codec/{what}/{short(block)}/aes-{8 * len(key)}"
                cases.append(Case(name, functools.partial(between_buffers, bench, name, what, block, key)))
    size = size_name(bench.size(64 * MIB))
    return Group(f"encrypt_into and decrypt_into, {size} from buffer to buffer by size of block", cases)


def codec_rows(bench: Bench, name: str, block: int, key: bytes, nbytes: int) -> list[Row]:
    label = f"{name.split('/')[1]} {size_name(block)}, AES-{8 * len(key)}"
    return [Row(f"{name}/{n}t", f"{label}, {threads_name(n)}", nbytes=nbytes) for n in bench.threads]


@contextmanager
def between_buffers(bench: Bench, name: str, what: str, block: int, key: bytes) -> Iterator[Contest]:
    data = random_data(bench.size(64 * MIB))
    opened = bytearray(data)
    stream = bytearray(AgsCodec(key, aad_prefix=PREFIX, block_size=block).encrypt(data))
    sealing = what == "encrypt_into"
    source, target = (data, stream) if sealing else (stream, opened)
    nonces = os.urandom(12 * -(-len(data) // block)) if sealing else None
    rows = codec_rows(bench, name, block, key, len(data))
    runs: dict[tuple[str, str], Run] = {}
    with ExitStack() as stack:
        for row, n in zip(rows, bench.threads, strict=True):
            best = peers.BestPython(key, PREFIX, block, n)
            stack.callback(best.close)
            ours = AgsCodec(key, aad_prefix=PREFIX, block_size=block, threads=n)
            call = ours.encrypt_into if sealing else functools.partial(ours.decrypt_into, length=len(stream))
            plain = data if sealing else opened
            loop = bench.evp.loop(key, PREFIX, block, plain, stream=stream, nonces=nonces, threads=n)
            runs[row.name, "loop"] = loop
            runs[row.name, "best"] = functools.partial(getattr(best, what), source, target)
            runs[row.name, "ours"] = nothing(call, source, target)
        if sealing:
            naive = nothing(peers.naive_encrypt, key, PREFIX, block, data)
        else:
            naive = nothing(peers.naive_decrypt, key, PREFIX, stream)
        runs[rows[0].name, "naive"] = naive
        if len(key) == 16 and block in (4 << 10, MIB):  # once with small blocks, once with large: it is slow
            pycryptodome = getattr(peers, f"pycryptodome_{what}")
            runs[rows[0].name, "pycryptodome"] = functools.partial(pycryptodome, key, PREFIX, block, source, target)
            plain = data if sealing else opened
            runs[rows[0].name, "ring"] = lambda: bench.ring.run(key, PREFIX, block, plain, stream, nonces)

        def check(column: str) -> bool:
            if column == "naive":  # it has returned what it made
                if sealing:
                    return peers.naive_decrypt(key, PREFIX, peers.naive_encrypt(key, PREFIX, block, data)) == data
                return peers.naive_decrypt(key, PREFIX, stream) == data
            if sealing:
                stream[:8] = peers.header(block)  # which the EVP loop and ring leave out
                ours.decrypt_into(stream, opened, length=len(stream))
            right = opened == data
            target[:] = bytes(len(target))
            return right

        yield Contest(rows, runs, check=check)


def ports(bench: Bench) -> Group:
    cases = [
        Case(f"ports/{what}", functools.partial(beside_ports, bench, what)) for what in ("encrypt_into", "decrypt_into")
    ]
    return Group("AES-128, blocks of 1 MiB, 1 thread; beside: the same number of instructions of AES and CLMUL", cases)


@contextmanager
def beside_ports(bench: Bench, what: str) -> Iterator[Contest]:
    try:
        _, bits = bench.evp.ports(BLOCK)
    except EvpError as error:
        raise SkippedError(str(error)) from None
    data = random_data(bench.size(64 * MIB))
    codec = AgsCodec(KEYS[0], aad_prefix=PREFIX, threads=1)
    stream, opened = bytearray(codec.encrypt(data)), touched(len(data))
    ours = nothing(codec.encrypt_into, data, stream)
    if what == "decrypt_into":
        ours = nothing(codec.decrypt_into, stream, opened, length=len(stream))
    rows = [
        Row(f"ports/{what}/cpu", f"{what}; this CPU's ports, {bits} bits", nbytes=len(data)),
        Row(f"ports/{what}/memcpy", f"{what}; memcpy", nbytes=len(data)),
    ]
    runs: dict[tuple[str, str], Run] = {
        (rows[0].name, "ours"): ours,
        (rows[0].name, "beside"): lambda: bench.evp.ports(len(data))[0],
        (rows[1].name, "beside"): lambda: bench.evp.copy(opened, data),
    }
    rows[0].samples["ours"] = rows[1].samples["ours"] = []
    yield Contest(rows, runs)


def kernel(bench: Bench) -> Group:
    """By the CPU's class: a target for CPUs with VAES is none for those with AVX-512."""
    cases = [Case(f"kernel/vaes{bits}", functools.partial(messages, bench, bits)) for bits in (128, 256, 512)]
    cases += [
        Case(f"kernel/vaes256/{what}/1MiB", functools.partial(codec_of_a_kernel, bench, what))
        for what in ("encrypt_into", "decrypt_into")
    ]
    return Group(
        "AES-128, a message in C by this CPU's widest kernel, and by EVP; beside: the kernel half as wide", cases
    )


@contextmanager
def messages(bench: Bench, bits: int) -> Iterator[Contest]:
    if bench.evp.widest_kernel() != bits:
        raise SkippedError(f"the widest kernel of this CPU has not {bits} bits")
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    widths = {"loop": 0, "ours": bits} | ({"beside": bits // 2} if bits > 128 else {})
    last = 0  # the size of what a contender sealed, or opened

    def run(bits: int, nbytes: int, seal: bool) -> float:
        nonlocal last
        last = nbytes
        return bench.evp.kernel(bits, nbytes, seal=seal)

    for what in ("seal", "open"):
        for nbytes in (64, 512, 1 << 10, 4 << 10, MIB):
            row = Row(f"kernel/vaes{bits}/{what}/{short(nbytes)}", f"{what} {size_name(nbytes)}", nbytes=nbytes)
            rows.append(row)
            for column, width in widths.items():
                runs[row.name, column] = functools.partial(run, width, nbytes, what == "seal")
    yield Contest(rows, runs, check=lambda column: bench.evp.kernel(0, last, seal=False) > 0)  # what was sealed


@contextmanager
def codec_of_a_kernel(bench: Bench, what: str) -> Iterator[Contest]:
    """A case of the codec again, on CPUs where a kernel does all of it."""
    if bench.evp.widest_kernel() != 256 or crypto().kernel != "vaes256":
        raise SkippedError("on this CPU, or by AGS_FAST_AES, no kernel has 256 bits and does messages of all lengths")
    with between_buffers(bench, f"kernel/vaes256/{what}/1MiB", what, BLOCK, KEYS[0]) as whole:
        row = whole.rows[0]
        runs = {who: run for who, run in whole.runs.items() if who in ((row.name, "loop"), (row.name, "ours"))}
        yield Contest([row], runs, check=whole.check)


def whole(bench: Bench) -> Group:
    cases = []
    for key in KEYS:
        for what in ("encrypt", "decrypt"):
            name = f"whole/{what}/1MiB/aes-{8 * len(key)}"
            cases.append(Case(name, functools.partial(encrypt_and_decrypt, bench, name, key)))
    size = size_name(bench.size(64 * MIB))
    return Group(f"encrypt and decrypt {size} to new bytes, as naive Python does; best Py: to a new bytearray", cases)


@contextmanager
def encrypt_and_decrypt(bench: Bench, name: str, key: bytes) -> Iterator[Contest]:
    data = random_data(bench.size(64 * MIB))
    stream = AgsCodec(key, aad_prefix=PREFIX).encrypt(data)
    rows = codec_rows(bench, name, BLOCK, key, len(data))
    runs: dict[tuple[str, str], Run] = {}
    with ExitStack() as stack:
        for row, n in zip(rows, bench.threads, strict=True):
            best = peers.BestPython(key, PREFIX, BLOCK, n)
            stack.callback(best.close)
            ours = AgsCodec(key, aad_prefix=PREFIX, threads=n)
            if "/encrypt/" in name:
                runs[row.name, "naive"] = nothing(peers.naive_encrypt, key, PREFIX, BLOCK, data)
                runs[row.name, "best"] = lambda best=best: best.encrypt_into(data, bytearray(len(stream)))  # type: ignore[misc]
                runs[row.name, "ours"] = nothing(ours.encrypt, data)
            else:
                runs[row.name, "naive"] = nothing(peers.naive_decrypt, key, PREFIX, stream)
                runs[row.name, "best"] = lambda best=best: best.decrypt_into(stream, bytearray(len(data)))  # type: ignore[misc]
                runs[row.name, "ours"] = nothing(ours.decrypt, stream, length=len(stream))
        yield Contest(rows, runs)


# ---- files


def stream_file(bench: Bench, key: bytes, plain_length: int, block: int = BLOCK) -> tuple[str, int]:
    """A file with a stream, made once, and the stream's length."""
    path = bench.scratch / f"{plain_length}-{block}-{len(key)}.ags"
    length = encrypted_length(plain_length, block)
    if not path.exists():
        data = memoryview(random_data(64 * MIB))
        with AgsWriter(path, key, aad_prefix=PREFIX, block_size=block) as writer:
            for begin in range(0, plain_length, len(data)):
                writer.write(data[: plain_length - begin])
    return str(path), length


def read(bench: Bench) -> Group:
    size = bench.size(256 * MIB)
    cases = []
    for chunk in (MIB, 8 * MIB, 64 * MIB):
        for key in KEYS:
            name = f"read/{short(chunk)}/aes-{8 * len(key)}"
            cases.append(Case(name, functools.partial(read_in_sequence, bench, name, key, size, chunk)))
    return Group(
        f"{size_name(size)} from the page cache with readinto, from first to last; EVP loop: with pread", cases
    )


@contextmanager
def read_in_sequence(bench: Bench, name: str, key: bytes, size: int, chunk: int) -> Iterator[Contest]:
    path, length = stream_file(bench, key, size)
    buffer = touched(chunk)
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    windows: dict[str, list[memoryview]] = {"ours": [memoryview(buffer)], "loop": [], "best": []}
    last: deque[bytes] = deque(maxlen=1)  # block that naive Python read

    def check(column: str) -> bool:
        """Whether the last block is in its place in some thread's window, in which the others were before."""
        block = memoryview(random_data(64 * MIB))[(size - BLOCK) % (64 * MIB) :][:BLOCK]
        if column == "naive":
            return last.pop() == block
        right = any(window[(size - BLOCK) % len(window) :][:BLOCK] == block for window in windows[column])
        for window in windows[column]:
            window[:] = bytes(len(window))
        return right

    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb", buffering=0))
        for n in bench.threads:
            row = Row(f"{name}/{n}t", f"{size_name(chunk)} reads, AES-{8 * len(key)}, {threads_name(n)}", nbytes=size)
            window = max(BLOCK, chunk // n // BLOCK * BLOCK)
            opened = touched(window * n)
            windows["loop"] += [memoryview(opened)[i * window : (i + 1) * window] for i in range(n)]
            loop = bench.evp.loop(key, PREFIX, BLOCK, opened, plain_length=size, window=window, threads=n)
            best = peers.BestPython(key, PREFIX, BLOCK, n)
            stack.callback(best.close)
            reader = stack.enter_context(AgsReader(path, key, length=length, aad_prefix=PREFIX, threads=n))
            runs[row.name, "loop"] = functools.partial(loop, file.fileno())
            mine = [touched(window) for _ in range(n)]
            windows["best"] += map(memoryview, mine)
            runs[row.name, "best"] = functools.partial(best.read, file.fileno(), size, mine)
            runs[row.name, "ours"] = functools.partial(read_all, reader, buffer)
            rows.append(row)
        runs[rows[0].name, "naive"] = nothing(lambda: last.extend(peers.naive_read(path, key, PREFIX)))
        yield Contest(rows, runs, check=check)


def read_all(reader: io.RawIOBase, buffer: bytearray) -> None:
    reader.seek(0)
    while reader.readinto(buffer):
        pass


def random_reads(bench: Bench) -> Group:
    cases = []
    for block in (64 << 10, MIB):
        name = f"random/4KiB/{short(block)}"
        cases.append(Case(name, functools.partial(read_at_random, bench, name, block)))
    return Group("4 KiB from anywhere, which opens a whole block; EVP loop: with pread", cases)


@contextmanager
def read_at_random(bench: Bench, name: str, block: int) -> Iterator[Contest]:
    size, key, reads = bench.size(256 * MIB), KEYS[0], 100
    path, length = stream_file(bench, key, size, block)
    dice = random.Random(0)
    offsets = [dice.randrange(size // 4096) * 4096 for _ in range(reads)]
    order = array("I", [offset // block for offset in offsets])
    row = Row(f"{name}/1t", f"blocks of {size_name(block)}, AES-128", "us")
    loop = bench.evp.loop(key, PREFIX, block, touched(block), plain_length=size, window=block, order=order)
    with (
        open(path, "rb", buffering=0) as file,
        AgsReader(path, key, length=length, aad_prefix=PREFIX, threads=1) as reader,
        peers.PythonReader(path, key, length=length, aad_prefix=PREFIX) as best,
    ):

        def ours() -> None:
            for offset in offsets:
                reader.read_at(offset, 4096)

        def python() -> None:
            for offset in offsets:
                best.seek(offset)
                best.read(4096)

        yield contest(row, {"loop": functools.partial(loop, file.fileno()), "best": python, "ours": ours}, reads)


def cached(bench: Bench) -> Group:
    dice = random.Random(0)
    cases = []
    for name, offsets in {
        "one after the other": list(range(0, 500_000, 100)),
        "anywhere in 1 MiB": [dice.randrange(MIB - 100) for _ in range(5000)],
    }.items():
        path = f"cached/{name.replace(' ', '-')}"
        cases.append(Case(path, functools.partial(read_again, bench, path, name, offsets)))
    return Group("read_at of 100 bytes in an open block; beside: seek and read of the plain file, buffered", cases)


@contextmanager
def read_again(bench: Bench, name: str, label: str, offsets: list[int]) -> Iterator[Contest]:
    path, length = stream_file(bench, KEYS[0], 4 * MIB)
    plain = bench.scratch / "plain"
    plain.write_bytes(random_data(64 * MIB)[: 4 * MIB])
    row = Row(f"{name}/1t", label, "ns")
    with (
        open(plain, "rb") as file,
        AgsReader(path, KEYS[0], length=length, aad_prefix=PREFIX) as reader,
        io.BufferedReader(peers.PythonReader(path, KEYS[0], length=length, aad_prefix=PREFIX)) as best,
    ):

        def ours() -> None:
            read_at = reader.read_at
            for offset in offsets:
                read_at(offset, 100)

        def seek_and_read(file: BinaryIO | io.BufferedIOBase) -> None:
            seek, read = file.seek, file.read
            for offset in offsets:
                seek(offset)
                read(100)

        runs: dict[str, Run] = {
            "beside": functools.partial(seek_and_read, file),
            "best": functools.partial(seek_and_read, best),
            "ours": ours,
        }
        yield contest(row, runs, len(offsets))


def write(bench: Bench) -> Group:
    size = bench.size(128 * MIB)
    cases = []
    for chunk in (4 << 10, 64 << 10, MIB, 8 * MIB):
        for key in KEYS:
            name = f"write/{short(chunk)}/aes-{8 * len(key)}"
            cases.append(Case(name, functools.partial(write_in_chunks, bench, name, key, size, chunk)))
    return Group(
        f"{size_name(size)} to a new file; EVP loop: with pwrite, a block at a time, as the best Python", cases
    )


@contextmanager
def write_in_chunks(bench: Bench, name: str, key: bytes, size: int, chunk: int) -> Iterator[Contest]:
    data = random_data(size)
    chunks = [memoryview(data)[begin : begin + chunk] for begin in range(0, size, chunk)]
    path = bench.scratch / "written"
    nonces = os.urandom(12 * (size // BLOCK))
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}

    def fresh(write: Callable[[], object]) -> float:
        path.unlink(missing_ok=True)
        start = time.perf_counter()
        write()
        return time.perf_counter() - start

    def ours(threads: int) -> None:
        with AgsWriter(path, key, aad_prefix=PREFIX, threads=threads) as writer:
            for piece in chunks:
                writer.write(piece)

    def python(best: peers.BestPython) -> None:
        with open(path, "wb", buffering=0) as file:
            best.write(file.fileno(), data)

    def check(column: str) -> bool:
        sealed = bytearray((bench.scratch / "loop" if column == "loop" else path).read_bytes())
        if column == "loop":
            sealed[:8] = peers.header(BLOCK)  # which the EVP loop leaves out
        path.unlink(missing_ok=True)
        return AgsCodec(key, aad_prefix=PREFIX).decrypt(sealed, length=encrypted_length(size)) == data

    with ExitStack() as stack:
        file = stack.enter_context(open(bench.scratch / "loop", "wb", buffering=0))
        for n in bench.threads:
            row = Row(f"{name}/{n}t", f"{size_name(chunk)} writes, AES-{8 * len(key)}, {threads_name(n)}", nbytes=size)
            best = peers.BestPython(key, PREFIX, BLOCK, n)
            stack.callback(best.close)
            loop = bench.evp.loop(key, PREFIX, BLOCK, data, nonces=nonces, threads=n)
            runs[row.name, "loop"] = functools.partial(loop, file.fileno())
            runs[row.name, "best"] = functools.partial(fresh, functools.partial(python, best))
            runs[row.name, "ours"] = functools.partial(fresh, functools.partial(ours, n))
            rows.append(row)
        naive = functools.partial(peers.naive_write, str(path), key, PREFIX, BLOCK, memoryview(data))
        runs[rows[0].name, "naive"] = functools.partial(fresh, naive)
        yield Contest(rows, runs, check=check)


def small(bench: Bench) -> Group:
    cases = []
    for key in KEYS:
        name = f"small/8KiB/aes-{8 * len(key)}"
        cases.append(Case(name, functools.partial(open_read_close, bench, name, key)))
    return Group("open, read and close a stream of 8 KiB; best Py: a seekable stream class", cases)


@contextmanager
def open_read_close(bench: Bench, name: str, key: bytes) -> Iterator[Contest]:
    calls, size = 100, 8 << 10
    path, length = stream_file(bench, key, size)
    row = Row(f"{name}/1t", f"AES-{8 * len(key)}", "us")
    opened = touched(size)
    loop = bench.evp.loop(key, PREFIX, BLOCK, opened, plain_length=size)
    got: bytes | bytearray = b""

    def bare() -> float:
        nonlocal got
        got = opened
        return loop.small(path, calls)

    def ours() -> None:
        nonlocal got
        for _ in range(calls):
            with AgsReader(path, key, length=length, aad_prefix=PREFIX) as reader:
                got = reader.read()

    def python() -> None:
        nonlocal got
        for _ in range(calls):
            with peers.PythonReader(path, key, length=length, aad_prefix=PREFIX) as reader:
                got = reader.read()

    def naive() -> None:
        nonlocal got
        for _ in range(calls):
            got = b"".join(peers.naive_read(path, key, PREFIX))

    runs: dict[str, Run] = {"loop": bare, "naive": naive, "best": python, "ours": ours}
    yield contest(row, runs, calls, lambda column: got == random_data(64 * MIB)[:size])


GROUPS: dict[str, Callable[[Bench], Group]] = {
    "codec": codec,
    "ports": ports,
    "kernel": kernel,
    "whole": whole,
    "read": read,
    "random": random_reads,
    "cached": cached,
    "write": write,
    "small": small,
}
