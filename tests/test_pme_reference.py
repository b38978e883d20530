"""What the tests of ags_fast.parquet measure it by is right itself: the reference, the corpus, the other programs."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parquet_corpus
import parquet_peers as peers
import pme_reference as ref
import pytest
from cryptography.exceptions import InvalidTag
from parquet_corpus import CORPUS, ENCRYPTED, MASTER_KEYS, UNREADABLE, flat, nested, parquet_testing_keys
from parquet_peers import CTR, GCM, ParquetJava, PeerError, PmeKeys, rows_of
from pme_reference import MalformedError, ParquetFile, Pkmt1

if TYPE_CHECKING:
    from collections.abc import Callable

pa, pq = peers.pa, peers.pq

KF, K1, K2 = b"0123456789012345", b"1234567890123450", b"1234567890123451"
REFUSED = (InvalidTag, MalformedError)
PAGED = {"row_group_size": 200, "max_rows_per_page": 50, "write_page_index": True, "write_page_checksum": True}
needs_java = pytest.mark.spark  # no Spark here, but what comes with it


def opened(path: Path | bytes, *args: Any, **kwargs: Any) -> list[ref.Module]:
    return list(ParquetFile(path, *args, **kwargs).modules())


def kinds(modules: list[ref.Module]) -> set[str]:
    return {module.name for module in modules}


def test_nothing_of_the_engine_is_in_it() -> None:
    program = "import sys, pme_reference; assert not [name for name in sys.modules if name.startswith('ags_fast')]"
    subprocess.run([sys.executable, "-c", program], cwd=Path(ref.__file__).parent, check=True)


# ---------------------------------------------------------------- Thrift

THRIFT = bytes.fromhex(
    "11"  # field 1: true
    "12"  # field 2: false
    "13 ff"  # field 3: byte
    "15 01"  # field 4: i32, -1
    "16 ffffffffffffffffff01"  # field 5: i64, the least
    "17 000000000000f03f"  # field 6: double
    "18 03 616263"  # field 7: binary
    "19 31 010201"  # field 8: list of three booleans
    "19 f5 0f 000000000000000000000000000000"  # field 9: list of 15, in the long form
    "1b 01 85 016b 04"  # field 10: map of binary to i32
    "1b 00"  # field 11: empty map
    "1c 15 02 00"  # field 12: struct
    "1d 000102030405060708090a0b0c0d0e0f"  # field 13: uuid
    "1a 18 00"  # field 14: set of one empty binary
    "05 d00f 7e"  # field 1000: i32, its id in full
    "00"
)


def test_thrift_comes_back_byte_for_byte() -> None:
    parsed, end = ref.parse(b"before" + THRIFT + b"after", 6)
    assert end == 6 + len(THRIFT)
    assert ref.serialise(parsed) == THRIFT
    assert [parsed[i] for i in (1, 2, 3, 4, 5, 7, 1000, 999)] == [True, False, 255, -1, -(1 << 63), b"abc", 63, None]
    assert parsed[8] == ref.List(ref.TRUE, [1, 2, 1])
    assert len(parsed[9].items) == 15
    assert parsed[10] == ref.Map(ref.BINARY, ref.I32, [(b"k", 2)])
    assert parsed[11].items == []
    assert parsed[12][1] == 1
    assert parsed[13] == bytes(range(16))
    assert parsed[14].items == [b""]

    parsed.set(12, ref.I32, 5)
    parsed.remove(13)
    parsed.set(20, ref.BINARY, b"new")
    again, _ = ref.parse(ref.serialise(parsed))
    assert again == parsed
    assert [number for number, _, _ in again.fields] == [*range(1, 13), 14, 20, 1000]


@pytest.mark.parametrize(
    "thrift",
    [
        b"\x05\x02\x00\x00",  # field 1 with its id in full
        b"\x15\x80\x00\x00",  # a varint that is longer than it has to be
        b"\x19\xf5\x01\x00\x00",  # a list of one in the long form
        b"\x16" + b"\xff" * 10 + b"\x01\x00",
        b"\x18\xff\xff\xff\xff\x0f",  # binary that would be larger than the rest
        b"\x19\xf5\xff\xff\xff\xff\x0f",
        b"\x1c" * 100 + b"\x00" * 101,
        b"\x19\x19" * 100,
        b"\x1e\x00",
    ],
)
def test_other_thrift_is_refused(thrift: bytes) -> None:
    with pytest.raises(MalformedError):
        ref.parse(thrift)


def test_cut_thrift_is_refused() -> None:
    for cut in range(len(THRIFT)):
        with pytest.raises(MalformedError):
            ref.parse(THRIFT[:cut])


# ---------------------------------------------------------------- modules


def test_aad_of_modules() -> None:
    """Spec 4.4.2: which module has which ordinals."""
    for kind in range(10):
        aad = ref.module_aad(b"prefixunique", kind, 0x0102, 0x0304, 0x0506)
        ordinals = "" if kind == 0 else "02010403" + ("0605" if kind in (2, 4) else "")
        assert aad == b"prefixunique" + bytes([kind]) + bytes.fromhex(ordinals)


@pytest.mark.parametrize("ctr", [False, True])
@pytest.mark.parametrize("plain", [b"", b"sixteen bytes ..", b"y" * 1000])
def test_module(plain: bytes, ctr: bool) -> None:
    framed = ref.seal(K1, plain, b"aad", ctr=ctr)
    assert len(framed) == len(plain) + (16 if ctr else 32)
    assert struct.unpack("<I", framed[:4])[0] == len(framed) - 4
    assert ref.unseal(K1, framed, b"aad", ctr=ctr) == plain
    assert not plain or plain not in framed
    for wrong in (framed + b"\0", framed[:-1], framed[:15], b""):
        with pytest.raises(MalformedError):
            ref.unseal(K1, wrong, b"aad", ctr=ctr)
    if not ctr:
        for key, aad in ((K2, b"aad"), (K1, b"other")):
            with pytest.raises(InvalidTag):
                ref.unseal(key, framed, aad)


# ---------------------------------------------------------------- files of other projects


@pytest.mark.parametrize("name", ENCRYPTED)
def test_parquet_testing(vectors: Path, name: str) -> None:
    algorithm, magic, keyed = ENCRYPTED[name]
    path = vectors / "parquet-testing" / "data" / f"{name}.parquet.encrypted"
    footer, columns = parquet_testing_keys(name)
    prefix = b"tester" if "disable_aad" in name else None
    if name.startswith("external"):
        material = Pkmt1(MASTER_KEYS, path)
        file = ParquetFile(path, material.footer, material)
    else:
        file = ParquetFile(path, footer, columns, aad_prefix=prefix)
    assert (file.algorithm, file.magic) == (algorithm, magic)
    modules = list(file.modules())
    assert {"footer", "data page", "data page header"} <= kinds(modules)
    assert ({"bloom filter header", "bloom filter bitset"} <= kinds(modules)) == ("bloom" in name)
    chunks = list(file.chunks())
    assert sum(chunk.key is not None and not chunk.footer_key for chunk in chunks) == keyed
    assert sum(chunk.meta[5] for chunk in chunks if "." not in ".".join(chunk.path)) > 0
    assert [one for one in file.complaints() if "[16]" not in one] == []  # size statistics are left in the open
    assert file.contents()

    if prefix:
        with pytest.raises(MalformedError, match="must be supplied"):
            ParquetFile(path, footer, columns)
    with pytest.raises(REFUSED):
        ParquetFile(path, bytes(len(footer) - 1) + b"1", columns, aad_prefix=prefix)


# ---------------------------------------------------------------- files that pyarrow encrypts


@pytest.mark.parametrize("make", [flat, nested])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize("algorithm", [GCM, CTR])
def test_pyarrow_changes_nothing_but_what_it_must(
    tmp_path: Path, algorithm: str, plaintext_footer: bool, version: str, make: Callable[[], Any]
) -> None:
    options: dict[str, Any] = {**PAGED, "data_page_version": version}
    pq.write_table(make(), tmp_path / "plain", **options)
    keys = PmeKeys(KF, algorithm=algorithm, plaintext_footer=plaintext_footer, aad_prefix=b"here")
    peers.pyarrow_write(make(), tmp_path / "sealed", keys, **options)
    plain, sealed = ParquetFile(tmp_path / "plain"), ParquetFile(tmp_path / "sealed", KF)
    assert sealed.algorithm == algorithm
    assert sealed.aad_prefix == b"here"
    contents = sealed.contents()
    assert contents == plain.contents()
    assert len(contents) > 150
    modules = list(sealed.modules())
    assert all(module.sealed and module.ctr == (algorithm == CTR and module.kind in ref.PAGES) for module in modules)
    assert [one for one in sealed.complaints() if "[16]" not in one] == []


@pytest.mark.parametrize("double_wrapping", [False, True])
@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_key_material_of_pyarrow(tmp_path: Path, plaintext_footer: bool, internal: bool, double_wrapping: bool) -> None:
    """Column keys of 256 bits, columns in the open, and a key that is not held."""
    path = tmp_path / "file"
    config: dict[str, Any] = {"double_wrapping": double_wrapping, "internal_key_material": internal}
    columns = {"kc1": ["id"], "kc2": ["text", "bytes"]}
    peers.pyarrow_factory_write(
        flat(), path, MASTER_KEYS, "kf", column_keys=columns, plaintext_footer=plaintext_footer, data_key_length_bits=256, **config  # noqa: E501
    )  # fmt: skip
    pq.write_table(flat(), tmp_path / "plain")
    material = Pkmt1(MASTER_KEYS, None if internal else path)
    file = ParquetFile(path, material.footer, material)
    assert file.contents() == ParquetFile(tmp_path / "plain").contents()
    found = {chunk.path: chunk.key for chunk in file.chunks()}
    assert {path for path, key in found.items() if key is not None} == {("id",), ("text",), ("bytes",)}
    assert {len(key) for key in found.values() if key} == {32} == {len(file.footer_key)}

    fewer = Pkmt1({"kf": KF, "kc1": K1}, None if internal else path)
    chunks = [chunk.path for chunk in ParquetFile(path, fewer.footer, fewer).chunks()]
    assert chunks == [one for one in file.leaves if one not in (("text",), ("bytes",))]

    assert rows_of(peers.pyarrow_factory_read(path, MASTER_KEYS, external=not internal)) == rows_of(flat())
    with pytest.raises(PermissionError, match="kc2"):
        peers.pyarrow_factory_read(path, fewer.master_keys, external=not internal)


@pytest.mark.parametrize("double_wrapping", [False, True])
def test_key_material_of_ones_own(tmp_path: Path, double_wrapping: bool) -> None:
    material = Pkmt1(MASTER_KEYS)
    metadata = material.metadata(K2, "kc1", footer=True, double_wrapping=double_wrapping)
    assert material.footer(metadata) == K2
    assert material(("a",), metadata) == K2
    assert Pkmt1({"kf": KF})(("a",), metadata) is None
    with pytest.raises(InvalidTag):
        Pkmt1({"kc1": KF}).key(metadata)
    with pytest.raises(MalformedError):
        material.footer(material.metadata(K2, "kc1"))


# ---------------------------------------------------------------- tampering


def small(path: Path, keys: PmeKeys, **options: Any) -> bytes:
    """Two columns of numbers, in pages of equal length."""
    table = pa.table({"a": pa.array(range(32), pa.int64()), "b": pa.array(range(32), pa.int64())})
    plain = {"use_dictionary": False, "compression": "none", "store_schema": False, "write_statistics": False}
    more: dict[str, Any] = {"row_group_size": 16, "max_rows_per_page": 8, "write_page_index": False, **plain, **options}
    peers.pyarrow_write(table, path, keys, **more)
    return path.read_bytes()


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_every_byte_and_every_cut(tmp_path: Path, plaintext_footer: bool) -> None:
    keys = PmeKeys(KF, plaintext_footer=plaintext_footer, aad_prefix=b"p")
    data = small(tmp_path / "file", keys)
    assert len(opened(data, KF)) > 16
    for at in range(len(data)):
        for changed in (data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :], data[:at]):
            with pytest.raises(REFUSED):
                opened(changed, KF)


def test_places_of_modules(tmp_path: Path) -> None:
    """A module opens in its place only: not as another page, column, row group, or in another file with the key."""
    data, other = (small(tmp_path / name, PmeKeys(KF), write_page_index=True) for name in ("one", "two"))
    file, elsewhere = ParquetFile(data, KF), ParquetFile(other, KF)
    modules = [module for module in file.modules() if module.kind != ref.FOOTER]
    pairs = 0
    for one, two in itertools.permutations(modules, 2):
        if one.kind == two.kind and one.length == two.length:
            pairs += 1
            with pytest.raises(InvalidTag):
                opened(file.replace(one, file.stored(two)), KF)
    assert pairs > 60
    for one, two in zip(modules, list(elsewhere.modules())[1:], strict=True):
        if one.length == two.length:
            with pytest.raises(InvalidTag):
                opened(file.replace(one, elsewhere.stored(two)), KF)


@needs_java
@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_every_type_of_module(tmp_path: Path, parquet_java: ParquetJava, plaintext_footer: bool) -> None:
    """All ten types in one file; a bit of each module turned over, in column metadata with the footer sealed again."""
    CORPUS["bloom filters"](tmp_path / "plain")
    keys = PmeKeys(KF, {"text": K1, "id": None}, plaintext_footer=plaintext_footer)
    parquet_java.write(tmp_path / "plain", tmp_path / "file", keys, bloom_filters=["text", "id"], row_group_rows=300)
    file = ParquetFile(tmp_path / "file", KF, keys.columns)  # type: ignore[arg-type]
    sealed = [module for module in file.modules() if module.sealed]
    assert kinds(sealed) == set(ref.MODULE_NAMES)
    for module in sealed:
        for byte in (4, -1):  # nonce, tag
            with pytest.raises(REFUSED):
                opened(file.flip(module, byte), KF, keys.columns)
        if module.kind != ref.FOOTER:
            assert file.replace(module, file.stored(module))[: file.tail] == file.data[: file.tail]
    again = ParquetFile(file.with_footer(), KF, keys.columns)  # type: ignore[arg-type]
    assert again.contents() == file.contents()

    footer, _ = ref.parse(ref.serialise(file.footer))
    footer[4].items.reverse()
    with pytest.raises(MalformedError, match="row group"):
        opened(file.with_footer(footer), KF, keys.columns)
    with pytest.raises(REFUSED):
        ParquetFile(file.with_footer(key=K1), KF)


@pytest.mark.parametrize("checksums", [False, True])
def test_pages_of_ctr_carry_no_tag(tmp_path: Path, checksums: bool) -> None:
    data = small(tmp_path / "file", PmeKeys(KF, algorithm=CTR), write_page_checksum=checksums)
    file = ParquetFile(data, KF)
    for module in file.modules():
        if not module.ctr or checksums:
            with pytest.raises(REFUSED):
                opened(file.flip(module), KF)
        else:
            [other] = [one for one in opened(file.flip(module), KF) if one.at == module.at]
            assert other.plain == module.plain[:-1] + bytes([module.plain[-1] ^ 1])


@needs_java
def test_page_checksums_are_looked_at(tmp_path: Path, parquet_java: ParquetJava) -> None:
    keys = PmeKeys(KF, algorithm=CTR)
    file = ParquetFile(small(tmp_path / "file", keys, write_page_checksum=True), KF)
    [page, *_] = [module for module in file.modules() if module.ctr]
    (tmp_path / "flipped").write_bytes(file.flip(page))
    for read in (parquet_java.read, peers.pyarrow_read):
        assert read(tmp_path / "file", keys).num_rows == 32
        with pytest.raises((PeerError, OSError), match=r"(?i)crc|checksum"):
            read(tmp_path / "flipped", keys)


def test_counts_and_places_that_do_not_fit(tmp_path: Path) -> None:
    """What is sealed rightly and is not true."""
    options: dict[str, Any] = {"write_page_index": True, "bloom_filter_options": {"id": {"ndv": 10}}}
    pq.write_table(flat(), tmp_path / "file", **options)
    file = ParquetFile(tmp_path / "file")
    for number in (5, 14, 15):  # values, place and length of the bloom filter
        footer, _ = ref.parse(ref.serialise(file.footer))
        meta = footer[4].items[0][1].items[0][3]
        meta.set(number, ref.I64, meta[number] - 1)
        with pytest.raises(MalformedError):
            opened(file.with_footer(footer))

    sealed = ParquetFile(small(tmp_path / "sealed", PmeKeys(KF), write_page_index=True), KF)
    for number, told in ((6, "-1 uncompressed"), (7, "1 bytes")):  # headers as they are stored are in both
        footer, _ = ref.parse(ref.serialise(sealed.footer))
        meta = footer[4].items[0][1].items[0][3]
        meta.set(number, ref.I64, meta[number] + (1 if number == 6 else -1))
        with pytest.raises(MalformedError, match=told):
            opened(sealed.with_footer(footer), KF)
    [index, *_] = [module for module in sealed.modules() if module.kind == ref.OFFSET_INDEX]
    for number in (1, 2):
        changed, _ = ref.parse(index.plain)
        location = changed[1].items[1]
        location.set(number, ref.I64 if number == 1 else ref.I32, location[number] - 1)
        framed = ref.seal(KF, ref.serialise(changed), ref.module_aad(sealed.aad, ref.OFFSET_INDEX, 0, 0))
        with pytest.raises(MalformedError, match="offset index"):
            opened(sealed.replace(index, framed), KF)


def test_prefixes_and_keys(tmp_path: Path) -> None:
    stored = small(tmp_path / "stored", PmeKeys(KF, aad_prefix=b"p"))
    not_stored = small(tmp_path / "not", PmeKeys(KF, aad_prefix=b"p", store_aad_prefix=False))
    assert opened(stored, KF) == opened(stored, KF, aad_prefix=b"p")
    assert len(opened(not_stored, KF, aad_prefix=b"p")) == len(opened(stored, KF))
    with pytest.raises(MalformedError, match="another AAD prefix"):
        ParquetFile(stored, KF, aad_prefix=b"q")
    with pytest.raises(MalformedError, match="must be supplied"):
        ParquetFile(not_stored, KF)
    for key, prefix in ((KF, b"q"), (K1, b"p")):
        with pytest.raises(InvalidTag):
            ParquetFile(not_stored, key, aad_prefix=prefix)
    with pytest.raises(MalformedError, match="needs its key"):
        ParquetFile(stored)
    open_footer = small(tmp_path / "open", PmeKeys(KF, plaintext_footer=True))
    assert ParquetFile(open_footer).leaves == [("a",), ("b",)]
    assert opened(open_footer)[1:] == []
    with pytest.raises(MalformedError, match="signature"):
        ParquetFile(open_footer, K1)
    assert KF.decode() not in repr(list(ParquetFile(stored, KF).chunks()))


def test_what_is_complained_of(tmp_path: Path) -> None:
    """Footers that are sealed again, with what other readers trip over."""
    options: dict[str, Any] = {"row_group_size": 300, "max_rows_per_page": 100}
    peers.pyarrow_write(flat(), tmp_path / "file", PmeKeys(KF), **options)
    peers.pyarrow_write(flat(), tmp_path / "open", PmeKeys(KF, plaintext_footer=True), **options)

    def complaints(edit: Callable[[ref.Struct], None], name: str = "file") -> str:
        file = ParquetFile(tmp_path / name, KF)
        footer, _ = ref.parse(ref.serialise(file.footer))
        edit(footer[4].items[1])
        return " / ".join(ParquetFile(file.with_footer(footer), KF).complaints())

    def text(group: ref.Struct) -> ref.Struct:
        return group[1].items[4][3]

    assert complaints(lambda group: None) == ""
    assert "no ordinal" in complaints(lambda group: group.remove(7))
    assert "file_offset 4" in complaints(lambda group: group.set(5, ref.I64, 4))
    assert "file_offset None" in complaints(lambda group: group.remove(5))
    assert "has sizes 7" in complaints(lambda group: group.set(2, ref.I64, 7))
    assert complaints(lambda group: text(group).remove(13)) == ""

    def without_a_trace_of_the_dictionary(group: ref.Struct) -> None:
        text(group).remove(13)
        text(group).set(2, ref.LIST, ref.List(ref.I32, [0]))

    assert "for no dictionary" in complaints(without_a_trace_of_the_dictionary)
    opened_statistics = complaints(lambda group: text(group).set(12, ref.STRUCT, ref.Struct()), "open")
    assert "row group 1, text: fields [12, 16]" in opened_statistics


# ---------------------------------------------------------------- the corpus


def test_corpus_has_what_the_format_has(corpus: dict[str, Path]) -> None:
    features: set[Any] = set()
    for name, path in corpus.items():
        file = ParquetFile(path)
        modules = list(file.modules())
        groups = file.footer[4].items
        features |= {("module", kind) for kind in kinds(modules)}
        features |= {"sorting columns"} if any(group[4] for group in groups) else set()
        features |= {"group without rows"} if len(groups) > 1 and any(group[3] == 0 for group in groups) else set()
        features |= {"no group"} if not groups else {"16 groups"} if len(groups) > 15 else set()
        features |= {"16 columns"} if len(file.leaves) > 15 else set()
        features |= {"no column"} if not file.leaves else set()
        features |= {"dot in a name"} if any("." in part for leaf in file.leaves for part in leaf) else set()
        features |= {"nested"} if any(len(leaf) > 3 for leaf in file.leaves) else set()
        features |= {"long key-value"} if any(len(pair[2] or b"") > 5000 for pair in (file.footer[5] or ref.List(0, [])).items) else set()  # fmt: skip  # noqa: E501
        for chunk in file.chunks():
            meta = chunk.meta
            features |= {("codec", meta[4]), ("type", meta[1])} | {("encoding", one) for one in meta[2].items}
            features |= {"size statistics"} if meta[16] else set()
            features |= {"no statistics"} if not meta[12] and meta[5] else set()
            if meta[11] and not meta[9]:
                features.add("only a dictionary")
            pages = [module for module in modules if module.path == chunk.path and module.row_group == chunk.row_group]
            for header in pages:
                if header.kind in (ref.DATA_HEADER, ref.DICTIONARY_HEADER):
                    parsed, _ = ref.parse(header.plain)
                    features |= {("page", parsed[1]), ("crc", parsed[4] is not None)}
                    if parsed[8]:
                        features |= {("levels", parsed[8][5] > 0, parsed[8][6] > 0)}
            if len(pages) > 2000:
                features.add("1000 pages")
            if any(len(page.plain) > 1 << 21 for page in pages):
                features.add("2 MiB page")
        assert file.contents(), name
    wanted = {
        *(("module", name) for name in ref.MODULE_NAMES if name != "column metadata"),
        *(("codec", one) for one in (0, 1, 2, 6, 7)),  # none, snappy, gzip, zstd, LZ4_RAW
        *(("type", one) for one in range(8)),
        *(("encoding", one) for one in (0, 3, 5, 6, 7, 8, 9)),
        *(("page", one) for one in (0, 2, 3)),
        *(("levels", *both) for both in ((False, False), (True, False), (True, True))),
        ("crc", True),
        ("crc", False),
        "sorting columns",
        "group without rows",
        "no group",
        "16 groups",
        "16 columns",
        "no column",
        "dot in a name",
        "nested",
        "long key-value",
        "size statistics",
        "no statistics",
        "only a dictionary",
        "1000 pages",
        "2 MiB page",
    }
    assert wanted - features == set()


def test_corpus_is_the_same_each_time(corpus: dict[str, Path], tmp_path: Path) -> None:
    for name, make in CORPUS.items():
        make(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == corpus[name].read_bytes(), name


READERS = {"polars": peers.polars_read, "duckdb": peers.duckdb_read, "fastparquet": peers.fastparquet_read}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_the_corpus(corpus: dict[str, Path], reader: str) -> None:
    for name, path in corpus.items():
        if name not in UNREADABLE.get(reader, set()):
            table = READERS[reader](path)  # type: ignore[operator]
            if reader == "fastparquet":  # with types of pandas
                assert table.num_rows == len(parquet_corpus.rows(path)), name
            else:
                assert rows_of(table) == parquet_corpus.rows(path), name


# ---------------------------------------------------------------- parquet-java


@needs_java
def test_parquet_java_reads_the_corpus(corpus: dict[str, Path], parquet_java: ParquetJava) -> None:
    for name, path in corpus.items():
        if name in UNREADABLE["parquet-java"]:
            with pytest.raises(PeerError):
                parquet_java.read(path)
        else:
            assert rows_of(parquet_java.read(path)) == parquet_corpus.rows(path), name


@needs_java
@pytest.mark.parametrize(
    ("algorithm", "plaintext_footer", "size"), [(GCM, False, 16), (GCM, True, 24), (CTR, False, 32), (CTR, True, 16)]
)
def test_pyarrow_to_parquet_java_and_back(
    tmp_path: Path, parquet_java: ParquetJava, algorithm: str, plaintext_footer: bool, size: int
) -> None:
    keys = PmeKeys(bytes(range(size)), algorithm=algorithm, plaintext_footer=plaintext_footer, aad_prefix=b"p")
    table = nested(300)
    peers.pyarrow_write(table, tmp_path / "there", keys, **PAGED)
    assert rows_of(parquet_java.read(tmp_path / "there", keys)) == rows_of(table)
    pq.write_table(table, tmp_path / "plain")
    parquet_java.write(tmp_path / "plain", tmp_path / "back", keys, codec="zstd", page_rows=50)
    assert rows_of(peers.pyarrow_read(tmp_path / "back", keys)) == rows_of(table)
    for wrong in (PmeKeys(bytes(size - 1) + b"1"), PmeKeys(keys.footer, aad_prefix=b"q")):
        for path, read in itertools.product(("there", "back"), (parquet_java.read, peers.pyarrow_read)):
            with pytest.raises((PeerError, OSError, pa.ArrowInvalid)):
                read(tmp_path / path, wrong)


@needs_java
@pytest.mark.parametrize(
    ("complete", "plaintext_footer", "writer"),
    [(False, False, "v1"), (False, True, "v2"), (True, False, "v2"), (True, True, "v1")],
)
def test_parquet_java_changes_nothing_but_what_it_must(
    tmp_path: Path, parquet_java: ParquetJava, complete: bool, plaintext_footer: bool, writer: str
) -> None:
    """Column keys, a column of the footer key, the rest open or not; in V2 pages levels are in the open."""
    pq.write_table(nested(), tmp_path / "source")
    options: dict[str, Any] = {"writer": writer, "bloom_filters": ["id"], "page_rows": 50, "row_group_rows": 200}
    columns = {"id": K1, "list.list.element": None, ("map", "key_value", "key"): K2 * 2}
    more: dict[str, Any] = {
        "plaintext_footer": plaintext_footer,
        "complete": complete,
        "algorithm": CTR if complete else GCM,
    }
    keys = PmeKeys(KF, columns, aad_prefix=b"p", store_aad_prefix=complete, column_metadata={"id": b"k1"}, **more)  # type: ignore[arg-type]
    parquet_java.write(tmp_path / "source", tmp_path / "plain", **options)
    parquet_java.write(tmp_path / "source", tmp_path / "sealed", keys, **options)
    file = ParquetFile(tmp_path / "sealed", KF, columns, aad_prefix=b"p")  # type: ignore[arg-type]
    assert file.contents() == ParquetFile(tmp_path / "plain").contents()
    pages = [module for module in file.modules() if module.kind == ref.DATA_PAGE]
    assert all(module.sealed for module in pages) == complete
    assert any(module.levels for module in pages) == (writer == "v2")
    assert {chunk.key_metadata for chunk in file.chunks() if chunk.path == ("id",)} == {b"k1"}
    assert rows_of(parquet_java.read(tmp_path / "sealed", keys)) == rows_of(nested())
    assert [one for one in file.complaints() if "[16]" not in one] == []
    if not keys.store_aad_prefix:
        with pytest.raises(MalformedError, match="must be supplied"):
            ParquetFile(tmp_path / "sealed", KF, columns)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=r"KeyAccessDenied|Crypto"):
        parquet_java.read(tmp_path / "sealed", PmeKeys(KF, {"id": K1}, aad_prefix=b"p"))


@needs_java
@pytest.mark.parametrize("double_wrapping", [False, True])
@pytest.mark.parametrize("internal", [False, True])
def test_key_material_of_parquet_java(
    tmp_path: Path, parquet_java: ParquetJava, internal: bool, double_wrapping: bool
) -> None:
    """PropertiesDrivenCryptoFactory's files in pyarrow's CryptoFactory and in the reference, and pyarrow's in it."""
    pq.write_table(flat(), tmp_path / "plain")
    path = tmp_path / "java.parquet"
    conf = peers.keytools_conf(
        MASTER_KEYS,
        footer_key="kf",
        column_keys="kc1:id,text;kc2:real",
        double_wrapping=double_wrapping,
        key_material_store_internally=internal,
        data_key_length_bits=192,
    )
    parquet_java.write(tmp_path / "plain", path, conf)
    external = None if internal else path
    material = Pkmt1(MASTER_KEYS, external)
    file = ParquetFile(path, material.footer, material)
    assert len(list(file.chunks())) == 7
    assert len(file.footer_key) == 24
    assert rows_of(peers.pyarrow_factory_read(path, MASTER_KEYS, external=not internal)) == rows_of(flat())

    path = tmp_path / "pyarrow.parquet"
    config: dict[str, Any] = {"column_keys": {"kc1": ["id", "text"]}, "double_wrapping": double_wrapping}
    peers.pyarrow_factory_write(flat(), path, MASTER_KEYS, "kf", internal_key_material=internal, **config)
    assert rows_of(parquet_java.read(path, peers.keytools_conf(MASTER_KEYS))) == rows_of(flat())
    with pytest.raises(PeerError, match="no master key kc1"):
        parquet_java.read(path, peers.keytools_conf({"kf": KF}))


@needs_java
def test_filters_of_parquet_java(corpus: dict[str, Path], tmp_path: Path, parquet_java: ParquetJava) -> None:
    """Each filter, on its own, keeps rows out by what is encrypted."""
    keys = PmeKeys(KF)
    pages, blooms = tmp_path / "pages", tmp_path / "blooms"
    peers.pyarrow_write(pq.read_table(corpus["page index"]), pages, keys, **{**PAGED, "max_rows_per_page": 20})
    parquet_java.write(corpus["bloom filters"], blooms, keys, bloom_filters=["id"], row_group_rows=300)

    def left(path: Path, column: str, value: Any, *use: str) -> tuple[int, ...]:
        count = parquet_java.count(path, keys, **{"column": column, "is": "eq", "value": value, "use": use})
        return tuple(count[name] for name in ("row_groups", "row_group_rows", "page_rows", "rows"))

    assert left(pages, "id", 333) == (3, 600, 600, 600)  # nothing may be looked at
    assert left(pages, "id", 333, "stats") == (1, 200, 200, 200)
    assert left(pages, "id", 333, "column index") == (3, 600, 20, 20)
    assert left(pages, "id", 333, "stats", "column index", "rows") == (1, 200, 20, 1)
    assert left(pages, "text", "b", "dictionary") == (0, 0, 0, 0)
    assert left(pages, "text", "a", "dictionary")[0] == 3
    assert left(blooms, "id", 601, "stats") == (2, 600, 600, 600)
    assert left(blooms, "id", 601, "bloom") == (0, 0, 0, 0)
    assert left(blooms, "id", 600, "bloom", "rows") == (1, 300, 300, 1)
    only = {"column": "id", "is": "lt", "value": 5}
    assert [row["id"] for row in rows_of(parquet_java.read(pages, keys, only))] == [0, 1, 2, 3, 4]


@needs_java
def test_splits_of_parquet_java(tmp_path: Path, parquet_java: ParquetJava) -> None:
    """Every row group is read by just one of the tasks that a file is split into, wherever the cuts are."""
    keys = PmeKeys(KF, {"id": K1, "text": None})
    pq.write_table(flat(), tmp_path / "plain")
    parquet_java.write(tmp_path / "plain", tmp_path / "file", keys, row_group_rows=150)
    size = (tmp_path / "file").stat().st_size
    for step in (size + 1, 5000, 777):
        tasks = parquet_java.splits(tmp_path / "file", keys, [(at, at + step) for at in range(0, size, step)])
        assert sorted(group for task in tasks for group in task["row_groups"]) == [0, 1, 2, 3]
        assert sum(task["rows"] for task in tasks) == 600
        offsets = [offset for task in tasks for offset in task["offsets"]]
        assert offsets == sorted(offsets)
        assert offsets[0] == 4


@needs_java
@pytest.mark.parametrize("keys", [PmeKeys(KF), PmeKeys(KF, {"id": K1}, plaintext_footer=True)])
def test_rewriter_of_parquet_java(tmp_path: Path, parquet_java: ParquetJava, keys: PmeKeys) -> None:
    pq.write_table(flat(), tmp_path / "plain")
    seconds = parquet_java.rewrite(tmp_path / "plain", tmp_path / "sealed", keys, times=2)
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert rows_of(parquet_java.read(tmp_path / "sealed", keys)) == rows_of(flat())
    sealed = [chunk.path for chunk in ParquetFile(tmp_path / "sealed", KF, keys.columns).chunks() if chunk.key]  # type: ignore[arg-type]
    assert sealed == ([("id",)] if keys.columns else [(name,) for name in flat().column_names])
    with pytest.raises(PeerError, match=r"already encrypted|No keys available"):
        parquet_java.rewrite(tmp_path / "sealed", tmp_path / "again", keys)


@needs_java
def test_a_jvm_that_is_gone_is_told() -> None:
    with ParquetJava() as peer:
        peer.kill()
        with pytest.raises(RuntimeError, match="JVM is gone"):
            peer.ask("copy")


def test_the_cache_is_filled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second waits; what could not be made is not there, and fails in CI only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun: list[Path] = []
    waiting = threading.Event()

    def make(folder: Path) -> None:
        begun.append(folder)
        assert waiting.wait(30)
        (folder / "content").write_text("whole")

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(peers.cached, "thing", make) for _ in range(4)]
        waiting.set()
        folders = {call.result() for call in calls}
    assert len(begun) == 1
    assert [(folder / "content").read_text() for folder in folders] == ["whole"]

    for ci, outcome in (("", pytest.skip.Exception), ("true", pytest.fail.Exception)):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(outcome, match="not today"):
            peers.cached("other", lambda folder: peers.cannot("not today"))
        assert sorted(os.listdir(tmp_path / "ags_fast")) == ["other.lock", "thing", "thing.lock"]


# ---------------------------------------------------------------- the others


POLARS = {
    "uniform": PmeKeys(KF * 2),
    "columns": PmeKeys(KF, {"id": K1, "struct.name": K2}, aad_prefix=b"p"),
    "plaintext footer": PmeKeys(KF * 2, {"id": K1 * 2}, aad_prefix=b"p", store_aad_prefix=False, plaintext_footer=True),
}


@needs_java
@pytest.mark.parametrize("mode", POLARS)
def test_polars(tmp_path: Path, parquet_java: ParquetJava, mode: str) -> None:
    table, keys = nested(), POLARS[mode]
    peers.polars_write(table, tmp_path / "polars", keys)
    assert rows_of(parquet_java.read(tmp_path / "polars", keys)) == rows_of(table)
    file = ParquetFile(tmp_path / "polars", keys.footer, keys.columns, aad_prefix=keys.aad_prefix)  # type: ignore[arg-type]
    sealed = [".".join(chunk.path) for chunk in file.chunks() if chunk.key]
    assert sealed == [".".join(path) for path in file.leaves if not keys.columns or ".".join(path) in keys.columns]
    assert any(module.sealed for module in file.modules())
    assert file.complaints() == []
    pq.write_table(table, tmp_path / "plain")
    parquet_java.write(tmp_path / "plain", tmp_path / "java", keys)
    assert rows_of(peers.polars_read(tmp_path / "java", keys)) == rows_of(table)
    for path in ("polars", "java"):
        with pytest.raises(Exception, match=r"(?i)decrypt|signature"):
            peers.polars_read(tmp_path / path, PmeKeys(K1 * (len(keys.footer) // 16), keys.columns, keys.aad_prefix))


def test_duckdb_has_a_dialect(tmp_path: Path) -> None:
    """It reads back its own; a reader of the spec refuses it, and it reads a little of what others write."""
    pytest.importorskip("duckdb")
    table = flat(50).select(["id", "number"])
    peers.duckdb_write(table, tmp_path / "dialect", KF)
    assert rows_of(peers.duckdb_read(tmp_path / "dialect", KF)) == rows_of(table)
    with pytest.raises(MalformedError, match="unique"):
        ParquetFile(tmp_path / "dialect", KF)
    peers.pyarrow_write(table, tmp_path / "spec", PmeKeys(KF))
    assert rows_of(peers.duckdb_read(tmp_path / "spec", KF)) == rows_of(table)
    for path in ("dialect", "spec"):
        with pytest.raises(Exception, match=r"(?i)key|decrypt|tag"):
            peers.duckdb_read(tmp_path / path, K1)


def test_readers_of_file_objects(corpus: dict[str, Path]) -> None:
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("duckdb")
    pytest.importorskip("fastparquet")
    path = corpus["page index"]
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/peers/file.parquet", path.read_bytes())
    try:
        where: dict[str, Any] = {"columns": ("id", "text"), "where": "id < 7"}
        some = peers.duckdb_read_through(memory, "memory://peers/file.parquet", **where)
    finally:
        memory.rm("/peers", recursive=True)
    assert rows_of(some) == [{"id": row["id"], "text": row["text"]} for row in parquet_corpus.rows(path)[:7]]
    for read in (peers.duckdb_read_object, peers.pyarrow_read, peers.polars_read):
        with path.open("rb") as file:
            assert rows_of(read(file)) == parquet_corpus.rows(path)
    with path.open("rb") as file:
        assert rows_of(peers.fastparquet_read(file, ["id"])) == [{"id": i} for i in range(600)]


@pytest.mark.more
@pytest.mark.timeout(600)  # the first time on a machine it is downloaded
@pytest.mark.parametrize("version", peers.OLD_PYARROWS)
def test_older_pyarrow(tmp_path: Path, version: str) -> None:
    table = flat()
    config: dict[str, Any] = {"column_keys": {"kc1": ["id"]}, "plaintext_footer": True}
    new, old = tmp_path / "new", tmp_path / "old"
    peers.pyarrow_factory_write(table, new, MASTER_KEYS, "kf", **config)
    back = peers.with_old_pyarrow(version, peers.pyarrow_factory_read, new, MASTER_KEYS)
    assert rows_of(back) == rows_of(table)
    peers.with_old_pyarrow(version, peers.pyarrow_factory_write, table, old, MASTER_KEYS, "kf", **config)
    assert rows_of(peers.pyarrow_factory_read(old, MASTER_KEYS)) == rows_of(table)
    material = Pkmt1(MASTER_KEYS)
    file = ParquetFile(old, material.footer, material)
    assert f"version {version}." in file.footer[6].decode()
    assert list(file.modules())
    with pytest.raises(PeerError, match="no master key"):
        peers.with_old_pyarrow(version, peers.pyarrow_factory_read, new, {"kf": KF})
