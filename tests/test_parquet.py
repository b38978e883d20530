"""encrypt_file, decrypt_file, reencrypt_file, inspect and verify, in every mode of the spec: nothing is lost, nothing
shows, what cannot be done is refused. Judged by a reader of its own, pme_reference.py.
"""

from __future__ import annotations

import io
import json
import os
import threading
import zlib
from typing import TYPE_CHECKING, Any

import fsspec
import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from cryptography.exceptions import InvalidTag
from parquet_corpus import CORPUS
from parquet_files import FOUR, KF, MODES, PREFIX, RICH_LEAVES, Mode, Pieces, key, reference, rich, seal, unseal
from parquet_peers import CTR, GCM
from support import Source, Target, run_python

from ags_fast import AgsError, FormatError, IntegrityError, KeyAccessError, KeyLimitError, PolicyError, parquet
from ags_fast._core import Key
from ags_fast.parquet import Keys, keytools

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pa, pq = peers.pa, peers.pq
UNIFORM, COLUMNS = Mode(), Mode(columns="columns")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("corpus")
    for name, make in CORPUS.items():
        make(folder / name)
    return {name: (folder / name).read_bytes() for name in CORPUS}


def parquet_testing(shared_data: Path) -> dict[str, bytes]:
    folder = shared_data / "parquet-testing" / "data"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


def data_of(file: bytes) -> bytes:
    """All before the footer but the magic."""
    return file[4 : len(file) - 8 - int.from_bytes(file[-8:-4], "little")]


# ---------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_comes_back(corpus: dict[str, bytes], mode: Mode) -> None:
    """Data byte by byte, and the footer but for the few fields of row groups that encryption needs."""
    for name, plain in corpus.items():
        leaves = files.leaves_of(plain)
        for threads in (1, 2) if mode in FOUR else (1,):
            back = unseal(seal(plain, mode, leaves, threads=threads), mode, leaves, threads=threads)
            assert data_of(back) == data_of(plain), name
            assert files.footer_without_places(back) == files.footer_without_places(plain), name


def contents(file: bytes) -> dict[Any, bytes]:
    """All but what encryption may add or correct: places and sizes, and encoding_stats."""
    return ref.ParquetFile(file).contents(moved=(6, 7, 9, 10, 11, 13, 14, 15))


@pytest.mark.parametrize(
    "mode", [MODES[5], *(pytest.param(one, marks=pytest.mark.slow) for one in (MODES[0], *MODES[7::9]))], ids=str
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


def nonces(file: ref.ParquetFile) -> list[bytes]:
    found = []
    for module in file.modules():
        if module.sealed:
            stored = file.stored(module)
            if module.kind != ref.FOOTER or file.magic == b"PARE":
                found.append(stored[module.levels + 4 : module.levels + 16])
            else:
                found.append(stored[-28:-16])
    return found


def test_every_module_is_there_once(corpus: dict[str, bytes]) -> None:
    """Every file of the corpus, every mode: all modules open with their own AAD, they leave no byte of the file over,
    and the fields that readers go by are right.
    """
    seen: set[bytes] = set()
    total = 0
    few = [plain for name, plain in corpus.items() if "pages" not in name]
    pairs = [(plain, MODES[(7 * i) % len(MODES)]) for i, plain in enumerate(few)]
    pairs += [(rich(), mode) for mode in MODES]
    for plain, mode in pairs:
        leaves = files.leaves_of(plain)
        sealed = seal(plain, mode, leaves)
        file = reference(sealed, mode, leaves)
        modules = list(file.modules())
        before = list(ref.ParquetFile(plain).modules())
        assert [one.at for one in modules if one.kind != ref.COLUMN_META] == [one.at for one in before]
        spans = sorted((one.offset, one.offset + one.length) for one in modules if one.offset is not None)
        begins, ends = zip(*spans, strict=True)
        parts = len(spans) - 1  # the last one is the footer, before which its FileCryptoMetaData stands
        assert (4, *ends[:parts]) == (*begins[:parts], file.tail)
        assert ends[parts] == len(sealed) - 8
        assert file.complaints() == [], str(mode)
        assert file.contents() == ref.ParquetFile(plain).contents(), str(mode)

        wanted = mode.leaf_keys(leaves)
        for chunk in file.chunks():
            if mode.columns == "partial" and chunk.path not in mode.by_column(leaves):
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

        drawn = nonces(file)
        assert len(set(drawn)) == len(drawn)
        assert not seen & set(drawn)
        seen |= set(drawn) | {file.aad_unique}
        total += len(drawn)
    assert total > 5000
    assert len(seen) == total + len(pairs)


def test_the_key_counts_every_module() -> None:
    """Also the bodies of pages under CTR, of which the spec allows 2^31 with their headers."""
    plain = rich()
    for mode in (Mode(algorithm, footer, generation=f"count{footer}{algorithm}") for algorithm in (GCM, CTR) for footer in (0, 1)):  # fmt: skip  # noqa: E501
        held = Key(mode.footer)
        before = held.sealed
        sealed = seal(plain, mode)
        modules = [one for one in reference(sealed, mode, RICH_LEAVES).modules() if one.sealed]
        assert held.sealed - before == len(modules)


def test_indexes_before_data_and_gaps(corpus: dict[str, bytes]) -> None:
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
        modes = []

        def progress(nbytes: int) -> None:
            modes.extend(path.stat().st_mode & 0o777 for path in tmp_path.glob(".*.agstmp"))

        parquet.decrypt_file(tmp_path / "sealed", tmp_path / "plain", UNIFORM.keys([]), progress=progress)
    finally:
        os.umask(previous)
    assert modes
    assert set(modes) == {0o600}
    assert sorted(os.listdir(tmp_path)) == ["plain", "sealed"]


# ---------------------------------------------------------------- policies


def refused(error: type[Exception], match: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    out = bytearray()
    with pytest.raises(error, match=match):
        call(args[0], out, *args[1:], **kwargs)
    assert out == b""


# ---------------------------------------------------------------- without the footer key


SIGNED = Mode(plaintext_footer=True, columns="columns")


def holder(*columns: str) -> Keys:
    """Somebody's who has these columns' keys only."""
    return Keys(None, {column: SIGNED.leaf_keys(RICH_LEAVES)[column,] for column in columns})


def test_a_column_without_the_footer_key() -> None:
    plain = rich()
    sealed, table = seal(plain, SIGNED), pq.read_table(pa.BufferReader(plain))
    keys = holder("id")
    report = parquet.verify(sealed, keys, missing="skip")
    assert (report.footer, report.footer_verified) == ("signed", False)
    assert any("signature was not verified" in warning for warning in report.warnings)
    assert [(row.path, row.key, row.authenticated) for row in report.columns] == [
        ("id", "column", True),
        ("word", "missing", False),
        ("list.list.element", "missing", False),
        ("open", "missing", False),
    ]
    back = bytearray()
    report = parquet.decrypt_file(sealed, back, keys, missing="drop")
    assert not report.footer_verified
    assert any("signature was not verified" in one for one in report.warnings)
    assert pq.read_table(pa.BufferReader(back), page_checksum_verification=True) == table.select(["id"])
    with parquet.open_plain(sealed, keys, missing="hide") as view:
        assert not view.footer_verified
        assert view.columns == ["id"]
        assert pq.read_table(view) == table.select(["id"])
    both = parquet.verify(sealed, SIGNED.keys(RICH_LEAVES))
    assert both.footer_verified
    assert both.warnings == []

    # Where all that is sealed has a key, nothing is missing; columns in plain text are shown.
    partial = Mode(plaintext_footer=True, columns="partial")
    sealed = seal(plain, partial)
    columns = {path: value for path, value in partial.leaf_keys(RICH_LEAVES).items() if value}
    held = {path: value for path, value in columns.items() if path != ("word",)}
    with parquet.open_plain(sealed, Keys(None, held), missing="hide") as view:
        assert pq.read_table(view) == table.select(["id", "list", "open"])


def test_what_needs_the_footer_key() -> None:
    keys, full, plain = holder("id"), SIGNED.keys(RICH_LEAVES), rich()
    sealed = seal(plain, SIGNED)
    for call in (
        lambda: parquet.verify(sealed, keys),
        lambda: parquet.open_plain(sealed, keys),
        lambda: parquet.decrypt_file(sealed, bytearray(), keys),
    ):
        with pytest.raises(KeyAccessError, match="'word' is needed and not given: it is the footer key"):
            call()
    for same_size in (False, True):
        refused(
            KeyAccessError,
            "old footer key.*was not verified",
            parquet.reencrypt_file,
            sealed,
            keys,
            full,
            same_size=same_size,
        )
        refused(ValueError, "footer key is required", parquet.reencrypt_file, sealed, full, keys, same_size=same_size)
    refused(ValueError, "footer key is required", parquet.encrypt_file, plain, keys)
    with pytest.raises(ValueError, match="footer key is required"):
        parquet.write_table(pq.read_table(pa.BufferReader(plain)), bytearray(), keys)
    with pytest.raises(KeyAccessError, match=r"of the footer; without the footer key, Keys\(None, "):
        parquet.verify(sealed, {}.__getitem__)
    encrypted = seal(plain, COLUMNS)
    for call in (
        lambda: parquet.verify(encrypted, Keys(None, {"id": key("x")}), missing="skip"),
        lambda: parquet.open_plain(encrypted, Keys(None, {"id": key("x")}), missing="hide"),
    ):
        with pytest.raises(KeyAccessError, match="footer is encrypted"):
            call()
    for wrong in (
        lambda: Keys(None),
        lambda: Keys(None, {"a": parquet.FOOTER_KEY}),
        lambda: Keys(None, {"a": key("a")}, footer_metadata=b"kf"),
    ):
        with pytest.raises(ValueError, match="without a footer key"):
            wrong()
    assert "no footer" in repr(keys)


def test_a_footer_that_is_not_verified_cannot_lie_about_a_column() -> None:
    """What it says of a column that is read must be what the column's key has sealed."""
    same = {"id": key("1"), "word": key("1")}
    out = bytearray()
    parquet.encrypt_file(rich(), out, Keys(KF, {**same, "open": key("2")}), plaintext_footer=True, threads=1)
    sealed, keys = bytes(out), Keys(None, same)

    def read(data: bytes) -> None:
        for call in (
            lambda: parquet.verify(data, keys, missing="skip"),
            lambda: parquet.decrypt_file(data, bytearray(), keys, missing="drop"),
            lambda: parquet.open_plain(data, keys, missing="hide").read(),
        ):
            call()

    def changed(edit: Callable[[Any], None]) -> bytes:
        file = ref.ParquetFile(sealed, KF, {**{(name,): value for name, value in same.items()}, ("open",): key("2")})
        edit(file.footer)
        return ended(file.data[: file.tail] + ref.serialise(file.footer) + bytes(28), file.tail)

    read(changed(lambda footer: None))

    def plain_column(footer: Any) -> None:
        footer[4].items[0][1].items[0].remove(8, 9)

    def another_name(footer: Any) -> None:
        for element in footer[2].items:
            if element[4] == b"id":
                element.set(4, ref.BINARY, b"word")
            elif element[4] == b"word":
                element.set(4, ref.BINARY, b"id")

    def swapped(footer: Any) -> None:
        groups = footer[4].items
        groups[0], groups[1] = groups[1], groups[0]

    def twice(footer: Any) -> None:
        footer[4].items[1] = footer[4].items[0]

    def unsealed(footer: Any) -> None:
        footer[4].items[0][1].items[0].remove(9)

    def ctr(footer: Any) -> None:
        footer[8].fields[0][0] = 2

    def another_unique(footer: Any) -> None:
        footer[8].fields[0][2].set(2, ref.BINARY, b"12345678")

    for edit, errors in (
        (plain_column, PolicyError),
        (another_name, IntegrityError),
        (swapped, IntegrityError),
        (twice, IntegrityError),
        (unsealed, IntegrityError),
        (ctr, PolicyError),
        (another_unique, IntegrityError),
    ):
        with pytest.raises(errors):
            read(changed(edit))
            raise AssertionError(edit.__name__)


READERS: dict[str, Callable[..., Any]] = {
    "decrypt_file": lambda src, keys, **options: parquet.decrypt_file(src, bytearray(), keys, **options),
    "reencrypt_file": lambda src, keys, **options: parquet.reencrypt_file(src, bytearray(), keys, keys, **options),
    "the same, same_size": lambda src, keys, **options: parquet.reencrypt_file(
        src, bytearray(), keys, keys, same_size=True, **options
    ),
    "verify": parquet.verify,
    "open_plain": lambda src, keys, **options: parquet.open_plain(src, keys, **options).read(),
    "filesystem": lambda src, keys, **options: read_by_filesystem(src, keys, **options),
}


def read_by_filesystem(src: bytes, keys: Keys, **options: Any) -> bytes:
    memory = fsspec.filesystem("memory", skip_instance_cache=True)
    memory.pipe_file("/file.parquet", src)
    with parquet.filesystem(keys, fs=memory, **options).open("/file.parquet") as file:
        return bytes(file.read())


def without_tags(sealed: bytes, footer: bytes) -> bytes:
    """The file, whose footer is encrypted, as one that claims CTR: one byte is another."""
    at = sealed.index(b"\x1c\x1c", ref.ParquetFile(sealed, footer).tail)  # FileCryptoMetaData, its union
    return sealed[: at + 1] + b"\x2c" + sealed[at + 2 :]


def with_crc(data: bytes, crc: int) -> bytes:
    """The bytes with others in place of the last four, so that their CRC-32 is as given: it is linear."""
    base = zlib.crc32(data[:-4] + bytes(4))
    rows = [(zlib.crc32(data[:-4] + (1 << bit).to_bytes(4, "little")) ^ base, 1 << bit) for bit in range(32)]
    wanted, chosen = crc ^ base, 0
    for bit in range(32):
        pivot = next(i for i, (image, _) in enumerate(rows) if image >> bit & 1)
        image, vector = rows.pop(pivot)
        rows = [(i ^ image, v ^ vector) if i >> bit & 1 else (i, v) for i, v in rows]
        if wanted >> bit & 1:
            wanted, chosen = wanted ^ image, chosen ^ vector
    return data[:-4] + chosen.to_bytes(4, "little")


def forged_salaries() -> tuple[bytes, Keys, Any]:
    """A file under AES_GCM_V1 whose pages somebody without a key has changed, who knows what was in them; and what it
    reads as. Its CRCs fit.
    """
    salaries = pa.array(range(5000, 5200), pa.int64())
    table = pa.table([salaries], pa.schema([pa.field("salary", pa.int64(), nullable=False)]))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_page_checksum=True)
    keys = Keys(KF)
    sealed = bytearray()
    parquet.encrypt_file(sink.getvalue(), sealed, keys, threads=1)
    data = bytearray(without_tags(bytes(sealed), KF))
    # From here on without a key.
    [body] = [module for module in ref.ParquetFile(bytes(sealed), KF).modules() if module.kind == ref.DATA_PAGE]
    begin, end = body.offset + 16, body.offset + body.length  # behind length and nonce
    known = b"".join(value.to_bytes(8, "little") for value in range(5000, 5200))
    wanted = b"".join(value.to_bytes(8, "little") for value in range(905000, 905200))
    stream = bytes(a ^ b for a, b in zip(sealed[begin:end], known, strict=False))  # of GCM's counter, from 2 on
    # CTR begins with the counter 1: the first 16 bytes cannot be chosen, and 16 at the end are free.
    data[begin + 16 : begin + len(wanted)] = bytes(a ^ b for a, b in zip(stream, wanted[16:], strict=False))
    data[body.offset : end] = with_crc(bytes(data[body.offset : end]), zlib.crc32(sealed[body.offset : end]))
    return bytes(data), keys, pa.array(range(905002, 905200), pa.int64())


@pytest.mark.parametrize("reader", READERS)
def test_the_tags_of_pages_cannot_be_taken_away(reader: str) -> None:
    """Beside an encrypted footer no tag covers the algorithm's name: one byte takes the tags from all pages."""
    forged, keys, wanted = forged_salaries()
    assert parquet.inspect(forged)["algorithm"] == CTR
    with pytest.raises(PolicyError, match=r"claims AES_GCM_CTR_V1.*no tag.*allow_ctr=True") as caught:
        READERS[reader](forged, keys)
    assert "--allow-ctr" in str(caught.value)
    # Nothing else is in the way: who allows it gets what the forger wants.
    READERS[reader](forged, keys, allow_ctr=True)
    if reader == "reencrypt_file":
        sealed = bytearray()
        parquet.reencrypt_file(forged, sealed, keys, keys, allow_ctr=True, algorithm=GCM)
        assert parquet.verify(sealed, keys).columns[0].authenticated
        table = pq.read_table(parquet.open_plain(sealed, keys), page_checksum_verification=True)
        assert table["salary"].combine_chunks()[2:].equals(wanted)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("footer", [False, True])
def test_ctr_is_read_where_it_is_allowed(reader: str, footer: bool) -> None:
    """Whatever the footer."""
    mode = Mode(CTR, footer, "columns")
    sealed, keys = seal(rich(), mode), mode.keys(RICH_LEAVES)
    with pytest.raises(PolicyError, match="allow_ctr=True"):
        READERS[reader](sealed, keys)
    READERS[reader](sealed, keys, allow_ctr=True)
    READERS[reader](seal(rich(), Mode(GCM, footer, "columns")), keys)


def test_downgrades_are_refused() -> None:
    plain, leaves = rich(), RICH_LEAVES
    keys = COLUMNS.keys(leaves)
    for call in (parquet.decrypt_file, lambda src, out, keys: parquet.reencrypt_file(src, out, keys, keys)):
        refused(PolicyError, "not encrypted", call, plain, keys)
    with pytest.raises(PolicyError, match="not encrypted"):
        parquet.verify(plain, keys)

    mode = Mode(plaintext_footer=True, columns="columns")
    file = reference(seal(plain, mode), mode, leaves)
    stripped = ref.parse(ref.serialise(file.footer))[0]
    stripped.remove(8, 9)
    without_signature = serialised(file, stripped)
    refused(PolicyError, "signature was removed", parquet.decrypt_file, without_signature, mode.keys(leaves))
    refused(PolicyError, "signature was removed", parquet.encrypt_file, without_signature, mode.keys(leaves))
    unsigned = serialised(file, file.footer)
    refused(IntegrityError, "signature", parquet.decrypt_file, unsigned, mode.keys(leaves))
    # a column that is said to be open, all else as it was: only the signature tells
    opened = ref.parse(ref.serialise(file.footer))[0]
    opened[4].items[0][1].items[0].remove(8, 9)
    tail = file.data[-36:-8]
    lying = file.data[: file.tail] + ref.serialise(opened) + tail
    refused(IntegrityError, "signature", parquet.decrypt_file, ended(lying, file.tail), mode.keys(leaves))


def serialised(file: ref.ParquetFile, footer: ref.Struct) -> bytes:
    """The file with a footer that is neither sealed nor signed."""
    return ended(file.data[: file.tail] + ref.serialise(footer), file.tail)


def ended(data: bytes, tail: int) -> bytes:
    return data + (len(data) - tail).to_bytes(4, "little") + b"PAR1"


def test_what_is_encrypted_is_not_encrypted_again() -> None:
    for mode in FOUR:
        sealed = seal(rich(), mode)
        refused(PolicyError, "encrypted already.*reencrypt_file", parquet.encrypt_file, sealed, UNIFORM.keys([]))


@pytest.mark.parametrize("footer", [False, True])
def test_prefixes(footer: bool) -> None:
    plain = rich()
    none, stored, supplied = (Mode(GCM, footer, "uniform", prefix) for prefix in (None, "stored", "supplied"))
    for mode, given, error, match in (
        (none, b"x", PolicyError, "the file has no AAD prefix"),
        (stored, b"x", PolicyError, "AAD prefix is not aad_prefix"),
        (supplied, None, PolicyError, "pass aad_prefix"),
        (supplied, b"x", IntegrityError, "footer"),
        (supplied, b"", PolicyError, "pass aad_prefix"),
    ):
        sealed, keys = seal(plain, mode), mode.keys([])
        refused(error, match, parquet.decrypt_file, sealed, keys, aad_prefix=given)
        refused(error, match, parquet.reencrypt_file, sealed, keys, keys, aad_prefix=given)
        with pytest.raises(error, match=match):
            parquet.verify(sealed, keys, aad_prefix=given)
    assert unseal(seal(plain, stored), stored, [], aad_prefix=PREFIX) == unseal(seal(plain, none), none, [])

    called: list[bytes] = []
    for mode in (none, stored, supplied):
        sealed = seal(plain, mode)
        unseal(sealed, mode, [], aad_prefix_verifier=called.append)
        parquet.verify(
            sealed, mode.keys([]), aad_prefix=mode.supplied, aad_prefix_verifier=called.append, allow_ctr=mode.ctr
        )
    assert called == [b"", b"", *[PREFIX] * 4]

    def wrong(prefix: bytes) -> None:
        raise LookupError(f"not {prefix!r}")

    refused(LookupError, "not b'ware", parquet.decrypt_file, seal(plain, stored), stored.keys([]), aad_prefix_verifier=wrong)  # fmt: skip  # noqa: E501


def test_keys_that_are_none() -> None:
    for size in (0, 1, 15, 17, 20, 31, 33, 64):
        with pytest.raises(ValueError, match="16, 24 or 32 bytes"):
            Keys(bytes(size))
        with pytest.raises(ValueError, match=r"key of 'a'.*16, 24 or 32 bytes"):
            Keys(KF, {"a": bytes(size)})
    for size in (16, 24, 32):
        with pytest.raises(ValueError, match="all zeros"):
            Keys(bytes(size))
        with pytest.raises(ValueError, match=r"key of 'a\.b' is all zeros"):
            Keys(KF, {("a", "b"): bytes(size)})
    with pytest.raises(ValueError, match="column_metadata names 'b'"):
        Keys(KF, {"a": KF}, column_metadata={"b": b"x"})
    refused(ValueError, "all zeros", parquet.decrypt_file, seal(rich(), UNIFORM), lambda metadata: bytes(16))
    keys = COLUMNS.keys(RICH_LEAVES)
    for secret in (COLUMNS.footer, *COLUMNS.leaf_keys(RICH_LEAVES).values()):
        assert repr(secret)[2:-1] not in repr(keys)
        assert secret.hex() not in repr(keys)
    with pytest.raises(TypeError, match="never pickled"):
        import pickle

        pickle.dumps(keys)


def test_misspelt_columns() -> None:
    plain = rich()
    for name in ("Id", "list.element", ("id", "x"), "id.", ("list.list.element",)):
        for mode in FOUR:
            refused(
                ValueError, "has no column", parquet.encrypt_file, plain, Keys(KF, {name: key("x")}), **mode.options
            )
    for name in ("list", "list.list", ("list", "list", "element"), "list.list.element"):
        sealed = bytearray()
        parquet.encrypt_file(plain, sealed, Keys(KF, {name: key("x")}), other_columns="plain")
        found = ref.ParquetFile(bytes(sealed), KF, {"list.list.element": key("x")})
        assert [chunk.path for chunk in found.chunks() if chunk.key] == [RICH_LEAVES[2]] * 2


def test_names_with_dots(corpus: dict[str, bytes]) -> None:
    """A tuple says which of two columns with the same dotted path; the dotted path says both."""
    plain = corpus["names with dots"]
    one, two = key("one"), key("two", 32)
    for given, expected in (
        ({("a.b",): one, ("a", "b"): two}, {("a.b",): one, ("a", "b"): two}),
        ({"a.b": one}, {("a.b",): one, ("a", "b"): one}),
        ({"a.b": one, ("a", "b"): two}, {("a.b",): one, ("a", "b"): two}),
        ({("a",): one, "über": two}, {("a", "b"): one, ("a", "c.d"): one, ("über",): two}),
    ):
        sealed = bytearray()
        parquet.encrypt_file(plain, sealed, Keys(KF, given), other_columns="plain")
        file = ref.ParquetFile(bytes(sealed), KF, expected)
        assert {chunk.path: chunk.key for chunk in file.chunks() if chunk.key} == expected
        assert list(file.modules())
        back = bytearray()
        parquet.decrypt_file(sealed, back, Keys(KF, given))
        assert data_of(bytes(back)) == data_of(plain)


def test_missing_keys() -> None:
    plain = rich()
    for mode in (*FOUR, Mode(columns="partial")):
        sealed = seal(plain, mode)
        for keys, column in (
            (Keys(mode.footer), "id"),
            (Keys(mode.footer, {"id": mode.leaf_keys(RICH_LEAVES)["id",]}), "list.list.element"),
        ):
            if mode.columns == "partial" and column != "id":
                continue
            allow: dict[str, Any] = {"allow_ctr": mode.ctr}
            known: dict[str, Any] = {**allow, "aad_prefix": mode.supplied}
            refused(KeyAccessError, f"'{column}'", parquet.decrypt_file, sealed, keys, **known)
            refused(KeyAccessError, f"'{column}'", parquet.reencrypt_file, sealed, keys, keys, **allow)
            with pytest.raises(KeyAccessError, match=f"'{column}'"):
                parquet.verify(sealed, keys, **allow)
            skipped = parquet.verify(sealed, keys, missing="skip", **allow)
            assert "missing" in {one.key for one in skipped.columns}
            dropped = bytearray()
            report = parquet.decrypt_file(sealed, dropped, keys, missing="drop", **allow)
            assert any(f"left out, because their keys are not held: {column}" in one for one in report.warnings)
            table, full = pq.read_table(pa.BufferReader(dropped)), pq.read_table(pa.BufferReader(plain))
            names = [name for name in full.column_names if name in table.column_names]
            assert len(names) == len(table.column_names) > 0
            assert column.split(".")[0] not in names
            assert table.equals(full.select(names))


def test_keys_from_a_function() -> None:
    plain, mode = rich(), Mode(columns="columns", prefix="stored")
    sealed = seal(plain, mode)
    known: dict[str, Any] = {b"of the footer": mode.footer}
    known |= {b"of " + ".".join(path).encode(): value for path, value in mode.leaf_keys(RICH_LEAVES).items()}
    asked: list[bytes] = []

    def retrieve(metadata: bytes) -> bytes:
        asked.append(metadata)
        return known[metadata]

    out = bytearray()
    parquet.decrypt_file(sealed, out, retrieve)
    assert data_of(bytes(out)) == data_of(plain)
    assert sorted(asked) == sorted(known)  # once for each, however many row groups

    refused(KeyAccessError, "footer", parquet.decrypt_file, sealed, {}.__getitem__)
    del known[b"of id"]
    refused(KeyAccessError, "'id'", parquet.decrypt_file, sealed, retrieve)

    def broken(metadata: bytes) -> bytes:
        raise ConnectionError("the KMS is away")

    refused(ConnectionError, "the KMS is away", parquet.decrypt_file, sealed, broken)
    for wrong, error in ((bytes(5), ValueError), ("text", TypeError)):
        refused(error, ".", parquet.decrypt_file, sealed, lambda metadata, wrong=wrong: wrong)

    anonymous = bytearray()
    parquet.encrypt_file(plain, anonymous, Keys(KF))
    refused(KeyAccessError, "no key_metadata", parquet.decrypt_file, anonymous, retrieve)


@pytest.mark.parametrize("footer", [False, True])
def test_functions_are_called_with_none(footer: bool) -> None:
    """For the footer key, where the file stores no key_metadata; a column's cannot be asked for like that."""
    plain, sealed, asked = rich(), bytearray(), []
    parquet.encrypt_file(plain, sealed, Keys(KF), plaintext_footer=footer)

    def retrieve(metadata: bytes | None) -> bytes | None:
        asked.append(metadata)
        return KF if metadata is None else None

    readers: list[Callable[..., Any]] = [
        lambda source, keys: parquet.decrypt_file(source, bytearray(), keys),
        lambda source, keys: parquet.reencrypt_file(source, bytearray(), keys, Keys(key("new"))),
        parquet.verify,
        parquet.open_plain,
    ]
    for reader in readers:
        asked.clear()
        reader(sealed, retrieve)
        assert asked == [None]
        reader(sealed, {None: KF}.__getitem__)
        for nothing in ({}.__getitem__, {}.get, bytes.hex, keytools.CryptoFactory(None).retriever()):  # type: ignore[arg-type]
            with pytest.raises(KeyAccessError, match="no key_metadata"):
                reader(sealed, nothing)
    parquet.encrypt_file(plain, sealed, Keys(KF, {"id": key("id")}), plaintext_footer=footer)
    asked.clear()
    for reader in readers:
        with pytest.raises(KeyAccessError, match=r"'id'.*no key_metadata for this column, so pass Keys"):
            reader(sealed, retrieve)
    assert set(asked) == {None}
    assert len(asked) == len(readers)
    report = parquet.verify(sealed, retrieve, missing="skip")
    assert [row.path for row in report.columns if row.key == "missing"] == ["id"]
    parquet.encrypt_file(plain, sealed, Keys(KF, {"id": KF}), plaintext_footer=footer)  # one key for all
    for reader in readers:
        reader(sealed, retrieve)
    parquet.encrypt_file(plain, sealed, Keys(KF, {"id": key("id")}, column_metadata={"id": b"unknown"}))
    with pytest.raises(KeyAccessError, match=r"'id'.*no key was found for the key_metadata"):
        parquet.verify(sealed, retrieve)


def test_a_column_is_named_once() -> None:
    k1, k2 = key("1"), key("2")
    for value in (k2, k1, parquet.FOOTER_KEY):
        for pair in ({"s": k1, ("s",): value}, {("s",): value, "s": k1}):
            with pytest.raises(ValueError, match="'s' is named twice"):
                Keys(KF, pair)
    # With dots it takes the file to tell.
    plain = rich()
    for path in (("list",), ("list", "list"), RICH_LEAVES[2]):
        keys = Keys(KF, {".".join(path) if len(path) > 1 else "list.list": k1, path: k2})
        if len(path) > 1:
            with pytest.raises(ValueError, match="named twice"):
                parquet.encrypt_file(plain, bytearray(), keys)
        else:
            parquet.encrypt_file(plain, bytearray(), keys)  # a column of a group may have another key
    for pair in ({"a.b": "k1", ("a", "b"): "k2"}, "k1:s;k2:s", {"s": "k1", ("s",): "k1"}):
        with pytest.raises(ValueError, match="named twice"):
            keytools.parse_column_keys(pair)  # type: ignore[arg-type]


def test_addresses_in_a_file_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key material that names a KMS: no connection is made, whatever is asked of the file."""
    import socket

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    material = json.dumps(
        {
            "keyMaterialType": "PKMT1", "internalStorage": True, "isFooterKey": True, "kmsInstanceID": "evil",
            "kmsInstanceURL": "http://169.254.169.254/", "masterKeyID": "m", "wrappedDEK": "AAAA",
            "doubleWrapping": False,
        }
    ).encode()  # fmt: skip
    sealed, back = bytearray(), bytearray()
    keys = Keys(KF, {"id": key("id")}, footer_metadata=material, column_metadata={"id": material})
    parquet.encrypt_file(rich(), sealed, keys)
    parquet.decrypt_file(sealed, back, keys)
    parquet.verify(sealed, keys)
    assert "169.254.169.254" in json.dumps(parquet.inspect(sealed))


def test_the_limit_of_a_key(tmp_path: Path) -> None:
    """2^32 messages: refused before the first that is too many, and nothing is left."""
    mode = Mode(footer_size=32, generation="limit")
    keys = mode.keys([])
    plain = rich()
    sealed = seal(plain, mode)
    held = Key(mode.footer)
    modules = sum(one.sealed for one in reference(sealed, mode, []).modules())
    held.carry((1 << 32) - held.sealed - modules)
    files.write(tmp_path / "plain", plain)
    parquet.encrypt_file(tmp_path / "plain", tmp_path / "last", keys)  # up to the very last one
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(KeyLimitError):
        parquet.encrypt_file(tmp_path / "plain", tmp_path / "beyond", keys)
    other = Mode(generation="limit other")
    files.write(tmp_path / "other", seal(plain, other))
    before.append("other")
    with pytest.raises(KeyLimitError):
        parquet.reencrypt_file(tmp_path / "other", tmp_path / "beyond", other.keys([]), keys)
    assert sorted(os.listdir(tmp_path)) == sorted(before)
    assert data_of(unseal(sealed, mode, [])) == data_of(plain)  # what was sealed opens
    parquet.verify(tmp_path / "last", keys)


# ---------------------------------------------------------------- limits of ordinals and sizes


def tiny_pages(count: int) -> bytes:
    """A column in so many data pages of one row each."""
    header = ref.Struct([[1, ref.I32, 0], [2, ref.I32, 4], [3, ref.I32, 4]])
    header.set(5, ref.STRUCT, ref.Struct([[1, ref.I32, 1], [2, ref.I32, 0], [3, ref.I32, 3], [4, ref.I32, 3]]))
    page = ref.serialise(header) + b"\1\0\0\0"
    data = page * count
    table = pa.table({"a": pa.array([1], pa.int32())}).cast(pa.schema([pa.field("a", pa.int32(), nullable=False)]))
    sink = io.BytesIO()
    pq.write_table(table, sink, use_dictionary=False, compression="none", store_schema=False, write_statistics=False)
    footer = ref.ParquetFile(sink.getvalue()).footer
    footer.set(3, ref.I64, count)
    [group] = footer[4].items
    meta = group[1].items[0][3]
    for number, value in ((5, count), (6, len(data)), (7, len(data)), (9, 4)):
        meta.set(number, ref.I64, value)
    meta.remove(13, 16)
    group.set(2, ref.I64, len(data))
    group.set(3, ref.I64, count)
    group.set(6, ref.I64, len(data))
    tail = ref.serialise(footer)
    return b"PAR1" + data + tail + len(tail).to_bytes(4, "little") + b"PAR1"


def test_pages_that_ordinals_can_count(tmp_path: Path) -> None:
    most, beyond = tiny_pages(32768), tiny_pages(32769)
    assert pq.read_table(pa.BufferReader(most)).num_rows == 32768
    for threads in (1, 2):
        sealed = seal(most, UNIFORM, [("a",)], threads=threads)
        assert data_of(unseal(sealed, UNIFORM, [("a",)], threads=threads)) == data_of(most)
    decryption = peers.pe.create_decryption_properties(UNIFORM.footer)
    table = pq.ParquetFile(pa.BufferReader(sealed), decryption_properties=decryption).read()
    assert table.column(0).to_pylist() == [1] * 32768

    refused(
        FormatError,
        "column 'a', row group 0: there are more than 32768 data pages",
        parquet.encrypt_file,
        beyond,
        Keys(KF),
    )
    taken = Target()
    with pytest.raises(FormatError, match="more than 32768 data pages"):
        parquet.encrypt_file(beyond, taken, Keys(KF))
    assert not taken.taken  # not a byte was written to what cannot be undone
    with pytest.raises(FormatError, match="more than 32768 data pages"):
        parquet.encrypt_file(beyond, tmp_path / "out", Keys(KF))
    assert os.listdir(tmp_path) == []
    plain = bytearray()
    parquet.encrypt_file(rich_with(beyond), plain, Keys(KF, {"b": key("b")}), other_columns="plain")  # it stays open


def rich_with(tiny: bytes) -> bytes:
    """The file with a second column "b" that is a dictionary-less copy of one page a row group; "a" is as it was."""
    file = ref.ParquetFile(tiny)
    rows = file.footer[3]
    table = pa.table({"b": pa.array([7] * rows, pa.int32())}).cast(
        pa.schema([pa.field("b", pa.int32(), nullable=False)])
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, use_dictionary=False, compression="none", store_schema=False, row_group_size=rows)
    other = ref.ParquetFile(sink.getvalue())
    shift = len(data_of(tiny))
    footer = file.footer
    footer[2].items.append(other.footer[2].items[1])
    footer[2].items[0].set(5, ref.I32, 2)
    footer.remove(7)
    chunk = other.footer[4].items[0][1].items[0]
    chunk[3].set(9, ref.I64, chunk[3][9] + shift)
    footer[4].items[0][1].items.append(chunk)
    tail = ref.serialise(footer)
    data = b"PAR1" + data_of(tiny) + data_of(sink.getvalue())
    return data + tail + len(tail).to_bytes(4, "little") + b"PAR1"


def test_row_groups_that_ordinals_can_count() -> None:
    """Row groups without rows: a footer and nothing else."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([("a", pa.int8())]), store_schema=False):
        pass
    file = ref.ParquetFile(sink.getvalue())
    meta = ref.Struct(
        [
            [1, ref.I32, 1], [2, ref.LIST, ref.List(ref.I32, [0])], [3, ref.LIST, ref.List(ref.BINARY, [b"a"])],
            [4, ref.I32, 0], [5, ref.I64, 0], [6, ref.I64, 0], [7, ref.I64, 0], [9, ref.I64, 0],
        ]
    )  # fmt: skip
    chunk = ref.Struct([[2, ref.I64, 0], [3, ref.STRUCT, meta]])
    group = ref.Struct([[1, ref.LIST, ref.List(ref.STRUCT, [chunk])], [2, ref.I64, 0], [3, ref.I64, 0]])
    file.footer.set(4, ref.LIST, ref.List(ref.STRUCT, [group]))
    one = ref.serialise(group)
    before, after = ref.serialise(file.footer).split(b"\x1c" + one)

    def groups(count: int) -> bytes:
        head = b"\xfc" + bytes([count & 0x7F | 0x80, count >> 7 & 0x7F | 0x80, count >> 14])
        return file.with_footer(before + head + one * count + after)

    mode = Mode(columns="uniform")
    sealed = seal(groups(32768), mode, [("a",)])
    decryption = peers.pe.create_decryption_properties(mode.footer)
    assert pq.read_metadata(pa.BufferReader(sealed), decryption_properties=decryption).num_row_groups == 32768
    back = unseal(sealed, mode, [("a",)])
    last = bytes([0x15 - 0x01, *ref.serialise(ref.Struct([[1, ref.I16, 32767]]))[1:-1]])
    assert last in back[-200:]
    refused(FormatError, "more than 32768 row groups", parquet.encrypt_file, groups(32769), Keys(KF))


def test_more_than_32768_columns_are_refused() -> None:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([("a", pa.int8())]), store_schema=False):
        pass
    file = ref.ParquetFile(sink.getvalue())
    schema = file.footer[2]
    schema.items += schema.items[1:] * 32768
    schema.items[0].set(5, ref.I32, 32769)
    file.footer.remove(7)
    refused(FormatError, "more than 32768 columns", parquet.encrypt_file, file.with_footer(), Keys(KF))


class Sparse(io.RawIOBase):
    """A file of which most bytes are zeros that nobody keeps."""

    def __init__(self, parts: dict[int, bytes], size: int) -> None:
        self.parts, self.size, self.at = parts, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = min(len(view), self.size - self.at)
        if nbytes > 1 << 24:
            raise MemoryError("so much is asked for")
        view[:nbytes] = bytes(nbytes)
        for begin, part in self.parts.items():
            first, last = max(begin, self.at), min(begin + len(part), self.at + nbytes)
            if first < last:
                view[first - self.at : last - self.at] = part[first - begin : last - begin]
        self.at += nbytes
        return nbytes


def test_a_page_near_2_gib_is_refused_before_it_is_read() -> None:
    """Framed, its body would have more than 2^31 - 1 bytes."""
    plain = tiny_pages(1)
    file = ref.ParquetFile(plain)
    for nbytes in ((1 << 31) - 32, (1 << 31) - 1):
        header = ref.parse(data_of(plain))[0]
        header.set(3, ref.I32, nbytes)
        head = ref.serialise(header)
        size = len(head) + nbytes
        meta = file.footer[4].items[0][1].items[0][3]
        meta.set(6, ref.I64, size)
        meta.set(7, ref.I64, size)
        footer = ref.serialise(file.footer)
        tail = footer + len(footer).to_bytes(4, "little") + b"PAR1"
        source = Sparse({0: b"PAR1" + head, 4 + size: tail}, 4 + size + len(tail))
        refused(FormatError, "too large to be sealed", parquet.encrypt_file, source, Keys(KF), threads=1)


def test_a_metadata_file_is_refused() -> None:
    def elsewhere(footer: ref.Struct) -> None:
        for group in footer[4].items:
            for chunk in group[1].items:
                chunk.set(1, ref.BINARY, b"part-0.parquet")

    refused(FormatError, "_metadata", parquet.encrypt_file, files.with_footer(rich(), elsewhere), Keys(KF))


# ---------------------------------------------------------------- files of writers that leave things out


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


INCOMPLETE: dict[str, Callable[[ref.Struct, ref.Struct], None]] = {
    "dictionary_page_offset": lambda chunk, meta: (meta.set(9, ref.I64, meta[11] or meta[9]), meta.remove(11))[0],
    "encoding_stats": lambda chunk, meta: meta.remove(13),
    "encodings too": lambda chunk, meta: (meta.remove(13), meta.set(2, ref.LIST, ref.List(ref.I32, [0])))[0],
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


def test_only_the_footer_is_encrypted(corpus: dict[str, bytes]) -> None:
    """Every column stays plain."""
    for name in ("page index", "nested", "empty table", "no columns"):
        for footer in (False, True):
            sealed, back = bytearray(), bytearray()
            options: dict[str, Any] = {"other_columns": "plain", "plaintext_footer": footer}
            report = parquet.encrypt_file(corpus[name], sealed, Keys(KF), **options)
            assert {row.key for row in report.columns} <= {"plain"}
            file = ref.ParquetFile(bytes(sealed), KF)
            assert [one.kind for one in file.modules() if one.sealed] == [ref.FOOTER]
            parquet.decrypt_file(sealed, back, Keys(KF))
            assert data_of(bytes(back)) == data_of(corpus[name])


@pytest.mark.parametrize("unique", [b"u", bytes(range(200))])
def test_choices_of_other_writers(unique: bytes) -> None:
    """An aad_file_unique of any length, key metadata that is empty, no word on the prefix, zeros behind the footer."""
    plain, mode = rich(write_page_checksum=False), Mode(columns="columns", prefix="stored")
    file = reference(seal(plain, mode), mode, RICH_LEAVES)
    aad = PREFIX + unique
    keys = {(chunk.row_group, chunk.column): chunk.key for chunk in file.chunks()}
    data = bytearray(file.data[: file.tail])
    footer, _ = ref.parse(ref.serialise(file.footer))
    for module in list(file.modules())[1:]:
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


def v2(nulls: str) -> bytes:
    values: Any = {
        "required": pa.array(range(30), pa.int64()),  # no levels
        "some": pa.array([None if i % 3 else i for i in range(30)], pa.int64()),
        "all": pa.nulls(30, pa.int64()),
        "nested": pa.array([[1, None]] * 29 + [None], pa.list_(pa.int64())),
    }[nulls]
    table = pa.table({"a": values})
    if nulls == "required":
        table = table.cast(pa.schema([pa.field("a", pa.int64(), nullable=False)]))
    sink = io.BytesIO()
    options: dict[str, Any] = {
        "max_rows_per_page": 10,
        "write_batch_size": 10,
        "write_page_checksum": True,
        "write_page_index": True,
    }
    pq.write_table(table, sink, data_page_version="2.0", compression="snappy", use_dictionary=False, **options)
    return sink.getvalue()


@pytest.mark.parametrize("algorithm", [GCM, CTR])
@pytest.mark.parametrize("nulls", ["required", "some", "all", "nested"])
def test_both_layouts_of_v2_pages(nulls: str, algorithm: str) -> None:
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
    for layout, wanted in (
        ("arrow", "parquet-java"),
        ("parquet-java", "arrow"),
        ("arrow", None),
        ("parquet-java", None),
    ):
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


def shifted_nulls(layout: str) -> tuple[bytes, bytes, Keys]:
    """A file with V2 pages, and the same after somebody without a key has moved its nulls, where that can be done."""
    table = pa.table({"a": pa.array([i if i % 2 == 0 else None for i in range(48)], pa.int64()), "b": [1] * 48})
    sink = io.BytesIO()
    pq.write_table(table, sink, data_page_version="2.0", compression="none", use_dictionary=False, row_group_size=24)
    keys = Keys(KF)
    sealed = bytearray()
    parquet.encrypt_file(sink.getvalue(), sealed, keys, v2_layout=layout, threads=1)
    changed = bytearray(sealed)
    for module in ref.ParquetFile(bytes(sealed), KF).modules():
        if module.kind == ref.DATA_PAGE and module.path == ("a",) and module.levels:
            at = module.offset
            assert at
            assert sealed[at : at + module.levels] == b"\x07\x55\x55\x55"
            changed[at + 1 : at + 4] = b"\xaa\xaa\xaa"
    return bytes(sealed), bytes(changed), keys


@pytest.mark.parametrize("reader", READERS)
def test_levels_without_a_tag(reader: str) -> None:
    """parquet-java keeps the levels of V2 pages outside of their modules: nulls can be moved, and no tag tells."""
    sealed, changed, keys = shifted_nulls("parquet-java")
    moved = pq.read_table(parquet.open_plain(changed, keys))["a"].to_pylist()
    assert moved[:4] == [None, 0, None, 2]
    assert pq.read_table(parquet.open_plain(sealed, keys))["a"][:2].to_pylist() == [
        0,
        None,
    ]
    for file in (sealed, changed):
        READERS[reader](file, keys)
        with pytest.raises(IntegrityError, match=r"levels.*no tag.*allow_unauthenticated_levels") as caught:
            READERS[reader](file, keys, allow_unauthenticated_levels=False)
        place = caught.value.module, caught.value.row_group, caught.value.column, caught.value.page
        assert place == ("data page", 0, "a", 0)
    whole, same, keys = shifted_nulls("arrow")
    assert whole == same
    READERS[reader](whole, keys, allow_unauthenticated_levels=False)


def test_reports_say_which_parts_have_tags() -> None:
    sealed, changed, keys = shifted_nulls("parquet-java")
    plain = bytearray()
    parquet.decrypt_file(sealed, plain, keys)
    new = Keys(key("new"))
    again, out = bytearray(), bytearray()
    reports = {
        "write": parquet.write_table(
            pq.read_table(pa.BufferReader(plain)),
            out,
            keys,
            v2_layout="parquet-java",
            data_page_version="2.0",
            row_group_size=24,
        ),
        "encrypt": parquet.encrypt_file(bytes(plain), out, keys, v2_layout="parquet-java"),
        "verify": parquet.verify(changed, keys),
        "decrypt": parquet.decrypt_file(changed, bytearray(), keys),
        "same size": parquet.reencrypt_file(changed, out, keys, new, same_size=True),
        "reencrypt": parquet.reencrypt_file(changed, out, keys, new),
        "to arrow": parquet.reencrypt_file(changed, again, keys, new, v2_layout="arrow"),
    }
    for name, report in reports.items():
        a, b = report.columns
        tagged = name == "to arrow"
        assert a.tags == {"headers": True, "levels": tagged, "values": True}, name
        assert (a.authenticated, b.authenticated) == (tagged, tagged), name  # b has no nulls, but levels
        places = [(column, row_group) for row_group in (0, 1) for column in "ab"]
        assert (
            report.unauthenticated_levels
            == places
            == [tuple(one) for one in report.to_dict()["unauthenticated_levels"]]
        )
        assert any("the levels of a, b have no tag" in warning for warning in report.warnings), name
    # What had no tag has one now, whatever it is.
    verified = parquet.verify(again, new)
    assert all(row.authenticated for row in verified.columns)
    assert not verified.unauthenticated_levels
    assert verified.warnings == []

    with parquet.open_plain(changed, keys) as view:
        assert view.unauthenticated_levels == []
        view.read()
        assert view.unauthenticated_levels == reports["verify"].unauthenticated_levels
    for mode, tags in ((FOUR[0], (True, True, True)), (FOUR[2], (True, False, False))):
        report = parquet.verify(seal(rich(), mode), mode.keys(RICH_LEAVES), allow_ctr=True)
        assert all(tuple(row.tags.values()) == tags for row in report.columns)
        assert not report.unauthenticated_levels
    report = parquet.reencrypt_file(
        seal(rich(), FOUR[2]), out, FOUR[2].keys(RICH_LEAVES), new, allow_ctr=True, algorithm=GCM
    )
    assert any("source's pages had no tag" in warning for warning in report.warnings)
    partial = Mode(columns="partial")
    for report in (
        parquet.verify(seal(rich(), partial), partial.keys(RICH_LEAVES)),
        parquet.encrypt_file(rich(), out, partial.keys(RICH_LEAVES), other_columns="plain"),
    ):
        plain_one = next(row for row in report.columns if row.key == "plain")
        assert not any(plain_one.tags.values())
        assert not plain_one.authenticated
    missing = parquet.verify(seal(rich(), COLUMNS), Keys(COLUMNS.footer), missing="skip")
    assert next(row.tags for row in missing.columns if row.key == "missing") == {}


# ---------------------------------------------------------------- other keys


@pytest.mark.parametrize("mode", MODES[::5], ids=str)
def test_reencrypt(corpus: dict[str, bytes], mode: Mode) -> None:
    turned = Mode(
        CTR if mode.algorithm == GCM else GCM, not mode.plaintext_footer, mode.columns, "supplied", 32, "second"
    )
    options: dict[str, Any] = {**turned.options, "new_aad_prefix": turned.aad_prefix}
    del options["aad_prefix"]
    for name, plain in list(corpus.items())[::4]:
        leaves = files.leaves_of(plain)
        sealed = seal(plain, mode, leaves)
        out = bytearray()
        old, new = mode.keys(leaves), turned.keys(leaves)
        report = parquet.reencrypt_file(
            sealed, out, old, new, aad_prefix=mode.supplied, threads=1, **options, allow_ctr=mode.ctr
        )
        assert report.algorithm == turned.algorithm
        file = reference(bytes(out), turned, leaves)
        assert file.algorithm == turned.algorithm
        assert (file.magic == b"PAR1") == turned.plaintext_footer
        assert file.aad_unique != reference(sealed, mode, leaves).aad_unique
        back = unseal(out, turned, leaves)
        assert data_of(back) == data_of(plain), name
        assert files.footer_without_places(back) == files.footer_without_places(plain), name


def test_reencrypt_keeps_what_it_is_not_told_to_change() -> None:
    plain = rich()
    for mode in (Mode(algorithm, footer, "columns", prefix) for algorithm in (GCM, CTR) for footer in (False, True) for prefix in (None, "stored", "supplied")):  # fmt: skip  # noqa: E501
        turned = Mode(mode.algorithm, mode.plaintext_footer, mode.columns, mode.prefix, 24, "second")
        out = bytearray()
        old, new = mode.keys(RICH_LEAVES), turned.keys(RICH_LEAVES)
        parquet.reencrypt_file(seal(plain, mode), out, old, new, aad_prefix=mode.supplied, allow_ctr=mode.ctr)
        file = reference(bytes(out), turned, RICH_LEAVES)
        assert file.aad_prefix == mode.aad_prefix
        assert file.algorithm == mode.algorithm
        assert (file.magic == b"PAR1") == mode.plaintext_footer
        assert data_of(unseal(out, turned, RICH_LEAVES)) == data_of(plain)


@pytest.mark.parametrize("mode", MODES[::2], ids=str)
def test_same_size(mode: Mode) -> None:
    """Every module stays where it is and as long as it is; nothing of the old keys is left."""
    plain = rich()
    turned = Mode(mode.algorithm, mode.plaintext_footer, mode.columns, mode.prefix, mode.footer_size, "second")
    sealed = seal(plain, mode)
    out = bytearray()
    old, new = mode.keys(RICH_LEAVES), turned.keys(RICH_LEAVES)
    report = parquet.reencrypt_file(
        sealed, out, old, new, aad_prefix=mode.supplied, same_size=True, threads=1, allow_ctr=mode.ctr
    )
    assert len(out) == len(sealed) == report.file_length
    before = reference(sealed, mode, RICH_LEAVES)
    after = reference(bytes(out), turned, RICH_LEAVES)
    assert [(one.at, one.offset, one.length, one.sealed) for one in before.modules()] == [
        (one.at, one.offset, one.length, one.sealed) for one in after.modules()
    ]
    assert after.aad == before.aad
    assert not set(nonces(before)) & set(nonces(after))
    assert after.complaints() == []
    assert after.contents() == before.contents()
    dropped = sum(int(warning.split()[0]) for warning in report.warnings if "no room for the new CRC" in warning)
    back = unseal(out, turned, RICH_LEAVES)
    if not dropped:
        assert data_of(back) == data_of(plain)
    assert pq.read_table(pa.BufferReader(back), page_checksum_verification=True).equals(
        pq.read_table(pa.BufferReader(plain))
    )
    with pytest.raises(AgsError):
        unseal(out, mode, RICH_LEAVES)


def test_same_size_turns_only_what_is_held() -> None:
    """The footer key and one column are turned; the columns of the other keys are as they were, byte by byte."""
    plain = rich()
    for mode in FOUR:
        sealed = seal(plain, mode)
        columns = mode.leaf_keys(RICH_LEAVES)
        held = {("id",): columns["id",]}
        new_footer, new_id = key("new footer", 24), key("new id", len(columns["id",]))
        new = Keys(new_footer, {"id": new_id}, footer_metadata=b"of the footer", column_metadata={"id": b"of id"})
        out = bytearray()
        old = Keys(mode.footer, held)
        report = parquet.reencrypt_file(sealed, out, old, new, same_size=True, threads=1, allow_ctr=mode.ctr)
        assert len(out) == len(sealed)
        assert [one.path for one in report.columns if one.key == "missing"] == ["list.list.element"]
        after = ref.ParquetFile(bytes(out), new_footer, {**columns, ("id",): new_id})
        before = reference(sealed, mode, RICH_LEAVES)
        assert after.contents() == before.contents()
        assert after.complaints() == []
        for one, two in zip(before.modules(), after.modules(), strict=True):
            passed = one.path == RICH_LEAVES[2]
            assert (before.stored(one) == after.stored(two)) == passed, one.name
        for wrong in ({**columns}, {**columns, ("id",): key("x", 16)}):
            with pytest.raises(InvalidTag):
                list(ref.ParquetFile(bytes(out), new_footer, wrong).modules())
        with pytest.raises(KeyAccessError, match=r"list\.list\.element"):
            parquet.reencrypt_file(sealed, bytearray(), old, new, allow_ctr=mode.ctr)


def test_same_size_and_checksums() -> None:
    """A CRC's varint has one to five bytes: a longer one is left out, a shorter one makes room for zeros."""
    plain = Pieces(rich())
    short = 0
    for part in plain.parts.values():
        for header, _ in part.pages:
            short += 1
            header.set(4, ref.I32, 1)  # not its CRC: kept wrong, or so short that the right one finds no room
    source = plain.build()
    sealed = seal(source, UNIFORM)
    turned = Mode(generation="second")
    counted = 0
    for _ in range(6):
        out = bytearray()
        report = parquet.reencrypt_file(sealed, out, UNIFORM.keys([]), turned.keys([]), same_size=True, threads=1)
        assert len(out) == len(sealed)
        back = unseal(out, turned, RICH_LEAVES, check_crc=False)
        assert pq.read_table(pa.BufferReader(back)).equals(pq.read_table(pa.BufferReader(rich())))
        counted += sum("CRC" in warning for warning in report.warnings)
    assert counted
    assert short

    sealed = seal(rich(), UNIFORM)
    dropped = 0
    for _ in range(40):  # now and then a new CRC has one byte more than the old one
        out = bytearray()
        report = parquet.reencrypt_file(sealed, out, UNIFORM.keys([]), turned.keys([]), same_size=True, threads=1)
        file = reference(bytes(out), turned, RICH_LEAVES)
        lost = sum(
            ref.parse(one.plain)[0][4] is None
            for one in file.modules()
            if one.kind in (ref.DATA_HEADER, ref.DICTIONARY_HEADER)
        )
        said = [warning for warning in report.warnings if "no room for the new CRC" in warning]
        assert said == ([f"{lost} page headers had no room for the new CRC, which was left out"] if lost else [])
        dropped += lost
        sealed_again = bytes(out)
        parquet.verify(sealed_again, turned.keys([]))
    assert dropped < 40 * 18


def test_same_size_keeps_checksums() -> None:
    """Of pages whose CRC has a varint of four bytes, as one of 16 has, the next one mostly has five: they are sealed
    again until it fits.
    """

    def checksums(sealed: Any, mode: Mode) -> list[int | None]:
        modules = reference(bytes(sealed), mode, RICH_LEAVES).modules()
        return [ref.parse(one.plain)[0][4] for one in modules if one.kind in (ref.DATA_HEADER, ref.DICTIONARY_HEADER)]

    def short(crc: int | None) -> bool:
        return crc is not None and 1 << 20 <= abs(crc) < 1 << 27

    plain, turned = rich(), Mode(generation="second")
    sealed = seal(plain, UNIFORM)
    while not any(map(short, checksums(sealed, UNIFORM))):
        sealed = seal(plain, UNIFORM)
    before = checksums(sealed, UNIFORM)
    had, kept = 0, 0
    for _ in range(50):
        out = bytearray()
        parquet.reencrypt_file(sealed, out, UNIFORM.keys([]), turned.keys([]), same_size=True, threads=1)
        assert len(out) == len(sealed)
        for old, new in zip(before, checksums(out, turned), strict=True):
            had += short(old)
            kept += short(old) and new is not None
    assert had >= 50
    assert kept >= had - 5
    parquet.verify(out, turned.keys([]))


def test_what_same_size_cannot_do() -> None:
    sealed = seal(rich(), COLUMNS)
    old = COLUMNS.keys(RICH_LEAVES)
    for options in (
        {"new_aad_prefix": b"x"},
        {"algorithm": CTR},
        {"plaintext_footer": True},
        {"v2_layout": "arrow"},
    ):
        refused(ValueError, "same_size keeps", parquet.reencrypt_file, sealed, old, old, same_size=True, **options)
    for new, column in ((Keys(KF), "id"), (Keys(KF, {"id": KF, "list": KF, "word": KF}), "word")):
        refused(ValueError, f"'{column}'", parquet.reencrypt_file, sealed, old, new, same_size=True)
    partial = Mode(columns="partial")
    new = Keys(KF, {"id": KF, "open": KF})
    refused(ValueError, "'open'", parquet.reencrypt_file, seal(rich(), partial), partial.keys(RICH_LEAVES), new, same_size=True)  # fmt: skip  # noqa: E501


# ---------------------------------------------------------------- sources and targets


def test_sources_and_targets(tmp_path: Path) -> None:
    """Paths, bytes and files, in any combination, give the same."""
    plain, mode = rich(), COLUMNS
    keys = mode.keys(RICH_LEAVES)
    path = files.write(tmp_path / "plain", plain)
    sealed = files.write(tmp_path / "sealed", seal(plain, mode))
    for number, source in enumerate((str(sealed), sealed, memoryview(sealed.read_bytes()), bytearray(sealed.read_bytes()), Source(sealed.read_bytes()))):  # fmt: skip  # noqa: E501
        for threads in (1, 2):
            target = tmp_path / f"out{number}{threads}"
            parquet.decrypt_file(source, target, keys, threads=threads)
            assert data_of(target.read_bytes()) == data_of(plain)
            assert parquet.verify(source, keys, threads=threads).columns
            assert parquet.inspect(source)["footer"] == "encrypted"
    with sealed.open("rb") as file, sealed.open("rb", buffering=0) as raw:
        for source in (file, raw, io.BytesIO(sealed.read_bytes())):
            out = bytearray(b"what was there")
            parquet.decrypt_file(source, out, keys)
            assert data_of(bytes(out)) == data_of(plain)
    for target in (io.BytesIO(), Target(), Target(lambda data, before: min(len(data), 7))):
        parquet.encrypt_file(path, target, keys, threads=1)
        written = bytes(target.getvalue() if isinstance(target, io.BytesIO) else target.taken)
        assert data_of(unseal(written, mode, RICH_LEAVES)) == data_of(plain)
        assert not target.closed
    for wrong in (5, None, "", bytes(3)):
        with pytest.raises((TypeError, OSError)):
            parquet.encrypt_file(path, wrong, keys)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pipe(threads: int) -> None:
    plain, mode = rich(), FOUR[1]
    read, write = os.pipe()
    taken: list[bytes] = []

    def drain() -> None:
        with os.fdopen(read, "rb") as file:
            taken.append(file.read())

    reader = threading.Thread(target=drain)
    reader.start()
    with os.fdopen(write, "wb") as file:
        assert not file.seekable()
        report = parquet.encrypt_file(plain, file, mode.keys(RICH_LEAVES), threads=threads, **mode.options)
    reader.join()
    assert report.file_length == len(taken[0])
    assert data_of(unseal(taken[0], mode, RICH_LEAVES)) == data_of(plain)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", ["raises", "takes none", "raises once"])
def test_a_target_that_fails(how: str, threads: int, corpus: dict[str, bytes]) -> None:
    """What failed is told, however it goes on; nothing is written behind the gap."""
    plain = corpus["20 row groups"]
    keys = UNIFORM.keys([])
    whole = len(seal(plain, UNIFORM, [("id",), ("text",)]))
    for limit in (0, 4, 1000, whole - 300, whole - 8):
        failed: list[int] = []

        def take(data: bytes, before: int, limit: int = limit, failed: list[int] = failed) -> int:
            if before + len(data) <= limit or (failed and how == "raises once"):
                return len(data)
            failed.append(before)
            if how == "takes none":
                return 0
            raise OSError(28, "No space left on device")

        target = Target(take)
        with pytest.raises(OSError):
            parquet.encrypt_file(plain, target, keys, threads=threads)
        assert len(target.taken) <= limit


def test_a_target_that_is_there_stays_if_it_fails(tmp_path: Path) -> None:
    plain = rich()
    sealed = seal(plain, UNIFORM)
    file = reference(sealed, UNIFORM, RICH_LEAVES)
    last = [module for module in file.modules() if module.kind == ref.BLOOM_BITSET][-1]
    damaged = file.flip(last)
    out = files.write(tmp_path / "out", b"what was there")
    with pytest.raises(IntegrityError):
        parquet.decrypt_file(damaged, out, UNIFORM.keys([]))
    assert out.read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["out"]
    taken = bytearray(b"something")
    with pytest.raises(IntegrityError):
        parquet.decrypt_file(damaged, taken, UNIFORM.keys([]))
    assert taken == b""


def test_a_source_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    plain, mode, turned = rich(), COLUMNS, Mode(columns="columns", generation="second")
    for same_size in (False, True):
        path = files.write(tmp_path / f"file{same_size}", seal(plain, mode))
        path.chmod(0o640)
        with path.open("rb") as before:
            parquet.reencrypt_file(
                path, path, mode.keys(RICH_LEAVES), turned.keys(RICH_LEAVES), same_size=same_size, allow_ctr=mode.ctr
            )
            assert os.fstat(before.fileno()).st_ino != path.stat().st_ino
            assert data_of(unseal(before.read(), mode, RICH_LEAVES)) == data_of(plain)  # a reader keeps the old one
        back = unseal(path, turned, RICH_LEAVES)
        assert pq.read_table(pa.BufferReader(back)).equals(pq.read_table(pa.BufferReader(plain)))
        assert path.stat().st_mode & 0o777 == 0o640
    path = files.write(tmp_path / "file", plain)
    parquet.encrypt_file(path, path, mode.keys(RICH_LEAVES))
    parquet.decrypt_file(path, path, mode.keys(RICH_LEAVES), allow_ctr=mode.ctr)
    assert data_of(path.read_bytes()) == data_of(plain)
    assert sorted(os.listdir(tmp_path)) == ["file", "fileFalse", "fileTrue"]


def test_hadoops_checksum_beside_a_target_is_removed(tmp_path: Path) -> None:
    sidecar = files.write(tmp_path / ".out.crc", b"crc")
    report = parquet.encrypt_file(rich(), tmp_path / "out", Keys(KF))
    assert not sidecar.exists()
    assert any(str(sidecar) in warning for warning in report.warnings)


def test_hadoops_checksum_elsewhere_is_left(tmp_path: Path) -> None:
    """The folder becomes a link to another one meanwhile: that is not where the file is made."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    files.write(folder / ".out.crc", b"crc")
    theirs = files.write(other / ".out.crc", b"crc")

    def progress(nbytes: int) -> None:
        if not folder.is_symlink():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(other)

    parquet.encrypt_file(rich(), folder / "out", Keys(KF), progress=progress)
    assert theirs.exists()
    assert os.listdir(other) == [".out.crc"]
    assert os.listdir(tmp_path / "moved") == ["out"]


def test_a_source_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    plain = rich()
    sealed = seal(plain, COLUMNS)
    for call, data in ((parquet.encrypt_file, plain), (parquet.decrypt_file, sealed)):
        state = {"reads": 0, "size": len(data) // 2}

        def answer(offset: int, right: bytes, state: dict[str, int] = state) -> bytes:
            state["reads"] += 1
            return right if state["reads"] <= 2 else right[: max(0, state["size"] - offset)]

        with pytest.raises((IntegrityError, FormatError, OSError)):
            call(Source(data, answer), tmp_path / "out", COLUMNS.keys(RICH_LEAVES), threads=1)
    assert os.listdir(tmp_path) == []


CUT = """
import os, sys
from ags_fast import parquet, AgsError
from ags_fast.parquet import Keys
path, op, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
size = os.path.getsize(path)
cut = []
def progress(nbytes):
    if not cut:
        os.truncate(path, 100_000)
    cut.append(nbytes)
keys = Keys(b"0123456789012345")
try:
    if op == "verify":
        parquet.verify(path, keys, threads=threads, progress=progress)
    else:
        call = parquet.encrypt_file if op == "encrypt" else parquet.decrypt_file
        call(path, path + ".out", keys, threads=threads, progress=progress)
except AgsError as error:
    print(type(error).__name__, error)
print(sorted(os.listdir(os.path.dirname(path))))
"""


@pytest.mark.parametrize("op", ["encrypt", "decrypt", "verify"])
def test_a_path_that_is_cut_while_it_is_read(tmp_path: Path, op: str) -> None:
    """No SIGBUS, no half a file."""
    table = pa.table({name: pa.array([os.urandom(10_000) for _ in range(200)]) for name in "abc"})
    for threads in (1, 2):
        path = tmp_path / "file"
        pq.write_table(table, path, use_dictionary=False, row_group_size=100)
        if op != "encrypt":
            parquet.encrypt_file(path, path, Keys(KF))
        out = run_python(CUT, path, op, threads)
        assert "cut" in out, out
        assert "['file']" in out, out


FULL = """
import os, resource, sys
from ags_fast import parquet
from ags_fast.parquet import Keys
path, limit, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
keys, new = Keys(b"0123456789012345"), Keys(b"x" * 32)
folder = os.path.dirname(path)
for call in (
    lambda: parquet.encrypt_file(path, folder + "/out", keys, threads=threads),
    lambda: parquet.decrypt_file(path + ".sealed", folder + "/out", keys, threads=threads),
    lambda: parquet.reencrypt_file(path + ".sealed", folder + "/out", keys, new, threads=threads),
    lambda: parquet.reencrypt_file(path + ".sealed", path + ".sealed", keys, new, same_size=True, threads=threads),
):
    try:
        call()
        print("written")
    except OSError as error:
        print(error.errno)
print(sorted(os.listdir(folder)))
"""


def test_a_full_disk(tmp_path: Path, corpus: dict[str, bytes]) -> None:
    import errno

    plain = corpus["large page"]
    files.write(tmp_path / "file", plain)
    before = seal(plain, UNIFORM, [("bytes",)])
    sealed = files.write(tmp_path / "file.sealed", before)
    assert UNIFORM.footer != KF
    parquet.reencrypt_file(sealed, sealed, UNIFORM.keys([]), Keys(KF))
    before = sealed.read_bytes()
    for limit, threads in ((4, 2), (1_000_000, 1), (1_000_000, 2), (len(plain) - 100, 2)):
        out = run_python(FULL, tmp_path / "file", limit, threads).split("\n")
        assert out[:4] == [str(errno.EFBIG)] * 4
        assert out[4] == "['file', 'file.sealed']"
    assert sealed.read_bytes() == before


# ---------------------------------------------------------------- inspect, verify, reports


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_inspect_needs_no_key(mode: Mode) -> None:
    plain = rich()
    sealed = seal(plain, mode)
    found = parquet.inspect(sealed)
    text = json.dumps(found)
    for secret in (mode.footer, *mode.leaf_keys(RICH_LEAVES).values()):
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text
    assert found["algorithm"] == mode.algorithm
    assert found["footer"] == ("signed" if mode.plaintext_footer else "encrypted")
    assert found["file_length"] == len(sealed)
    assert found["footer_length"] == int.from_bytes(sealed[-8:-4], "little")
    assert found["aad_prefix"] == (PREFIX.decode() if mode.prefix == "stored" else None)
    assert found["aad_prefix_required"] == (mode.prefix == "supplied")
    assert found["footer_key_metadata"] == "of the footer"
    assert len(found["aad_file_unique"]) == 16
    if not mode.plaintext_footer:
        assert found["columns"] is found["row_groups"] is found["num_rows"] is None
        return
    assert (found["row_groups"], found["num_rows"]) == (2, 24)
    assert "parquet-cpp" in found["created_by"]
    file = reference(sealed, mode, RICH_LEAVES)
    for column, leaf in zip(found["columns"], RICH_LEAVES, strict=True):
        chunks = [chunk for chunk in file.chunks() if chunk.path == leaf]
        kind = "plain" if chunks[0].key is None else "footer" if chunks[0].footer_key else "column"
        metadata = "of " + ".".join(leaf) if kind == "column" and mode.columns != "groups" else None
        if kind == "column" and mode.columns == "groups":
            metadata = "of " + leaf[0]
        nbytes = sum(chunk.meta[7] for chunk in chunks)
        assert column == {"path": ".".join(leaf), "key": kind, "key_metadata": metadata, "nbytes": nbytes}


def test_inspect_of_other_files(tmp_path: Path, corpus: dict[str, bytes]) -> None:
    for plain in corpus.values():
        found = parquet.inspect(plain)
        assert found["footer"] == "plain"
        assert found["algorithm"] is None
        assert json.dumps(found)
    for junk in (
        b"",
        b"PAR1",
        b"PAR1PAR1",
        bytes(100),
        b"PAR1" + bytes(20) + b"PARE",
        b"PARE" + b"\xff" * 20 + b"PARE",
    ):
        with pytest.raises(FormatError):
            parquet.inspect(junk)
    with pytest.raises(FileNotFoundError):
        parquet.inspect(tmp_path / "none")
    keys = Keys(KF, footer_metadata=b"\xff\x00")
    out = bytearray()
    parquet.encrypt_file(rich(), out, keys)
    assert parquet.inspect(out)["footer_key_metadata"] == {"hex": "ff00"}


@pytest.mark.parametrize("mode", MODES[::7], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_verify(mode: Mode, threads: int) -> None:
    sealed = seal(rich(), mode)
    done: list[int] = []
    report = parquet.verify(
        sealed,
        mode.keys(RICH_LEAVES),
        aad_prefix=mode.supplied,
        threads=threads,
        progress=done.append,
        allow_ctr=mode.ctr,
    )
    assert sum(done) <= len(sealed)
    assert json.dumps(report.to_dict())
    file = reference(sealed, mode, RICH_LEAVES)
    modules = list(file.modules())
    for row, leaf in zip(report.columns, RICH_LEAVES, strict=True):
        mine = [module for module in modules if module.path == leaf]
        sealed_ones = [module for module in mine if module.sealed]
        assert row.path == ".".join(leaf)
        assert row.modules == len(sealed_ones)
        assert row.data_pages == 4
        assert row.dictionary_pages == (2 if leaf == ("word",) else 0)
        assert row.authenticated == (mode.algorithm == GCM and bool(sealed_ones))
        pages = {ref.DATA_HEADER, ref.DATA_PAGE, ref.DICTIONARY_HEADER, ref.DICTIONARY_PAGE}
        assert row.nbytes == sum(module.length for module in mine if module.kind in pages)
    said = " ".join(report.warnings)
    assert ("pages carry no tag" in said) == (mode.algorithm == CTR)
    assert ("not encrypted, and not authenticated: list.list.element, open" in said) == (mode.columns == "partial")
    assert "belong to no module" not in said


def test_reports_say_what_was_done(tmp_path: Path) -> None:
    plain = files.write(tmp_path / "plain", rich())
    for mode in (*FOUR, Mode(columns="partial")):
        done: list[int] = []
        report = parquet.encrypt_file(
            plain, tmp_path / "sealed", mode.keys(RICH_LEAVES), progress=done.append, **mode.options
        )
        assert (report.op, report.algorithm, report.row_groups) == ("encrypt", mode.algorithm, 2)
        assert report.footer == ("signed" if mode.plaintext_footer else "encrypted")
        assert report.source_length == plain.stat().st_size
        assert report.file_length == (tmp_path / "sealed").stat().st_size
        assert sum(done) == len(data_of(plain.read_bytes()))
        verified = parquet.verify(tmp_path / "sealed", mode.keys(RICH_LEAVES), allow_ctr=mode.ctr)
        kinds = [(row.path, row.key, row.data_pages, row.dictionary_pages, row.authenticated) for row in report.columns]
        again = [
            (row.path, row.key, row.data_pages, row.dictionary_pages, row.authenticated) for row in verified.columns
        ]
        if mode.columns != "partial":
            assert kinds == again
        assert [one[:2] for one in kinds] == [one[:2] for one in again]
        assert json.dumps(report.to_dict())
        assert mode.footer.hex() not in json.dumps(report.to_dict())


def test_large_files_pass_in_parts(tmp_path: Path) -> None:
    """Memory is told, and does not grow with the file."""
    values = pa.array([os.urandom(5000) for _ in range(2000)], pa.binary())
    table = pa.table({"a": values, "b": values})
    source, sealed, back = (tmp_path / name for name in ("plain", "sealed", "back"))
    options: dict[str, Any] = {"data_page_size": 100_000, "write_batch_size": 10, "compression": "none"}
    pq.write_table(table, source, use_dictionary=False, **options)
    assert source.stat().st_size > 20_000_000
    for threads in (1, 2):
        report = parquet.encrypt_file(source, sealed, Keys(KF), threads=threads)
        assert report.buffer_nbytes < 12_000_000
        report = parquet.decrypt_file(sealed, back, Keys(KF), threads=threads)
        assert report.buffer_nbytes < 12_000_000
        assert data_of(back.read_bytes()) == data_of(source.read_bytes())


def test_drop_bloom_filters() -> None:
    plain = rich()
    out = bytearray()
    parquet.encrypt_file(plain, out, COLUMNS.keys(RICH_LEAVES), drop_bloom_filters=True)
    file = reference(bytes(out), COLUMNS, RICH_LEAVES)
    kinds = {module.kind for module in file.modules()}
    assert not kinds & {ref.BLOOM_HEADER, ref.BLOOM_BITSET}
    assert ref.OFFSET_INDEX in kinds
    back = unseal(out, COLUMNS, RICH_LEAVES)
    assert pq.read_table(pa.BufferReader(back)).equals(pq.read_table(pa.BufferReader(plain)))


def test_choices_are_checked() -> None:
    plain = rich()
    for options in (
        {"algorithm": "AES"},
        {"other_columns": "none"},
        {"v2_layout": None},
        {"threads": 0},
    ):
        refused(ValueError, ".", parquet.encrypt_file, plain, Keys(KF), **options)
    sealed = seal(plain, UNIFORM)
    keys = UNIFORM.keys([])
    for options in ({"missing": "hide"}, {"quirks": {"magic"}}, {"threads": -1}):
        refused(ValueError, ".", parquet.decrypt_file, sealed, keys, **options)
    refused(ValueError, ".", parquet.reencrypt_file, sealed, keys, keys, algorithm="AES")
    with pytest.raises(ValueError, match="missing"):
        parquet.verify(sealed, keys, missing="drop")


def test_plain_columns_with_a_wrong_crc() -> None:
    """The error names the row group, too."""
    mode = Mode(columns="partial")
    sealed = seal(rich(), mode)
    pages = [
        module
        for module in ref.ParquetFile(sealed, mode.footer, mode.leaf_keys(RICH_LEAVES)).modules()
        if module.path == ("open",) and module.kind == ref.DATA_PAGE and module.row_group == 1
    ]
    changed = bytearray(sealed)
    changed[pages[1].offset] ^= 1
    with pytest.raises(IntegrityError, match=r"CRC") as caught:
        parquet.verify(changed, mode.keys(RICH_LEAVES))
    error = caught.value
    assert (error.module, error.row_group, error.column, error.page) == ("data page", 1, "open", 1)
    assert "column 'open', row group 1" in str(error)
