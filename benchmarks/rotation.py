"""What is measured of rotations: of the KEKs above data keys (R1, R2), and of the master keys above KEKs (R3).

No file of data takes part, so the datasets have none here, only tables that name them. A rotation runs in this
process, in one thread but for the calls of a KMS, and begins with the version that the one before has made. Times are
for one key.

The EVP loop opens and seals the same data keys. Where a KMS has the work, its calls alone are beside ours.
"""

from __future__ import annotations

import functools
import io
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ags_fast import jobs
from ags_fast.dataset.access import Access
from ags_fast.dataset.change import Wish
from ags_fast.dataset.deks import rewrapped_column
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.keys import kinds_of_files, scopes_of
from ags_fast.dataset.kinds import Want, clock_ms
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.dataset.tables import PAGE_ROWS, TABLE_ROWS
from ags_fast.fs.local import LocalStore
from ags_fast.jobs.run import begin_files
from ags_fast.keys import binding
from ags_fast.keys.entry import SCOPE
from ags_fast.keys.kms.local import LocalKms, rotate_key
from benchmarks.datasets import done, taken, workspace
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from ags_fast.dataset.log import Log
    from ags_fast.fs import Entry
    from benchmarks.cases import Bench

DEKS = 1_000_000  # under a KEK
PARTS = 10  # a part of them is rotated as often
KEKS, SLOW_KEKS, STORED_KEKS = 10_000, 1000, 100_000
SLOW_DEKS = 320  # that the KMS wraps itself; of fewer, what a job does beside its calls would be too large a part
CALL_SECONDS = 0.005  # what a KMS takes to answer
AT_ONCE = (1, 4, 16)  # its calls
LOOKUP_NBYTES = 300_000
JOB_FILES = 10 * TABLE_ROWS  # that one job adds to a dataset
JOB_KEKS = 10_000  # the same, if each gets a KEK


def rotation(bench: Bench) -> Group:
    deks, keks, slow_keks = map(bench.size, (DEKS, KEKS, SLOW_KEKS))
    cases = [
        Case("rotation/kek/crypto", functools.partial(column, bench, deks), rounds=1 / 4),
        Case("rotation/kek/job", functools.partial(whole_job, bench, deks), rounds=1 / 10),
        Case("rotation/kek/single/kms-5ms", functools.partial(single_wrap, bench, SLOW_DEKS), rounds=1 / 10),
        Case("rotation/mek/local", functools.partial(master_key, bench, keks), rounds=1 / 10),
        Case("rotation/mek/kms-5ms", functools.partial(master_key_of_slow_kms, bench, slow_keks), rounds=1 / 7),
        Case("rotation/mek/lookup", functools.partial(lookup, bench, bench.size(STORED_KEKS)), rounds=0),
    ]
    return Group("time for a key; beside: KMS calls alone; best Py: over cryptography, no tables", cases)


class SlowKms(LocalKms):
    """A local keystore, as far away as a KMS in a network."""

    waits = True

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        time.sleep(CALL_SECONDS)
        return super().wrap_key(key, wrapping_key_id)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        time.sleep(CALL_SECONDS)
        return super().unwrap_key(wrapped, wrapping_key_id)

    def current_version(self, wrapping_key_id: str) -> str:
        time.sleep(CALL_SECONDS)
        return super().current_version(wrapping_key_id)


def slow(kms: dict[str, str]) -> dict[str, str]:
    """The properties of the same KMS, far away."""
    others = {name: value for name, value in kms.items() if name != "encryption.kms-type"}
    return {"encryption.kms-impl": f"{SlowKms.__module__}:{SlowKms.__name__}", **others}


def rotated(dataset: Path, kms: dict[str, str], what: str, rows: int, **options: int) -> float:
    """Return the seconds of a rotation. It must report so many keys and tables."""
    start = time.perf_counter()
    result = jobs.rotate(dataset, kms=kms, what=what, progress=False, **options)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    if done(result).counts["ok"] != rows:
        raise AssertionError(f"not the {rows} that there are: {result}")
    return seconds


def each(run: Callable[[], float], count: int) -> Run:
    """Return the seconds for one of `count` pieces of work."""
    return lambda: run() / count


# ---- data keys


class Wraps(NamedTuple):
    """Data keys as a KEK has wrapped them, and the names that they are bound to behind a prefix."""

    kek: bytes
    prefix: bytes
    names: list[bytes]
    wrapped: list[bytes]

    def head(self, count: int) -> Wraps:
        return self._replace(names=self.names[:count], wrapped=self.wrapped[:count])

    def bare(self, bench: Bench) -> Run:
        """Seconds for one."""
        count = len(self.names)
        names, wrapped = b"".join(self.names), b"".join(self.wrapped)
        out = bytearray(b"\xff") * len(wrapped)
        loop = bench.evp.rewrap(self.kek, os.urandom(32), self.prefix, names, wrapped, out, count)
        return each(loop, count)


def split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def python_rewrap(
    kek: bytes, new: bytes, prefix: bytes, names: Sequence[bytes], wrapped: Sequence[bytes]
) -> list[bytes]:
    """As fast as Python can: two objects for all of them, one draw of random numbers, and nothing else in the loop."""
    open_, seal = AESGCM(kek).decrypt, AESGCM(new).encrypt
    nonces = os.urandom(12 * len(names))
    out = []
    for at, name, old in zip(range(0, len(nonces), 12), names, wrapped, strict=True):
        nonce, bound = nonces[at : at + 12], prefix + name
        out.append(nonce + seal(nonce, open_(old[:12], old[12:], bound), bound))
    return out


@contextmanager
def column(bench: Bench, count: int) -> Iterator[Contest]:
    """As a rotation goes through a table, a page after the other."""
    with workspace(bench, "column") as folder:
        snapshot = Access.of(folder / "dataset", keystore(folder)).create(MASTER_KEY)
        head, kms = snapshot.entry, snapshot.log.kms
        old, new = main_key(head.keys), Want(MASTER_KEY).new_kek(kms)
        envelope = snapshot.log.envelope(head, {old.key_id: old, new.key_id: new})
        prefix, deks = binding(head.dataset_id, "dek", ""), split(os.urandom(16 * count), 16)
        names = [f"{made_up(number).path}.ags".encode() for number in range(count)]
        wrapped = envelope.wrap_many(old.key_id, [(dek, prefix + name) for dek, name in zip(deks, names, strict=True)])
        made = Wraps(kms.unwrap_key(old.wrapped or b"", MASTER_KEY), prefix, names, wrapped)
        some = made.head(count // PARTS)
        fresh: dict[str, list[bytes]] = {}

        def best() -> None:
            fresh["best"] = python_rewrap(some.kek, some.kek, prefix, some.names, some.wrapped)

        def ours() -> None:
            fresh["ours"] = []
            for at in range(0, count, PAGE_ROWS):
                page = slice(at, at + PAGE_ROWS)
                fresh["ours"] += rewrapped_column(envelope, old.key_id, new.key_id, prefix, names[page], wrapped[page])

        def check(column: str) -> bool:
            if column == "loop":  # the tests look at what it makes
                return True
            key = old if column == "best" else new
            for at in (0, len(fresh[column]) - 1):
                if envelope.unwrap(key.key_id, fresh[column][at], prefix + names[at]) != deks[at]:
                    return False
            return fresh[column][0] != wrapped[0]

        row = Row("rotation/kek/crypto", f"R2: {count:,} DEKs in pages", "ns")
        runs: dict[tuple[str, str], Run] = {
            (row.name, "loop"): made.bare(bench),
            (row.name, "best"): each(lambda: taken(best), len(some.names)),
            (row.name, "ours"): each(lambda: taken(ours), count),
        }
        yield Contest([row], runs, check=check)


# ---- whole jobs


def made_up(number: int) -> FileEntry:
    """The entry of a file that does not exist, without a job, an object and keys. All paths are of one length."""
    path = f"year=2026/month={number % 12 + 1:02}/part-{number:08}.avro"
    return FileEntry(
        path=path,
        file="",
        format="ags1",
        plain_length=4096,
        file_length=4132,
        block_size=1 << 20,
        key_id="",
        wrapped_dek=b"",
        column_keys=None,
        aad_prefix=number.to_bytes(16, "big"),
        job_id="",
        set_id=None,
        part=None,
        parts=None,
        source=path,
        stamp=str(1_767_225_600_000_000_000 + 1_000_003 * number),
    )


def add(log: Log, numbers: range, *, double_wrap: bool = True, policy: Policy | None = None) -> list[FileEntry]:
    """Plan and commit files that do not exist, by one job, and return their entries."""
    head, new = log.head(), [made_up(number) for number in numbers]

    def kinds(job_id: str) -> list[list[Want]]:
        scopes = scopes_of(policy or head.policy, [row.path for row in new], job_id, clock_ms())
        return kinds_of_files(scopes, [{}] * len(new), MASTER_KEY, double_wrap)

    job, rows = begin_files(Snapshot(log, head), "encrypt", {}, new, kinds, 16, policy=policy)
    with job:
        made = job.commit(Wish("encrypt", rows, policy=policy)).version
    if made is None or made.count != head.count + len(rows):
        raise AssertionError(f"not {len(rows)} files more")
    return rows


def fill(log: Log, count: int, *, double_wrap: bool = True) -> Wraps:
    """Add N files that do not exist to an empty dataset, under one key."""
    names, wrapped = [], []
    for first in range(0, count, JOB_FILES):
        rows = add(log, range(first, min(first + JOB_FILES, count)), double_wrap=double_wrap)
        names += [row.file.encode() for row in rows]
        wrapped += [row.wrapped_dek for row in rows]
    key = log.head().keys[rows[0].key_id]
    kek = b"" if key.wrapped is None else log.kms.unwrap_key(key.wrapped, key.wrapping_key_id)
    return Wraps(kek, binding(log.head().dataset_id, "dek", ""), names, wrapped)


@contextmanager
def whole_job(bench: Bench, count: int) -> Iterator[Contest]:
    """Yield rows of N, and of a tenth of N ten times: runs of equal length are equally likely to be disturbed."""
    part = count // PARTS
    rows, runs = [], {}
    with workspace(bench, "job") as folder:
        kms = keystore(folder)
        for name, number, times in (("tenth", part, PARTS), ("all", count, 1)):
            log = Access.of(folder / name, kms).create(MASTER_KEY).log
            made = fill(log, number)
            row = Row(f"rotation/kek/job/{name}", f"R2: the whole job, {number:,} DEKs", "ns")
            rows.append(row)
            some = made.head(part)
            best = functools.partial(python_rewrap, some.kek, os.urandom(32), some.prefix, some.names, some.wrapped)
            tables = len(log.head().files)
            ours = functools.partial(rotated, folder / name, kms, "kek", 1 + tables)
            runs[row.name, "loop"] = made.bare(bench)
            runs[row.name, "best"] = each(functools.partial(taken, best), part)
            runs[row.name, "ours"] = each(functools.partial(repeated, ours, times), times * number)
            del made, log
        yield Contest(rows, runs)


def repeated(run: Callable[[], float], times: int) -> float:
    return sum(run() for _ in range(times))


@contextmanager
def single_wrap(bench: Bench, count: int) -> Iterator[Contest]:
    with workspace(bench, "single") as folder:
        kms = keystore(folder)
        fill(Access.of(folder / "dataset", kms).create(MASTER_KEY).log, count, double_wrap=False)
        rows: list[Row] = []
        runs: dict[tuple[str, str], Run] = {}
        for at_once in AT_ONCE:
            calls = "1 call" if at_once == 1 else f"{at_once} calls"
            row = Row(f"rotation/kek/single/kms-5ms/{at_once}t", f"R1: {count} DEKs, {calls} of a KMS at once", "us")
            rows.append(row)
            ours = functools.partial(rotated, folder / "dataset", slow(kms), "kek", 2, concurrency=at_once)
            runs[row.name, "beside"] = functools.partial(float, 2 * CALL_SECONDS / at_once)
            runs[row.name, "ours"] = each(ours, count)
        yield Contest(rows, runs)


# ---- KEKs


def with_keks(folder: Path, kms: dict[str, str], count: int) -> Log:
    """Make a dataset with N KEKs: one for its documents, and one for each of its files, which do not exist."""
    log = Access.of(folder, kms).create(MASTER_KEY, Policy("files:1")).log
    for first in range(1, count, JOB_KEKS):
        add(log, range(first, min(first + JOB_KEKS, count)))
    return log


@contextmanager
def master_key(bench: Bench, count: int) -> Iterator[Contest]:
    with workspace(bench, "master") as folder:
        kms = keystore(folder)
        log = with_keks(folder / "dataset", kms, count)
        client, entries = log.kms, [*log.head().keys.values()]

        def calls() -> None:
            for entry in entries:
                wrapped = client.wrap_key(client.unwrap_key(entry.wrapped or b"", MASTER_KEY), MASTER_KEY)
                client.unwrap_key(wrapped, MASTER_KEY)  # a rotation tries what it puts to use

        def ours() -> float:
            rotate_key(kms, MASTER_KEY)  # or there would be nothing to do
            return rotated(folder / "dataset", kms, "mek", count)

        row = Row("rotation/mek/local", f"R3: {count:,} KEKs, a local KMS", "us")
        runs: dict[tuple[str, str], Run] = {
            (row.name, "beside"): each(functools.partial(taken, calls), count),
            (row.name, "ours"): each(ours, count),
        }
        yield Contest([row], runs)


@contextmanager
def master_key_of_slow_kms(bench: Bench, count: int) -> Iterator[Contest]:
    at_once = max(AT_ONCE)
    with workspace(bench, "slow-master") as folder:
        kms = keystore(folder)
        with_keks(folder / "dataset", kms, count)

        def ours() -> float:
            rotate_key(kms, MASTER_KEY)
            return rotated(folder / "dataset", slow(kms), "mek", count, concurrency=at_once)

        row = Row(f"rotation/mek/kms-5ms/{at_once}t", f"R3: {count:,} KEKs, {at_once} calls of a KMS at once", "us")
        runs: dict[tuple[str, str], Run] = {
            (row.name, "beside"): functools.partial(float, 3 * CALL_SECONDS / at_once),
            (row.name, "ours"): each(ours, count),
        }
        yield Contest([row], runs)


class CountingStore(LocalStore):
    """A store that counts the bytes that are read."""

    nbytes = 0

    def read_small(self, path: str, limit: int) -> bytes:
        data = super().read_small(path, limit)
        self.nbytes += len(data)
        return data

    def open_seekable(self, path: str, entry: Entry | None = None, *, tail: bool = False) -> CountingFile:
        return CountingFile(self, path)


class CountingFile(io.RawIOBase):
    """No file of the system, which C would read by itself."""

    def __init__(self, store: CountingStore, path: str) -> None:
        self._store, self._file = store, io.FileIO(store.full_path(path))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Buffer) -> int:
        count = self._file.readinto(buffer)
        self._store.nbytes += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def lookup(bench: Bench, count: int) -> Iterator[Contest]:
    """By processes that know nothing of the dataset."""
    with workspace(bench, "lookup") as folder:
        kms = keystore(folder)
        keys = with_keks(folder / "dataset", kms, count).head().keys
        one = sorted(key_id for key_id, key in keys.items() if SCOPE in key.properties)[count // 3]  # in a table

        def ours() -> float:
            store = CountingStore(folder / "dataset")
            if Access.of(store, kms).open().entry.keys[one] != keys[one]:
                raise AssertionError("this is another key")
            return float(store.nbytes)

        row = Row("rotation/mek/lookup", f"1 of {count:,} KEKs; beside: 300 kB read", "MiB")  # bytes, not seconds
        yield Contest([row], {(row.name, "beside"): lambda: float(LOOKUP_NBYTES), (row.name, "ours"): ours})


GROUPS: dict[str, Callable[[Bench], Group]] = {"rotation": rotation}
