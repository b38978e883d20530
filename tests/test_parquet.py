"""encrypt_file, decrypt_file, reencrypt_file, inspect and verify, in every mode of the spec: nothing is lost, nothing
shows, what cannot be done is refused. Judged by a reader of its own, pme_reference.py.
"""

from __future__ import annotations

import io
import itertools
import os
from typing import TYPE_CHECKING, Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_files import (
    FOUR,
    MODES,
    PAIRWISE,
    PREFIX,
    RICH_LEAVES,
    UNIFORM,
    Mode,
    Pieces,
    data_of,
    in_every_mode,
    nonces,
    reference,
    rich,
    seal,
    unseal,
)
from parquet_peers import CTR, GCM

from ags_fast import FormatError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

pa, pq = peers.pa, peers.pq


def parquet_testing(shared_data: Path) -> dict[str, bytes]:
    folder = shared_data / "parquet-testing" / "data"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


# ---------------------------------------------------------------- nothing is lost


def test_the_pairwise_modes_are_a_dozen() -> None:
    dimensions = {
        "algorithm": (GCM, CTR),
        "plaintext_footer": (False, True),
        "columns": files.COLUMNS_OF_MODES,
        "prefix": files.PREFIXES_OF_MODES,
        "footer_size": (16, 24, 32),
    }
    pairs = set().union(*map(files.pairs_of, PAIRWISE))
    for (one, ones), (two, twos) in itertools.combinations(dimensions.items(), 2):
        assert {((one, a), (two, b)) for a in ones for b in twos} <= pairs
    assert len(PAIRWISE) == 12
    assert len(set(MODES)) == 48


@in_every_mode
def test_all_comes_back(plain_files: dict[str, bytes], mode: Mode) -> None:
    """Data byte by byte, and the footer but for the few fields of row groups that encryption needs."""
    for number, (name, plain) in enumerate(plain_files.items()):
        leaves, threads = files.leaves_of(plain), 1 + number % 2
        back = unseal(seal(plain, mode, leaves, threads=threads), mode, leaves, threads=threads)
        assert data_of(back) == data_of(plain), name
        assert files.footer_without_places(back) == files.footer_without_places(plain), name


def contents(file: bytes) -> dict[Any, bytes]:
    """All but what encryption may add or correct: places and sizes, and encoding_stats."""
    return ref.ParquetFile(file).contents(moved=(6, 7, 9, 10, 11, 13, 14, 15))


@pytest.mark.parametrize(
    "mode", [PAIRWISE[2], *(pytest.param(one, marks=pytest.mark.slow) for one in PAIRWISE[3:9])], ids=str
)
def test_parquet_testing_comes_back(shared_data: Path, mode: Mode) -> None:
    """Also old files, in which copies of metadata stand between the columns, and sizes are wrong."""
    for name, plain in parquet_testing(shared_data).items():
        leaves = files.leaves_of(plain)
        if name.startswith("overflow_i16"):
            with pytest.raises(FormatError, match="more than 32768 data pages"):
                seal(plain, mode, leaves)
            continue
        sealed = seal(plain, mode, leaves)
        back = unseal(sealed, mode, leaves, check_crc=False)
        if "corrupt-checksum" in name:  # not refused by encryption, and as it was
            assert data_of(back) == data_of(plain)
        elif len(plain) < 30_000:
            assert contents(back) == contents(plain), name
            found = reference(sealed, mode, leaves)
            assert list(found.modules()), name
            assert found.complaints() == [], name
            verified = parquet.verify(
                sealed, mode.keys(leaves), aad_prefix=mode.supplied, threads=1, allow_ctr=mode.ctr
            )
            assert all(one.authenticated == (mode.algorithm == GCM) for one in verified.columns if one.key != "plain")
        again = unseal(seal(back, mode, leaves), mode, leaves, check_crc=False)
        assert again == back, name  # once is enough


@pytest.mark.slow
def test_identical_footers_and_headers_of_parquet_testing(shared_data: Path) -> None:
    """What this file relies on: the reference's thrift is lossless over them."""
    for plain in parquet_testing(shared_data).values():
        file = ref.ParquetFile(plain)
        assert file.with_footer() == plain


def inject(where: ref.Struct, number: int = 9000) -> None:
    """Fields that no version of the format has, of several types."""
    inner = ref.Struct([[1, ref.BINARY, b"inner"], [2, ref.LIST, ref.List(ref.I32, list(range(20)))]])
    where.set(number, ref.STRUCT, inner)
    where.set(number + 1, ref.BINARY, CANARY)
    where.set(number + 2, ref.LIST, ref.List(ref.TRUE, [1, 2, 2]))
    where.set(number + 3, ref.DOUBLE, bytes(range(8)))
    where.set(number + 4, ref.MAP, ref.Map(ref.BINARY, ref.I64, [(b"k", -1)]))
    where.set(number + 5, ref.TRUE, True)


CANARY = b"a canary that nobody knows"


def strange(where: str = "all") -> bytes:
    """A file with fields from the future, at all levels."""
    pieces = Pieces(rich())
    if where == "all":
        inject(pieces.footer)
        for element in pieces.footer[2].items:
            inject(element)
        pieces.footer.set(6, ref.BINARY, b"written by the tests")
        pieces.footer[4].items[0].set(4, ref.LIST, ref.List(ref.STRUCT, [sorting(2, True), sorting(0, False)]))
        for group in pieces.footer[4].items:
            inject(group)
        for (row_group, column), part in pieces.parts.items():
            inject(pieces.chunk(row_group, column))
            for header, _ in part.pages:
                inject(header)
                inject(next(header[number] for number in (5, 7) if header[number]))
            for index in part.indexes.values():
                inject(index)
                for location in index[1].items if index[1] and index[1].element == ref.STRUCT else []:
                    inject(location)
            if part.bloom:
                inject(part.bloom[0])
    for row_group, column in pieces.parts:
        meta = pieces.meta(row_group, column)
        inject(meta)
        inject(meta[12])
        pair = ref.Struct([[1, ref.BINARY, b"key " + CANARY], [2, ref.BINARY, CANARY]])
        meta.set(8, ref.LIST, ref.List(ref.STRUCT, [pair]))
        meta.set(17, ref.STRUCT, ref.Struct([[1, ref.STRUCT, ref.Struct([[1, ref.DOUBLE, CANARY[:8]]])]]))
    return pieces.build()


def sorting(column: int, descending: bool) -> ref.Struct:
    return ref.Struct([[1, ref.I32, column], [2, ref.TRUE, descending], [3, ref.TRUE, False]])


@pytest.mark.parametrize("mode", [*FOUR, Mode(columns="partial"), Mode(CTR, True, "groups")], ids=str)
def test_what_this_version_does_not_know_survives(mode: Mode) -> None:
    plain = strange()
    assert plain.count(CANARY) > 60
    sealed = seal(plain, mode)
    back = unseal(sealed, mode, RICH_LEAVES)
    assert data_of(back) == data_of(plain)
    assert files.footer_without_places(back) == files.footer_without_places(plain)
    with parquet.open_plain(sealed, mode.keys(RICH_LEAVES), aad_prefix=mode.supplied, allow_ctr=mode.ctr) as view:
        assert shown_fields(view.read()) == shown_fields(plain)
    # A signed footer must not show the column chunks' fields: they are in the sealed metadata, in a field of their own.
    seen = ref.ParquetFile(plain)
    for group in seen.footer[4].items if mode.plaintext_footer else ():
        for chunk in group[1].items:
            chunk.remove(*range(9000, 9006))
    moved = (6, 7, 9, 10, 11, 14, 15, 32767)
    file = reference(sealed, mode, RICH_LEAVES)
    assert file.contents(moved) == ref.ParquetFile(seen.with_footer()).contents(moved)
    kept = [chunk.meta[32767] for chunk in file.chunks()]
    assert all(value.count(CANARY) == 1 for value in kept) if mode.plaintext_footer else not any(kept)

    turned = Mode(mode.algorithm, not mode.plaintext_footer, mode.columns, "stored", 24, "second")
    out = bytearray()
    parquet.reencrypt_file(
        sealed,
        out,
        mode.keys(RICH_LEAVES),
        turned.keys(RICH_LEAVES),
        plaintext_footer=turned.plaintext_footer,
        new_aad_prefix=PREFIX,
        other_columns=turned.options["other_columns"],
        threads=1,
        allow_ctr=mode.ctr,
    )
    again = unseal(bytes(out), turned, RICH_LEAVES)
    assert data_of(again) == data_of(plain)
    assert files.footer_without_places(again) == files.footer_without_places(plain)

    # They pass through where nothing moves, and where a column is left out.
    same, keys = bytearray(), Mode(columns=mode.columns, generation="third").keys(RICH_LEAVES)
    known: dict[str, Any] = {"aad_prefix": mode.supplied, "allow_ctr": mode.ctr}
    parquet.reencrypt_file(sealed, same, mode.keys(RICH_LEAVES), keys, same_size=True, threads=1, **known)
    out.clear()
    parquet.decrypt_file(same, out, keys, threads=1, **known)
    assert shown_fields(bytes(out)) == shown_fields(plain)
    if mode.columns == "columns":
        fewer = Keys(
            mode.footer, {path: value for path, value in mode.leaf_keys(RICH_LEAVES).items() if path == ("id",)}
        )
        parquet.decrypt_file(sealed, out, fewer, missing="drop", **known)
        with parquet.open_plain(sealed, fewer, missing="hide", **known) as view:
            for data in (bytes(out), view.read()):
                shown = shown_fields(data)
                assert shown == {
                    place: fields for place, fields in shown_fields(plain).items() if place[1] != "list.list.element"
                }


def shown_fields(plain: bytes) -> dict[tuple[int, str], list[bytes]]:
    """The unknown fields of each column chunk."""
    return {
        (chunk.row_group, ".".join(chunk.path)): [
            ref.serialise(ref.Struct([field])) for field in chunk.chunk.fields if field[0] > 9
        ]
        for chunk in ref.ParquetFile(plain).chunks()
    }


# ---------------------------------------------------------------- the reference opens what we write


def check_modules(file: ref.ParquetFile, plain: bytes) -> None:
    """All modules of the plaintext file open with their own AAD, and leave no byte of the sealed one over."""
    modules = list(file.modules())
    before = list(ref.ParquetFile(plain).modules())
    assert [one.at for one in modules if one.kind != ref.COLUMN_META] == [one.at for one in before]
    spans = sorted((one.begin, one.begin + one.length) for one in modules if one.offset is not None)
    begins, ends = zip(*spans, strict=True)
    parts = len(spans) - 1  # the last one is the footer, before which its FileCryptoMetaData stands
    assert (4, *ends[:parts]) == (*begins[:parts], file.tail)
    assert ends[parts] == len(file.data) - 8
    assert file.complaints() == []
    assert file.contents() == ref.ParquetFile(plain).contents()


def check_keys(file: ref.ParquetFile, mode: Mode) -> None:
    """The fields that readers find keys and prefix by are right."""
    wanted = mode.leaf_keys(file.leaves)
    for chunk in file.chunks():
        if mode.columns == "partial" and chunk.path not in mode.by_column(file.leaves):
            assert chunk.key is None
        elif chunk.path in wanted:
            assert chunk.key == wanted[chunk.path]
            assert not chunk.footer_key
            assert chunk.key_metadata
            assert chunk.key_metadata.startswith(b"of ")
        else:
            assert chunk.footer_key
            assert chunk.key == mode.footer
        separate = chunk.key is not None and (mode.plaintext_footer or not chunk.footer_key)
        assert (chunk.chunk[9] is not None) == separate
        assert chunk.chunk[2] == 0
    assert file.footer_key_metadata == b"of the footer"
    assert len(file.aad_unique) == 8
    assert file.aad_prefix == mode.aad_prefix
    union = (file.crypto or file.footer)[1 if file.crypto else 8]
    parameters = union.fields[0][2]
    assert parameters[1] == (PREFIX if mode.prefix == "stored" else None)
    assert bool(parameters[3]) == (mode.prefix == "supplied")


def test_every_module_is_there_once(plain_files: dict[str, bytes]) -> None:
    """Of every file of the corpus, and in every mode; no nonce and no file's unique bytes come twice."""
    seen: set[bytes] = set()
    total = 0
    few = [plain for name, plain in plain_files.items() if "pages" not in name]
    pairs = [(plain, PAIRWISE[i % len(PAIRWISE)]) for i, plain in enumerate(few)]
    pairs += [(rich(), mode) for mode in MODES]
    for plain, mode in pairs:
        leaves = files.leaves_of(plain)
        file = reference(seal(plain, mode, leaves), mode, leaves)
        check_modules(file, plain)
        check_keys(file, mode)
        drawn = nonces(file)
        assert len(set(drawn)) == len(drawn)
        assert not seen & set(drawn)
        seen |= set(drawn) | {file.aad_unique}
        total += len(drawn)
    assert total > 5000
    assert len(seen) == total + len(pairs)


def test_indexes_before_data_and_gaps(plain_files: dict[str, bytes]) -> None:
    for order, mode in zip(("cobp", "bpco", "pocb", "opbc", "cobp"), (*FOUR, Mode(columns="partial")), strict=True):
        plain = Pieces(rich()).build(order=order, gap=bytes(40) if order != "pocb" else b"")
        for threads in (1, 2):
            sealed = seal(plain, mode, threads=threads)
            file = reference(sealed, mode, RICH_LEAVES)
            assert file.contents() == ref.ParquetFile(plain).contents()
            assert file.complaints() == []
            back = unseal(sealed, mode, RICH_LEAVES, threads=threads)
            assert ref.ParquetFile(back).contents() == ref.ParquetFile(plain).contents()
            assert list(ref.ParquetFile(back).modules())
            parquet.verify(sealed, mode.keys(RICH_LEAVES), allow_ctr=mode.ctr)


# ---------------------------------------------------------------- nothing shows


@pytest.mark.parametrize("algorithm", [GCM, CTR])
@pytest.mark.parametrize("columns", ["uniform", "columns", "partial", "groups"])
def test_a_plaintext_footer_shows_nothing_of_values(algorithm: str, columns: str) -> None:
    """Each value, and every field that is computed from values or that nobody knows, is a canary."""
    plain = canaries()
    mode = Mode(algorithm, True, columns)
    leaves = files.leaves_of(plain)
    sealed = seal(plain, mode, leaves)
    encrypted = {chunk.path for chunk in reference(sealed, mode, leaves).chunks() if chunk.key}
    assert encrypted
    assert (encrypted == set(leaves)) == (columns != "partial")
    for leaf in leaves:
        mark = f"canary of {leaf[0]}".encode()
        assert plain.count(mark) > 20
        assert (sealed.count(mark) == 0) == (leaf in encrypted), leaf
    footer = ref.ParquetFile(sealed).footer
    for group in footer[4].items:
        for leaf, chunk in zip(leaves, group[1].items, strict=True):
            if leaf in encrypted:
                assert {number for number, _, _ in chunk[3].fields} <= {1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 15}
    # and with an encrypted footer, nothing at all
    hidden = seal(plain, Mode(algorithm, False, columns), leaves)
    for leaf in encrypted:
        assert f"canary of {leaf[0]}".encode() not in hidden
    if columns != "partial":
        assert b"canary" not in hidden
        assert b"written" not in hidden
        assert b"parquet-cpp" not in hidden


def canaries() -> bytes:
    table = pa.table({name: [f"canary of {name} {i:03}" for i in range(20)] for name in ("a", "b", "c")})
    sink = io.BytesIO()
    options: dict[str, Any] = {
        "compression": "none",
        "write_page_index": True,
        "row_group_size": 10,
        "max_rows_per_page": 5,
    }
    pq.write_table(table, sink, use_dictionary=["a"], **options)
    pieces = Pieces(sink.getvalue())
    for row_group, column in pieces.parts:
        mark = f"canary of {'abc'[column]}".encode()
        for struct in (pieces.chunk(row_group, column), pieces.meta(row_group, column)):
            struct.set(9000, ref.BINARY, mark)
        meta = pieces.meta(row_group, column)
        pair = ref.Struct([[1, ref.BINARY, mark], [2, ref.BINARY, mark]])
        meta.set(8, ref.LIST, ref.List(ref.STRUCT, [pair]))
        sizes = ref.Struct([[1, ref.I64, 7], [9000, ref.BINARY, mark]])
        meta.set(16, ref.STRUCT, sizes)
        meta.set(17, ref.STRUCT, ref.Struct([[9000, ref.BINARY, mark]]))
    return pieces.build()


def test_what_decrypts_is_private(tmp_path: Path) -> None:
    plain = rich()
    previous = os.umask(0o022)
    try:
        files.write(tmp_path / "sealed", seal(plain, UNIFORM))
        modes: list[int] = []

        def progress(nbytes: int) -> None:
            modes.extend(path.stat().st_mode & 0o777 for path in tmp_path.glob(".*.agstmp"))

        parquet.decrypt_file(tmp_path / "sealed", tmp_path / "plain", UNIFORM.keys([]), progress=progress)
    finally:
        os.umask(previous)
    assert modes
    assert set(modes) == {0o600}
    assert sorted(os.listdir(tmp_path)) == ["plain", "sealed"]
