"""Fields of a footer that a reader must ignore in an ordinary file, whatever they hold: ignored, and kept."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pme_reference as ref
import pytest
from parquet_files import KF, with_footer

from ags_fast import parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from collections.abc import Iterator

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TABLE = pa.table({"a": [1, 2, 3], "s": ["x", "y", "x"]})


def parts(footer: ref.Struct, of: str) -> Iterator[ref.Struct]:
    """The structs of one kind in a footer."""
    for group in footer[4].items:
        if of == "group":
            yield group
            continue
        yield from group[1].items if of == "chunk" else (chunk[3] for chunk in group[1].items)


# Where the field is, its number, its type and what it holds. A path is not followed, an old offset not gone to.
FIELDS: list[tuple[str, int, int, Any]] = [
    *(("chunk", 1, ref.BINARY, path) for path in (b"", b"p.parquet", b"other.parquet", b"/x/../y", b"\xff")),
    ("chunk", 1, ref.I32, 3),  # a path that is none
    *(("chunk", 2, ref.I64, offset) for offset in (4, 999_999, -1)),
    *(("group", number, ref.I64, value) for number in (2, 5) for value in (0, 1 << 60, -5)),
    *(("group", 6, ref.I64, value) for value in (1, 1 << 60, -5)),
    *(("group", 7, ref.I16, ordinal) for ordinal in (7, -1)),
    ("metadata", 2, ref.LIST, ref.List(ref.I32, [2])),
    ("metadata", 10, ref.I64, 77),
    ("metadata", 13, ref.LIST, ref.List(ref.STRUCT, [])),
    *((of, 20 if of != "metadata" else 40, ref.BINARY, b"of later") for of in ("group", "chunk", "metadata")),
]
WRITTEN = {("chunk", 2), ("metadata", 10), *(("group", number) for number in (2, 5, 6, 7))}  # places and sizes change


@pytest.mark.parametrize(("of", "number", "kind", "value"), FIELDS, ids=lambda one: str(one)[:16])
def test_a_field_that_means_nothing(of: str, number: int, kind: int, value: Any) -> None:
    plain, sealed, opened = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(TABLE, plain, row_group_size=2, write_page_index=True)

    def edit(footer: ref.Struct) -> None:
        for part in parts(footer, of):
            part.set(number, kind, value)

    odd = with_footer(plain.getvalue(), edit)
    assert pq.read_table(io.BytesIO(odd)) == TABLE  # as Arrow reads it
    parquet.encrypt_file(odd, sealed, Keys(KF))
    with parquet.open_plain(sealed.getvalue(), Keys(KF)) as view:
        assert pq.read_table(view) == TABLE
    parquet.decrypt_file(sealed.getvalue(), opened, Keys(KF))
    assert pq.read_table(io.BytesIO(opened.getvalue())) == TABLE
    if (of, number) not in WRITTEN:
        kept = [part[number] for part in parts(ref.ParquetFile(opened.getvalue()).footer, of)]
        assert [str(one) for one in kept] == [str(value)] * len(kept) != []
