"""Files of many small column chunks: how often their target is written, and how often a thread is handed something."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import parquet_peers as peers
import pytest

from ags_fast import IntegrityError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from collections.abc import Callable

pa, pq = peers.pa, peers.pq

COLUMNS, GROUPS, ROWS = 100, 20, 128  # 2,000 chunks of 1 KiB
KEYS, NEW_KEYS = Keys(b"k" * 16), Keys(b"n" * 16)
WINDOW = 1 << 20  # bytes of a source that are handed over together
COLLECTED = 256 << 10  # bytes of indexes, or of chunks between others, that are written together
ENDS = 4  # the magic, the footer, and what is last of pages and of indexes
NAMES = [f"column_{i}" for i in range(COLUMNS)]
OPTIONS: dict[str, Any] = {"row_group_size": ROWS, "compression": "none", "use_dictionary": False}


class Counting(io.BytesIO):
    """Counts the writes that it takes."""

    writes = 0

    def write(self, data: Any) -> int:
        self.writes += 1
        return super().write(data)


@pytest.fixture(scope="module")
def table() -> Any:
    return pa.table({name: range(i, i + ROWS * GROUPS) for i, name in enumerate(NAMES)})


@pytest.fixture(scope="module", params=[False, True], ids=["", "indexes"])
def plain(request: pytest.FixtureRequest, table: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, write_page_index=request.param, **OPTIONS)
    return sink.getvalue()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What thread pools were given to do."""
    calls: list[object] = []
    submit = ThreadPoolExecutor.submit

    def counted(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
        calls.append(call)
        return submit(pool, call, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    return calls


def opened(data: bytes, keys: Keys) -> Any:
    return pq.read_table(parquet.open_plain(data, keys))


def bound(nbytes: int) -> int:
    """The writes of a file in which no chunk is written alone."""
    return nbytes // WINDOW + nbytes // COLLECTED + ENDS


@pytest.mark.parametrize("threads", [1, 2])
def test_a_window_is_written_at_once(threads: int, plain: bytes, table: Any, handed: list[object]) -> None:
    sealed, back, again, same = (Counting() for _ in range(4))
    parquet.encrypt_file(plain, sealed, KEYS, threads=threads)
    parquet.decrypt_file(sealed.getvalue(), back, KEYS, threads=threads)
    parquet.reencrypt_file(sealed.getvalue(), again, KEYS, NEW_KEYS, threads=threads)
    parquet.reencrypt_file(sealed.getvalue(), same, KEYS, NEW_KEYS, same_size=True, threads=threads)
    for target in (sealed, back, again, same):
        assert target.writes <= bound(len(target.getvalue()))
    assert len(handed) <= (threads > 1) * sum(bound(len(one.getvalue())) for one in (sealed, back, again, same))
    assert pq.read_table(io.BytesIO(back.getvalue())) == table
    assert opened(sealed.getvalue(), KEYS) == table
    assert opened(again.getvalue(), NEW_KEYS) == table
    assert opened(same.getvalue(), NEW_KEYS) == table


@pytest.mark.parametrize("threads", [1, 2])
def test_every_second_column_is_sealed(threads: int, plain: bytes, table: Any, handed: list[object]) -> None:
    keys = Keys(b"k" * 16, dict.fromkeys(NAMES[::2], b"c" * 16))
    target = Counting()
    parquet.encrypt_file(plain, target, keys, other_columns="plain", threads=threads)
    assert target.writes <= bound(len(target.getvalue()))
    assert len(handed) <= (threads > 1) * bound(len(target.getvalue()))
    assert opened(target.getvalue(), keys) == table


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_that_are_not_moved_together(threads: int, handed: list[object]) -> None:
    """Chunks of 24 KiB are written one by one, as they are in the window's buffer, but handed over with the window."""
    table = pa.table({name: range(i, i + 3072) for i, name in enumerate(NAMES)})
    source, target = io.BytesIO(), Counting()
    pq.write_table(table, source, compression="none", use_dictionary=False)
    parquet.encrypt_file(source.getvalue(), target, KEYS, threads=threads)
    assert target.writes <= COLUMNS + ENDS
    assert len(handed) <= (threads > 1) * bound(len(target.getvalue()))
    assert opened(target.getvalue(), KEYS) == table


@pytest.mark.parametrize("threads", [1, 2])
def test_write_table(threads: int, table: Any, handed: list[object]) -> None:
    """Two calls for each row group: pyarrow encodes it, and it is written."""
    target = Counting()
    parquet.write_table(table, target, KEYS, write_page_index=True, threads=threads, **OPTIONS)
    assert target.writes <= GROUPS + bound(len(target.getvalue()))
    assert len(handed) <= (threads > 1) * (2 * GROUPS + bound(len(target.getvalue())))
    assert opened(target.getvalue(), KEYS) == table


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (600, {}),
        (2, {"row_group_size": 2}),
        (2, {"data_page_size": 1, "write_batch_size": 2}),
    ],
    ids=["columns", "row groups", "pages"],
)
def test_ordinals_of_two_bytes(columns: int, options: dict[str, Any]) -> None:
    """Arrow opens what is sealed here, and the other way round, also beyond the 256th of each."""
    table = pa.table({f"c{i}": range(i, i + 1200) for i in range(columns)})
    options = OPTIONS | {"row_group_size": 1200} | options
    plain, ours, theirs = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(table, plain, **options)
    parquet.encrypt_file(plain.getvalue(), ours, KEYS)
    keys = peers.PmeKeys(b"k" * 16)
    assert peers.pyarrow_read(pa.BufferReader(ours.getvalue()), keys) == table
    peers.pyarrow_write(table, theirs, keys, **options)
    assert opened(theirs.getvalue(), KEYS) == table
    pages = [one.data_pages for one in parquet.verify(theirs.getvalue(), KEYS).columns]
    assert len(pages) > 256 or min(pages) > 256  # of a row group, or one in each


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_of_a_window_with_a_damaged_chunk(threads: int, plain: bytes) -> None:
    """The error names the chunk, and none of its window's plaintext reaches the target."""
    sealed = bytearray()
    parquet.encrypt_file(plain, sealed, KEYS)
    chunk = pq.ParquetFile(parquet.open_plain(bytes(sealed), KEYS)).metadata.row_group(2).column(70)
    sealed[chunk.data_page_offset + 500] ^= 1
    target = Counting()
    with pytest.raises(IntegrityError) as caught:
        parquet.decrypt_file(bytes(sealed), target, KEYS, threads=threads)
    assert (caught.value.column, caught.value.row_group) == (NAMES[70], 2)
    assert len(target.getvalue()) <= 4
