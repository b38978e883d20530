"""`_core.rewrap`: columns of wrapped keys, as Arrow holds them, from one KEK to another.

Against `Envelope`, which wraps and unwraps them one by one, and against AES-GCM of another library. What csrc does with
its buffers, its stacks and its threads, tests/csrc/test_rewrap.c guards.
"""

from __future__ import annotations

import array
import random
import signal
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kms_clients import keystore
from programs import wrapping
from support import program, run_python

from ags_fast._core import Key, rewrap
from ags_fast.errors import IntegrityError, KeyLimitError
from ags_fast.keys import Envelope, binding, load_kms, new_kek

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OLD, NEW = bytes(range(32)), bytes(range(32, 48))
PREFIX = binding("a dataset", "dek", "")
SLACK = 0xA5


def offsets_of(column: pa.Array) -> memoryview:
    """Those of its rows alone: a slice shares its parent's."""
    return memoryview(column.buffers()[1])[4 * column.offset : 4 * (column.offset + len(column) + 1)]


@dataclass
class Column:
    """What `rewrap` is called with, and the keys that are wrapped."""

    names: pa.Array
    wrapped: pa.Array
    deks: list[bytes]
    changes: dict[str, Any] = field(default_factory=dict)

    def out(self) -> bytearray:
        return bytearray([SLACK]) * (self.wrapped.buffers()[2].size + 5)

    def run(
        self, out: Any, *, old: bytes = OLD, new: bytes = NEW, prefix: Any = PREFIX, threads: int = 1, **changes: Any
    ) -> None:
        names, wrapped = self.names, self.wrapped
        given = {
            "name_offsets": offsets_of(names),
            "names": names.buffers()[2],
            "offsets": offsets_of(wrapped),
            "wrapped": wrapped.buffers()[2],
            "out": out,
            **changes,
        }
        rewrap(Key(old), Key(new), prefix, *given.values(), threads=threads)

    def rows(self, data: Any) -> list[bytes]:
        """As Arrow sees them, over other data."""
        wrapped = self.wrapped
        buffers = [None, wrapped.buffers()[1], pa.py_buffer(bytes(data))]
        return pa.Array.from_buffers(pa.binary(), len(wrapped), buffers, offset=wrapped.offset).to_pylist()

    def bounds(self) -> tuple[int, int]:
        offsets = offsets_of(self.wrapped).cast("B").cast("i")
        return offsets[0], offsets[-1]

    def check(self, out: bytearray, new: bytes = NEW) -> list[bytes]:
        """Every row opens to the key that it was, and only rows were written. Returns the nonces."""
        aes, rows = AESGCM(new), self.rows(out)
        opened = [
            aes.decrypt(row[:12], row[12:], PREFIX + name.encode())
            for row, name in zip(rows, self.names.to_pylist(), strict=True)
        ]
        assert opened == self.deks
        self.check_around(out)
        return [row[:12] for row in rows]

    def check_around(self, out: bytearray) -> None:
        begin, end = self.bounds()
        assert set(out[:begin]) <= {SLACK}
        assert set(out[end:]) <= {SLACK}

    def check_zeros(self, out: bytearray) -> None:
        begin, end = self.bounds()
        assert not any(out[begin:end])
        self.check_around(out)


def column(nrows: int, *, sizes: Sequence[int] = (16, 24, 32, 1, 64), sliced: tuple[int, int] = (3, 2)) -> Column:
    """`nrows` keys under OLD, in the middle of arrays that have some more rows before and after."""
    before, after = sliced
    rng = random.Random(nrows)
    aes, names, wrapped, deks = AESGCM(OLD), [], [], []
    for i in range(before + nrows + after):
        name, dek, nonce = (
            f"folder {i % 3}/{'ü' * (i % 5)}file-{i}.avro",
            rng.randbytes(sizes[i % len(sizes)]),
            rng.randbytes(12),
        )
        names.append(name)
        deks.append(dek)
        wrapped.append(nonce + aes.encrypt(nonce, dek, PREFIX + name.encode()))
    arrays = [pa.array(names, pa.string()), pa.array(wrapped, pa.binary())]
    names, wrapped = (a.slice(before, nrows) for a in arrays)
    return Column(names, wrapped, deks[before : before + nrows])


@pytest.fixture(scope="module")
def large() -> Column:
    """Enough for helpers."""
    return column(6000)


# ---------------------------------------------------------------- what it makes


def test_as_envelopes_wrap_and_unwrap(tmp_path: Path) -> None:
    properties = keystore(tmp_path, "m")
    kms = load_kms(properties)
    old, new = (new_kek(properties, "m", length=length) for length in (32, 16))
    envelope = Envelope(properties, {entry.key_id: entry for entry in (old, new)}, kek_lengths=(16, 32))
    paths = [f"day=1/{i}.parquet" for i in range(300)] + ["b\udcff\n", "x" * 4000]  # a name that is not text
    deks = [bytes([i % 256]) * (16, 24, 32)[i % 3] for i in range(len(paths))]
    bound = [binding("a dataset", "dek", path) for path in paths]
    names = pa.array([path.encode("utf-8", "surrogateescape") for path in paths], pa.binary())
    wrapped = pa.array(envelope.wrap_many(old.key_id, zip(deks, bound, strict=True)), pa.binary())
    rows = Column(names, wrapped, deks)
    out = rows.out()
    keys = [kms.unwrap_key(entry.wrapped or b"", "m") for entry in (old, new)]
    rows.run(out, old=keys[0], new=keys[1])
    assert envelope.unwrap_many(new.key_id, zip(rows.rows(out), bound, strict=True)) == deks
    with pytest.raises(IntegrityError):
        envelope.unwrap(new.key_id, rows.rows(out)[0], bound[1])


@pytest.mark.parametrize("threads", [1, 2, 300])
@pytest.mark.parametrize("nrows", [1, 2, 511, 513])
@pytest.mark.parametrize("sliced", [(0, 0), (3, 2)])
def test_rows_and_slices(nrows: int, sliced: tuple[int, int], threads: int) -> None:
    rows = column(nrows, sliced=sliced)
    out = rows.out()
    rows.run(out, threads=threads)
    rows.check(out)


def test_threads_and_runs_agree_and_share_no_nonce(large: Column) -> None:
    nonces = [row[:12] for row in large.wrapped.to_pylist()]
    sealed = Key(NEW).sealed
    for threads in (1, 2):
        out = large.out()
        large.run(out, threads=threads)
        nonces += large.check(out)
    assert len(set(nonces)) == len(nonces) == 3 * len(large.deks)
    assert Key(NEW).sealed == sealed + 2 * len(large.deks)


def test_buffers_of_any_kind() -> None:
    rows = column(5, sliced=(0, 0))
    out = rows.out()
    offsets = array.array("i", memoryview(rows.wrapped.buffers()[1])[: 4 * 6].cast("B").cast("i"))
    odd = memoryview(b"x" + bytes(offsets_of(rows.names)))[1:]  # of no alignment
    rows.run(
        out, prefix=memoryview(PREFIX), offsets=offsets, name_offsets=odd, wrapped=bytes(rows.wrapped.buffers()[2])
    )
    rows.check(out)
    for bad in (memoryview(out)[::2], bytes(out)):
        with pytest.raises((BufferError, TypeError)):
            rows.run(bad)
    for missing in ("old", "new"):
        with pytest.raises(TypeError):
            rewrap(
                **{"old": Key(OLD), "new": Key(NEW), missing: None},  # type: ignore[arg-type]
                prefix=b"",
                name_offsets=b"",
                names=b"",
                offsets=b"",
                wrapped=b"",
                out=bytearray(),
            )


def test_no_rows() -> None:
    sealed = Key(NEW).sealed
    for offsets in (b"", struct.pack("i", 0), struct.pack("i", -5)):
        out = bytearray(b"untouched")
        rewrap(Key(OLD), Key(NEW), PREFIX, offsets, b"", b"", b"", out)
        assert out == b"untouched"
        assert Key(NEW).sealed == sealed
    empty = column(3).wrapped.slice(1, 0)
    rewrap(Key(OLD), Key(NEW), PREFIX, offsets_of(empty), b"", offsets_of(empty), empty.buffers()[2], bytearray())


# ---------------------------------------------------------------- what it refuses


def test_every_kind_of_change_is_found(large: Column) -> None:
    good = bytes(large.wrapped.buffers()[2])
    offsets = memoryview(offsets_of(large.wrapped)).cast("B").cast("i")
    for n, row in enumerate((0, 511, 512, 5999)):
        for at in (offsets[row], offsets[row] + 12, offsets[row + 1] - 17, offsets[row + 1] - 16, offsets[row + 1] - 1):
            for bit in (0, 7):
                bad = bytearray(good)
                bad[at] ^= 1 << bit
                bad[offsets[5999]] ^= 2  # the last row, too: the lowest counts
                out = large.out()
                with pytest.raises(IntegrityError, match=f"row {row}:") as caught:
                    large.run(out, wrapped=bad, threads=1 + n % 2)
                assert caught.value.block_index == row
                large.check_zeros(out)


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"old": NEW}, 0),
        ({"old": bytes(32)}, 0),
        ({"prefix": PREFIX + b"x"}, 0),
        ({"prefix": b""}, 0),
        ({"prefix": binding("another", "dek", "")}, 0),
    ],
)
def test_another_key_or_prefix(changes: dict[str, Any], row: int) -> None:
    rows = column(20)
    out = rows.out()
    with pytest.raises(IntegrityError) as caught:
        rows.run(out, **changes)
    assert caught.value.block_index == row
    rows.check_zeros(out)


def test_names_and_keys_are_not_exchanged() -> None:
    rows = column(20, sizes=(16,))
    names = rows.names.to_pylist()
    names[7], names[9] = names[9], names[7]
    swapped = pa.array(names, pa.string())
    wrapped = rows.wrapped.to_pylist()
    wrapped[3], wrapped[5] = wrapped[5], wrapped[3]
    for other, row in (
        (Column(swapped, rows.wrapped, rows.deks), 7),
        (Column(rows.names, pa.array(wrapped), rows.deks), 3),
    ):
        out = other.out()
        with pytest.raises(IntegrityError) as caught:
            other.run(out)
        assert caught.value.block_index == row
        other.check_zeros(out)


def test_rows_that_cannot_be_are_named_and_nothing_is_done() -> None:
    rows = column(10, sizes=(16,), sliced=(1, 1))
    keys = list(offsets_of(rows.wrapped).cast("B").cast("i"))
    names = list(offsets_of(rows.names).cast("B").cast("i"))
    sealed = Key(NEW).sealed
    cases: list[tuple[str, int, int, int]] = [  # which offsets, which of them, its value, the row
        ("offsets", 0, -1, 0),
        ("offsets", 4, keys[3] + 28, 3),
        ("offsets", 4, keys[3] + 93, 3),
        ("offsets", 4, keys[3] - 1, 3),
        ("offsets", 10, 1 << 30, 9),
        ("name_offsets", 0, -1, 0),
        ("name_offsets", 4, names[3] - 1, 3),
        ("name_offsets", 10, 1 << 30, 9),
    ]
    for which, at, value, row in cases:
        changed = array.array("i", keys if which == "offsets" else names)
        changed[at] = value
        out = rows.out()
        with pytest.raises(ValueError, match=f"row {row} ") as caught:
            rows.run(out, **{which: changed})  # type: ignore[arg-type]
        assert str(value) in str(caught.value)
        assert set(out) == {SLACK}
    for wrong in (
        {"offsets": offsets_of(rows.wrapped)[:-1]},
        {"offsets": offsets_of(rows.wrapped)[:-4]},
        {"offsets": b""},
        {"name_offsets": b""},
    ):
        out = rows.out()
        with pytest.raises(ValueError, match=r"offsets are int32|wrapped keys"):
            rows.run(out, **wrong)
        assert set(out) == {SLACK}
    with pytest.raises(ValueError, match="offsets are int32"):
        rows.run(rows.out(), offsets=offsets_of(rows.wrapped)[:-1], name_offsets=offsets_of(rows.names)[:-1])
    with pytest.raises(ValueError, match="row 9 "):
        rows.run(bytearray(keys[-1] - 1))
    for threads in (0, -1):
        with pytest.raises(ValueError, match="threads"):
            rows.run(rows.out(), threads=threads)
    assert Key(NEW).sealed == sealed
    out = bytearray([SLACK]) * keys[-1]  # exactly enough
    rows.run(out)
    rows.check(out)


def test_the_output_overlaps_no_input() -> None:
    rows = column(4, sliced=(0, 0))
    inputs: dict[str, Any] = {
        "prefix": bytearray(PREFIX),
        "name_offsets": bytearray(offsets_of(rows.names)),
        "names": bytearray(rows.names.buffers()[2]),
        "offsets": bytearray(offsets_of(rows.wrapped)),
        "wrapped": bytearray(rows.wrapped.buffers()[2]),
    }
    for name, buffer in inputs.items():
        together = bytearray(buffer) + rows.out()
        before = bytes(together)
        view = memoryview(together)
        for begin in (0, len(buffer) - 1):
            with pytest.raises(BufferError):
                rows.run(view[begin:], **{**inputs, name: view[: len(buffer)]})
            assert together == before
        rows.run(view[len(buffer) :], **{**inputs, name: view[: len(buffer)]})  # side by side
        rows.check(together[len(buffer) :])


def test_the_limit_of_the_new_key() -> None:
    new = b"a key that counts 16 bytes"[:16]
    rows = column(100)
    Key(new).carry((1 << 32) - 150)
    out = rows.out()
    rows.run(out, new=new)
    rows.check(out, new)
    out = rows.out()
    with pytest.raises(KeyLimitError):
        rows.run(out, new=new)
    assert set(out) == {SLACK}
    assert Key(new).sealed == 100


# ---------------------------------------------------------------- processes and threads


def test_nonces_of_parent_and_children(tmp_path: Path) -> None:
    """10^5 rows in all, by a parent and its forks, each at once after the fork, with keys and helpers of before it."""
    run_python(program(wrapping.rewrap_after_fork, tmp_path))
    nonces = b"".join((tmp_path / name).read_bytes() for name in "0123")
    assert len({nonces[i : i + 12] for i in range(0, len(nonces), 12)}) == len(nonces) // 12 == 100_000


def repeated(nrows: int) -> dict[str, Any]:
    """One key of a single byte, so many times, all with the empty name."""
    row = bytes(12) + Key(OLD).seal(bytes(12), b"k", PREFIX)
    offsets = array.array("i", range(0, (nrows + 1) * len(row), len(row)))
    return {"name_offsets": bytes(4 * (nrows + 1)), "names": b"", "offsets": offsets, "wrapped": row * nrows}


def test_without_the_gil() -> None:
    rows = repeated(3_000_000)
    out = bytearray([SLACK]) * len(rows["wrapped"])
    untouched = bytes([SLACK]) * 29
    seen = threading.Event()

    def look() -> None:
        deadline = time.monotonic() + 60
        while out[:29] == untouched and time.monotonic() < deadline:
            pass
        if out[-29:] == untouched:
            seen.set()

    thread = threading.Thread(target=look)
    thread.start()
    rewrap(Key(OLD), Key(NEW), PREFIX, *rows.values(), out)  # type: ignore[arg-type, call-arg]
    thread.join()
    assert seen.is_set()


def test_an_interrupt_leaves_zeros() -> None:
    rows = repeated(3_000_000)
    out = bytearray([SLACK]) * len(rows["wrapped"])
    untouched = bytes([SLACK]) * 29
    raised: list[BaseException] = []

    def stop(*_: object) -> None:
        if not raised and out[:29] != untouched and out[-29:] == untouched:
            raised.append(True)  # type: ignore[arg-type]
            raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        with pytest.raises(TimeoutError):
            rewrap(Key(OLD), Key(NEW), PREFIX, *rows.values(), out)  # type: ignore[arg-type, call-arg]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert out.count(0) == len(out)


def test_threads_share_keys() -> None:
    rows = repeated(5000)
    old, new = Key(OLD), Key(NEW)
    outs = [bytearray(len(rows["wrapped"])) for _ in range(4)]
    threads = [
        threading.Thread(target=rewrap, args=(old, new, PREFIX, *rows.values(), out), kwargs={"threads": 2})
        for out in outs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    size = len(rows["wrapped"]) // 5000
    nonces = {bytes(out[i : i + 12]) for out in outs for i in range(0, len(out), size)}
    assert len(nonces) == 4 * 5000
    for out in outs:
        assert all(
            new.open(out[i : i + 12], out[i + 12 : i + size], PREFIX) == b"k" for i in range(0, len(out), 97 * size)
        )
