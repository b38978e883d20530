"""Parquet files of writers that leave fields out or choose otherwise, and V2 pages in both layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_files import (
    FOUR,
    KF,
    PREFIX,
    RICH_LEAVES,
    UNIFORM,
    Mode,
    Pieces,
    data_of,
    reference,
    rich,
    seal,
    unseal,
    v2,
)
from parquet_peers import CTR, GCM

from ags_fast import IntegrityError, KeyAccessError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from collections.abc import Callable

pa, pq = peers.pa, peers.pq


def edited(edit: Callable[[ref.Struct, ref.Struct], None], source: Callable[[], bytes] = rich) -> bytes:
    """A plaintext file in which each chunk (ColumnChunk, ColumnMetaData) was edited."""

    def all_of(footer: ref.Struct) -> None:
        for group in footer[4].items:
            for chunk in group[1].items:
                edit(chunk, chunk[3])

    return files.with_footer(source(), all_of)


def understated(chunk: ref.Struct, meta: ref.Struct) -> None:
    """As old writers did: the dictionary's header is not counted."""
    if meta[11]:
        meta.set(7, ref.I64, meta[7] - 13)


def without_dictionary_place(chunk: ref.Struct, meta: ref.Struct) -> None:
    meta.set(9, ref.I64, meta[11] or meta[9])
    meta.remove(11)


def without_encodings(chunk: ref.Struct, meta: ref.Struct) -> None:
    meta.remove(13)
    meta.set(2, ref.LIST, ref.List(ref.I32, [0]))


INCOMPLETE: dict[str, Callable[[ref.Struct, ref.Struct], None]] = {
    "dictionary_page_offset": without_dictionary_place,
    "encoding_stats": lambda chunk, meta: meta.remove(13),
    "encodings too": without_encodings,
    "bloom_filter_length": lambda chunk, meta: meta.remove(15),
    "an understated size": understated,
    "file_offset": lambda chunk, meta: chunk.set(2, ref.I64, 0),
    "statistics": lambda chunk, meta: meta.remove(12, 16),
}


@pytest.mark.parametrize("what", INCOMPLETE)
@pytest.mark.parametrize("mode", [*FOUR, Mode(columns="partial")], ids=str)
def test_what_a_writer_left_out_is_put_in(what: str, mode: Mode) -> None:
    plain = edited(INCOMPLETE[what])
    sealed = seal(plain, mode)
    file = reference(sealed, mode, RICH_LEAVES)
    assert len(list(file.modules())) > 50
    assert file.complaints() == []
    back = unseal(sealed, mode, RICH_LEAVES)
    assert data_of(back) == data_of(plain)
    assert pq.read_table(pa.BufferReader(back)).equals(pq.read_table(pa.BufferReader(rich())))
    if mode.columns == "columns":
        decrypted = ref.ParquetFile(back)
        complete = ref.ParquetFile(rich())
        for one, two in zip(decrypted.chunks(), complete.chunks(), strict=True):
            assert (one.meta[9], one.meta[11]) == (two.meta[9], two.meta[11])
            assert (one.meta[6], one.meta[7]) == (two.meta[6], two.meta[7])
            assert one.meta[13] is None or sorted(map(repr, one.meta[13].items)) == sorted(
                map(repr, two.meta[13].items)
            )


def test_pages_of_an_index_that_nobody_writes() -> None:
    """index_page_offset goes with pages that stay as they are, and is dropped where they change."""

    def edit(chunk: ref.Struct, meta: ref.Struct) -> None:
        meta.set(10, ref.I64, meta[9])

    plain = edited(edit)
    mode = Mode(columns="partial")
    for chunk in reference(seal(plain, mode), mode, RICH_LEAVES).chunks():
        assert chunk.meta[10] == (None if chunk.key else chunk.meta[9])


def test_row_groups_get_their_ordinals() -> None:
    for ordinal in (None, 7):

        def edit(footer: ref.Struct, ordinal: int | None = ordinal) -> None:
            for group in footer[4].items:
                group.remove(5, 6, 7)
                if ordinal is not None:
                    group.set(7, ref.I16, ordinal)

        plain = files.with_footer(rich(), edit)
        for mode in FOUR:
            assert reference(seal(plain, mode), mode, RICH_LEAVES).complaints() == []


def test_a_wrong_crc_stays_wrong() -> None:
    """Encryption seals what is there, and says that it was damaged before."""
    pieces = Pieces(rich())
    header, _ = pieces.parts[0, 0].pages[1]
    header.set(4, ref.I32, header[4] ^ 1)
    plain = pieces.build()
    sealed = bytearray()
    report = parquet.encrypt_file(plain, sealed, UNIFORM.keys([]), threads=1)
    assert any("1 pages already had a wrong CRC" in warning for warning in report.warnings)
    assert data_of(unseal(sealed, UNIFORM, [])) == data_of(plain)
    with pytest.raises(IntegrityError) as caught:
        parquet.verify(sealed, UNIFORM.keys([]))
    assert (caught.value.module, caught.value.row_group, caught.value.column, caught.value.page) == (
        "data page", 0, "id", 1,
    )  # fmt: skip


def test_only_the_footer_is_encrypted(plain_files: dict[str, bytes]) -> None:
    """Every column stays plain."""
    for name in ("page index", "nested", "empty table", "no columns"):
        for footer in (False, True):
            sealed, back = bytearray(), bytearray()
            options: dict[str, Any] = {"other_columns": "plain", "plaintext_footer": footer}
            report = parquet.encrypt_file(plain_files[name], sealed, Keys(KF), **options)
            assert {row.key for row in report.columns} <= {"plain"}
            file = ref.ParquetFile(bytes(sealed), KF)
            assert [one.kind for one in file.modules() if one.sealed] == [ref.FOOTER]
            parquet.decrypt_file(sealed, back, Keys(KF))
            assert data_of(bytes(back)) == data_of(plain_files[name])


@pytest.mark.parametrize("unique", [b"u", bytes(range(200))])
def test_choices_of_other_writers(unique: bytes) -> None:
    """An aad_file_unique of any length, key metadata that is empty, no word on the prefix, zeros behind the footer."""
    plain, mode = rich(write_page_checksum=False), Mode(columns="columns", prefix="stored")
    file = reference(seal(plain, mode), mode, RICH_LEAVES)
    aad = PREFIX + unique
    keys: dict[Any, Any] = {(chunk.row_group, chunk.column): chunk.key for chunk in file.chunks()}
    data = bytearray(file.data[: file.tail])
    footer, _ = ref.parse(ref.serialise(file.footer))
    for module in list(file.modules())[1:]:
        assert module.row_group is not None
        assert module.column is not None
        place = module.row_group, module.column
        sealed = ref.seal(keys[place], module.plain, ref.module_aad(aad, module.kind, *place, module.page))
        if module.offset is None:
            footer[4].items[place[0]][1].items[place[1]].set(9, ref.BINARY, sealed)
        else:
            data[module.offset : module.offset + module.length] = sealed
    parameters = ref.Struct([[1, ref.BINARY, PREFIX], [2, ref.BINARY, unique]])
    algorithm = ref.Struct([[1, ref.STRUCT, parameters]])
    crypto = ref.serialise(ref.Struct([[1, ref.STRUCT, algorithm], [2, ref.BINARY, b""]]))
    tail = crypto + ref.seal(mode.footer, ref.serialise(footer) + bytes(100), ref.module_aad(aad, ref.FOOTER))
    other = bytes(data) + tail + len(tail).to_bytes(4, "little") + b"PARE"
    assert list(reference(other, mode, RICH_LEAVES).modules())

    found = parquet.inspect(other)
    assert found["footer_key_metadata"] is None
    assert found["aad_file_unique"] == unique.hex()
    assert data_of(unseal(other, mode, RICH_LEAVES)) == data_of(plain)
    parquet.verify(other, mode.keys(RICH_LEAVES), allow_ctr=mode.ctr)
    same, turned = bytearray(), Mode(columns="columns", prefix="stored", generation="second")
    new = turned.keys(RICH_LEAVES)
    parquet.reencrypt_file(other, same, mode.keys(RICH_LEAVES), new, same_size=True, allow_ctr=mode.ctr)
    assert reference(bytes(same), turned, RICH_LEAVES).aad == aad
    with pytest.raises(KeyAccessError, match="no key_metadata"):
        parquet.decrypt_file(other, bytearray(), {}.__getitem__)


# ---------------------------------------------------------------- V2 pages


@pytest.mark.parametrize("algorithm", [GCM, CTR])
@pytest.mark.parametrize("nulls", ["required", "some", "all", "nested"])
def test_both_layouts_of_v2_pages(nulls: str, algorithm: Any) -> None:
    plain = v2(nulls)
    leaves = files.leaves_of(plain)
    mode = Mode(algorithm, columns="columns")
    keys = mode.keys(leaves)
    made: dict[str, bytes] = {}
    for layout in ("arrow", "parquet-java"):
        out = bytearray()
        report = parquet.encrypt_file(plain, out, keys, v2_layout=layout, algorithm=algorithm, threads=1)
        made[layout] = bytes(out)
        said = " ".join(report.warnings)
        assert ("V2 pages have levels" in said) == (nulls != "required")
        if nulls != "required":
            readers = "parquet-java and Spark" if layout == "arrow" else "Arrow, polars"
            assert f"3 V2 pages have levels: {readers}" in said
            assert ("show in plain text" in said) == (layout == "parquet-java")
        file = reference(made[layout], mode, leaves)
        assert file.contents() == ref.ParquetFile(plain).contents()
        levels = [one.levels for one in file.modules() if one.kind == ref.DATA_PAGE]
        assert len(levels) == 3
        assert all(bool(one) == (layout != "arrow" and nulls != "required") for one in levels)
        assert data_of(unseal(made[layout], mode, leaves)) == data_of(plain)
        parquet.verify(made[layout], keys, allow_ctr=mode.ctr)
    # One turns into the other, and both keep what they are unless told.
    turns: Any = (("arrow", "parquet-java"), ("parquet-java", "arrow"), ("arrow", None), ("parquet-java", None))
    for layout, wanted in turns:
        out = bytearray()
        parquet.reencrypt_file(made[layout], out, keys, keys, v2_layout=wanted, threads=1, allow_ctr=mode.ctr)
        levels = [one.levels for one in reference(bytes(out), mode, leaves).modules() if one.kind == ref.DATA_PAGE]
        assert all(bool(one) == ((wanted or layout) != "arrow" and nulls != "required") for one in levels)
        assert data_of(unseal(out, mode, leaves)) == data_of(plain)
        same = bytearray()
        parquet.reencrypt_file(out, same, keys, keys, same_size=True, threads=1, allow_ctr=mode.ctr)
        back = unseal(same, mode, leaves)  # whose CRCs may have found no room
        assert len(same) == len(out)
        assert ref.ParquetFile(back).contents() == ref.ParquetFile(plain).contents()
