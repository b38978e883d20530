"""What is measured of rotations: of the KEKs above data keys (R1, R2), and of the master keys above KEKs (R3).

No file of data takes part, so the datasets have none here, only manifests that name them. A rotation runs in this
process, in one thread but for the calls of a KMS, and begins with the version that the one before has made. Times are
for one key.

The limit is a bare loop in C that opens and seals the same data keys; where a KMS has the work, its calls alone.
"""

from __future__ import annotations

import functools
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ags_fast import jobs
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.keks import Uses, Want
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.tables import MANIFEST_ENTRIES
from ags_fast.fs import Store
from ags_fast.fs.local import LocalStore
from ags_fast.keys import binding, load_kms
from ags_fast.keys.entry import SCOPE, KeyEntry
from ags_fast.keys.kek import new_kek
from ags_fast.keys.kms.local import LocalKms, rotate_key
from ags_fast.keys.stores import DatasetKeyStore
from benchmarks.datasets import done, taken, workspace
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.cases import Bench

DEKS = 1_000_000  # under a KEK
PARTS = 10  # a part of them is rotated as often
KEKS, SLOW_KEKS, STORED_KEKS = 10_000, 1000, 100_000
SLOW_DEKS = 320  # that the KMS wraps itself; of fewer, what a job does beside its calls would be too large a part
CALL_SECONDS = 0.005  # what a KMS takes to answer
AT_ONCE = (1, 4, 16)  # its calls
LOOKUP_NBYTES = 300_000
JOB_ID = "20260101T000000-000000000000"


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
    return Group(
        "time for a key; limit: bare loop, or KMS calls alone; best Py: over cryptography, no manifests", cases
    )


class SlowKms(LocalKms):
    """A local keystore, as far away as a KMS in a network."""

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        time.sleep(CALL_SECONDS)
        return super()._wrap(key, wrapping_key_id)

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        time.sleep(CALL_SECONDS)
        return super()._unwrap(wrapped, wrapping_key_id)

    def _current_version(self, wrapping_key_id: str) -> str:
        time.sleep(CALL_SECONDS)
        return super()._current_version(wrapping_key_id)


def slow(kms: dict[str, str]) -> dict[str, str]:
    """The properties of the same KMS, far away."""
    others = {name: value for name, value in kms.items() if name != "encryption.kms-type"}
    return {"encryption.kms-impl": f"{SlowKms.__module__}:{SlowKms.__name__}", **others}


def rotated(dataset: Path, kms: dict[str, str], what: str, rows: int, **options: int) -> float:
    """Return the seconds of a rotation. It must report these numbers of keys and manifests."""
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
        loop = bench.limit.rewrap(self.kek, os.urandom(32), self.prefix, names, wrapped, out, count)
        return each(loop, count)


def wraps(opened: Ledger, key: KeyEntry, numbers: range) -> Wraps:
    prefix, names = binding(opened.id, "dek", ""), [file_of(number).encode() for number in numbers]
    deks = split(os.urandom(16 * len(names)), 16)
    wrapped = opened.envelope.wrap_many(key.key_id, [(dek, prefix + n) for dek, n in zip(deks, names, strict=True)])
    kek = b"" if key.wrapped is None else opened.kms.unwrap_key(key.wrapped, key.wrapping_key_id)
    return Wraps(kek, prefix, names, wrapped)


def split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def file_of(number: int) -> str:
    """All of one length: the bare loop has only such."""
    return f"year=2026/month={number % 12 + 1:02}/part-{number:08}.avro.ags"


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
    import pyarrow as pa

    with workspace(bench, "column") as folder:
        opened = Ledger.open_or_create(Store(folder / "dataset"), load_kms(keystore(folder)), MASTER_KEY)
        old, new = opened.keyring.main_key(), new_kek(opened.kms, MASTER_KEY)
        opened.keys.compare_and_swap({new.key_id: new}, opened.keys.version)
        made, envelope = wraps(opened, old, range(count)), opened.envelope
        names, wrapped = pa.array(made.names, pa.binary()), pa.array(made.wrapped, pa.binary())
        part = count // PARTS
        fresh: dict[str, pa.Array] = {}

        def best() -> None:
            some = python_rewrap(made.kek, made.kek, made.prefix, names[:part].to_pylist(), wrapped[:part].to_pylist())
            fresh["best"] = pa.array(some, pa.binary())

        def ours() -> None:
            fresh["ours"] = envelope.rewrap_column(old.key_id, new.key_id, made.prefix, names, wrapped)

        def check(column: str) -> bool:
            if column == "limit":  # the tests look at what it makes
                return True
            key = old if column == "best" else new
            for at in (0, len(fresh[column]) - 1):
                bound = made.prefix + made.names[at]
                dek = envelope.unwrap(old.key_id, made.wrapped[at], bound)
                if envelope.unwrap(key.key_id, fresh[column][at].as_py(), bound) != dek:
                    return False
            return bool(fresh[column][0] != wrapped[0])

        row = Row("rotation/kek/crypto", f"R2: {count:,} DEKs in a column", "ns")
        runs: dict[tuple[str, str], Run] = {
            (row.name, "limit"): made.bare(bench),
            (row.name, "best"): each(lambda: taken(best), part),
            (row.name, "ours"): each(lambda: taken(ours), count),
        }
        yield Contest([row], runs, check=check)


# ---- whole jobs


def fill(opened: Ledger, key: KeyEntry, count: int) -> Wraps:
    """Add N files under this key to a dataset, in manifests of the largest size. Ten manifests make a version."""
    names, wrapped = [], []
    for first in range(0, count, 10 * MANIFEST_ENTRIES):
        made = wraps(opened, key, range(first, min(first + 10 * MANIFEST_ENTRIES, count)))
        prefixes = split(os.urandom(16 * len(made.names)), 16)
        entries = [
            FileEntry(
                path=name[:-4].decode(),
                file=name.decode(),
                format="ags1",
                plain_length=4096,
                file_length=4132,
                block_size=1 << 20,
                key_id=key.key_id,
                wrapped_dek=dek,
                column_keys=None,
                aad_prefix=prefix,
                job_id=JOB_ID,
                set_id=None,
                part=None,
                parts=None,
                source=name[:-4].decode(),
                stamp=str(1_767_225_600_000_000_000 + 1_000_003 * number),
            )
            for number, (name, dek, prefix) in enumerate(zip(made.names, made.wrapped, prefixes, strict=True), first)
        ]
        opened.commit(Wish("encrypt", JOB_ID, entries, base=opened.current()))
        names += made.names
        wrapped += made.wrapped
    return made._replace(names=names, wrapped=wrapped)


@contextmanager
def whole_job(bench: Bench, count: int) -> Iterator[Contest]:
    """Yield rows of N, and of a tenth of N ten times: runs of equal length are equally likely to be disturbed."""
    part = count // PARTS
    rows, runs = [], {}
    with workspace(bench, "job") as folder:
        kms = keystore(folder)
        for name, number, times in (("tenth", part, PARTS), ("all", count, 1)):
            opened = Ledger.open_or_create(Store(folder / name), load_kms(kms), MASTER_KEY)
            made = fill(opened, opened.keyring.main_key(), number)
            row = Row(f"rotation/kek/job/{name}", f"R2: the whole job, {number:,} DEKs", "ns")
            rows.append(row)
            some = made.head(part)
            best = functools.partial(python_rewrap, some.kek, os.urandom(32), some.prefix, some.names, some.wrapped)
            manifests = len(opened.current().manifests)  # type: ignore[union-attr]
            ours = functools.partial(rotated, folder / name, kms, "kek", 1 + manifests)
            runs[row.name, "limit"] = made.bare(bench)
            runs[row.name, "best"] = each(functools.partial(taken, best), part)
            runs[row.name, "ours"] = each(functools.partial(repeated, ours, times), times * number)
            del made
        yield Contest(rows, runs)


def repeated(run: Callable[[], float], times: int) -> float:
    return sum(run() for _ in range(times))


@contextmanager
def single_wrap(bench: Bench, count: int) -> Iterator[Contest]:
    with workspace(bench, "single") as folder:
        kms = keystore(folder)
        opened = Ledger.open_or_create(Store(folder / "dataset"), load_kms(kms), MASTER_KEY)
        want = Want(MASTER_KEY, double_wrap=False)
        fill(opened, opened.keyring.reserve({want: Uses(count)})[want], count)
        rows: list[Row] = []
        runs: dict[tuple[str, str], Run] = {}
        for at_once in AT_ONCE:
            calls = "1 call" if at_once == 1 else f"{at_once} calls"
            row = Row(f"rotation/kek/single/kms-5ms/{at_once}t", f"R1: {count} DEKs, {calls} of a KMS at once", "us")
            rows.append(row)
            ours = functools.partial(rotated, folder / "dataset", slow(kms), "kek", 2, concurrency=at_once)
            runs[row.name, "limit"] = functools.partial(float, 2 * CALL_SECONDS / at_once)
            runs[row.name, "ours"] = each(ours, count)
        yield Contest(rows, runs)


# ---- KEKs


def with_keks(folder: Path, kms: dict[str, str], count: int) -> Ledger:
    """Make a dataset with N KEKs: one for its documents, and one for each scope of a job's files."""
    opened = Ledger.open_or_create(Store(folder), load_kms(kms), MASTER_KEY)
    made = [
        new_kek(opened.kms, MASTER_KEY, properties={SCOPE: f"files:{JOB_ID}/{number}"}) for number in range(count - 1)
    ]
    opened.keys.compare_and_swap({entry.key_id: entry for entry in made}, opened.keys.version)
    return opened


@contextmanager
def master_key(bench: Bench, count: int) -> Iterator[Contest]:
    with workspace(bench, "master") as folder:
        kms = keystore(folder)
        opened = with_keks(folder / "dataset", kms, count)
        client, entries = opened.kms, opened.keys.list()

        def calls() -> None:
            for entry in entries:
                wrapped = client.wrap_key(client.unwrap_key(entry.wrapped or b"", MASTER_KEY), MASTER_KEY)
                client.unwrap_key(wrapped, MASTER_KEY)  # a rotation tries what it puts to use

        def ours() -> float:
            rotate_key(kms, MASTER_KEY)  # or there would be nothing to do
            return rotated(folder / "dataset", kms, "mek", count)

        row = Row("rotation/mek/local", f"R3: {count:,} KEKs, a local KMS", "us")
        runs: dict[tuple[str, str], Run] = {
            (row.name, "limit"): each(functools.partial(taken, calls), count),
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
            (row.name, "limit"): functools.partial(float, 3 * CALL_SECONDS / at_once),
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


@contextmanager
def lookup(bench: Bench, count: int) -> Iterator[Contest]:
    """Of keys that no process has at hand."""
    with workspace(bench, "lookup") as folder:
        kms = keystore(folder)
        entries = with_keks(folder / "dataset", kms, count).keys.list()
        one = entries[count // 3]

        def ours() -> float:
            store = CountingStore(folder / "dataset")
            if DatasetKeyStore(store, kms).get(one.key_id) != one:
                raise AssertionError("this is another key")
            return float(store.nbytes)

        row = Row("rotation/mek/lookup", f"1 of {count:,} KEKs; limit: 300 kB read", "MiB")  # bytes, not seconds
        yield Contest([row], {(row.name, "limit"): lambda: float(LOOKUP_NBYTES), (row.name, "ours"): ours})


GROUPS: dict[str, Callable[[Bench], Group]] = {"rotation": rotation}
