"""What encrypt_file and reencrypt_file write, other programs read; what they write, inspect, verify, decrypt_file read.
All rows, each time, in every mode that a peer supports; and filters that keep rows out by what is encrypted.
"""

from __future__ import annotations

import io
import itertools
import json
from typing import TYPE_CHECKING, Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_corpus import ENCRYPTED, MASTER_KEYS, UNREADABLE, flat, nested, parquet_testing_keys
from parquet_files import Mode, key, seal, v2
from parquet_peers import CTR, GCM, ParquetJava, PeerError, PmeKeys, rows_of
from programs import spark
from shares import rest_in_more

from ags_fast import AgsError, FormatError, IntegrityError, PolicyError, parquet
from ags_fast.parquet import FOOTER_KEY, Keys

if TYPE_CHECKING:
    from pathlib import Path

pa, pq = peers.pa, peers.pq
KF, K1, K2 = b"0123456789012345", b"1234567890123450", b"1234567890123451"
PAGED = {"row_group_size": 200, "max_rows_per_page": 50, "write_page_index": True, "write_page_checksum": True}
needs_java = pytest.mark.spark


def ours(keys: PmeKeys) -> Keys:
    columns = {path: FOOTER_KEY if value is None else value for path, value in keys.columns.items()}
    metadata = keys.column_metadata
    return Keys(keys.footer, columns, footer_metadata=keys.footer_metadata, column_metadata=metadata)


def encrypt(source: Any, target: Any, keys: PmeKeys, **options: Any) -> Any:
    return parquet.encrypt_file(
        source,
        target,
        ours(keys),
        algorithm=keys.algorithm,  # type: ignore[arg-type]
        plaintext_footer=keys.plaintext_footer,
        other_columns="footer" if keys.complete or not keys.columns else "plain",
        aad_prefix=keys.aad_prefix,
        store_aad_prefix=keys.store_aad_prefix,
        **options,
    )


def decrypted(source: Any, keys: Any, *, tiled: bool = True, **options: Any) -> Any:
    """The table of a file that a peer wrote; it is inspected and verified too."""
    out = bytearray()
    asked = ours(keys) if isinstance(keys, PmeKeys) else keys
    found = parquet.inspect(source)
    known: dict[str, Any] = {"aad_prefix": keys.aad_prefix} if isinstance(keys, PmeKeys) else {}
    known |= {"allow_ctr": found["algorithm"] == CTR, **options}
    assert json.dumps(found)
    assert found["footer"] in ("encrypted", "signed")
    report = parquet.verify(source, asked, **known)
    assert report.columns
    assert any("belong to no module" in warning for warning in report.warnings) != tiled
    parquet.decrypt_file(source, out, asked, **known)
    return pq.read_table(pa.BufferReader(out), page_checksum_verification=True)


# ---------------------------------------------------------------- pyarrow


@pytest.mark.parametrize(
    ("size", "footer", "algorithm"),
    rest_in_more(
        itertools.product([16, 24, 32], [False, True], [GCM, CTR]),
        (16, False, GCM),
        (16, True, CTR),
        (24, False, CTR),
        (32, True, GCM),
    ),
)
def test_pyarrow_reads_the_corpus(corpus: dict[str, Path], algorithm: str, footer: bool, size: int) -> None:
    """With a key for all, CRCs verified."""
    prefixes = {16: (None, True), 24: (b"p", True), 32: (b"p", False)}
    prefix, stored = prefixes[size]
    keys = PmeKeys(key("f", size), {}, prefix, stored, algorithm, footer)
    for name, path in list(corpus.items())[size % 3 :: 3]:
        out = bytearray()
        encrypt(path, out, keys, threads=1)
        plain = pq.ParquetFile(path, page_checksum_verification=True).read()
        read = peers.pyarrow_read(pa.BufferReader(out), keys)
        assert rows_of(read) == rows_of(plain), name
        assert read.schema.equals(plain.schema, check_metadata=True), name


@pytest.mark.parametrize("footer", [False, True])
@pytest.mark.parametrize("algorithm", [GCM, CTR])
@pytest.mark.parametrize("double_wrapping", [False, True])
def test_pyarrows_factory(tmp_path: Path, double_wrapping: bool, algorithm: str, footer: bool) -> None:
    """Column keys, which pyarrow takes only as key material: read by it, and by us where it wrote them."""
    pq.write_table(flat(), tmp_path / "plain", **PAGED)
    material = ref.Pkmt1(MASTER_KEYS)
    fresh = [key(f"{n}", size) for n, size in enumerate((16, 24, 32))]
    metadata = [
        material.metadata(one, name, footer=name == "kf", double_wrapping=double_wrapping)
        for one, name in zip(fresh, MASTER_KEYS, strict=True)
    ]
    keys = PmeKeys(
        fresh[0],
        {"id": fresh[1], "text": fresh[2]},
        algorithm=algorithm,
        plaintext_footer=footer,
        complete=double_wrapping,
        footer_metadata=metadata[0],
        column_metadata={"id": metadata[1], "text": metadata[2]},
    )
    encrypt(tmp_path / "plain", tmp_path / "ours", keys)
    assert rows_of(peers.pyarrow_factory_read(tmp_path / "ours", MASTER_KEYS)) == rows_of(flat())

    theirs = tmp_path / "theirs"
    config: dict[str, Any] = {"column_keys": {"kc1": ["id"], "kc2": ["text", "real"]}, "plaintext_footer": footer}
    config |= {"double_wrapping": double_wrapping, "encryption_algorithm": algorithm}
    peers.pyarrow_factory_write(flat(), theirs, MASTER_KEYS, "kf", options=PAGED, **config)
    assert rows_of(decrypted(theirs, material.key)) == rows_of(flat())
    found = parquet.inspect(theirs)
    assert found["footer_key_metadata"]["masterKeyID"] == "kf"


@pytest.mark.more
@pytest.mark.timeout(600)  # the first time on a machine they are downloaded
@pytest.mark.parametrize("version", peers.OLD_PYARROWS)
def test_older_pyarrows(tmp_path: Path, version: str) -> None:
    """Both footers, both algorithms in one file each; 22 serialises a plaintext footer again to check its signature."""
    table = flat()
    pq.write_table(table, tmp_path / "plain", **PAGED)
    material = ref.Pkmt1(MASTER_KEYS)
    for algorithm, footer in ((GCM, True), (CTR, False)):
        keys = PmeKeys(
            KF,
            {"id": K1},
            algorithm=algorithm,
            plaintext_footer=footer,
            footer_metadata=material.metadata(KF, "kf", footer=True),
            column_metadata={"id": material.metadata(K1, "kc1")},
        )
        encrypt(tmp_path / "plain", tmp_path / "ours", keys)
        read = peers.with_old_pyarrow(version, peers.pyarrow_factory_read, tmp_path / "ours", MASTER_KEYS)
        assert rows_of(read) == rows_of(table)
        theirs = tmp_path / "theirs"
        config: dict[str, Any] = {
            "column_keys": {"kc1": ["id"]},
            "plaintext_footer": footer,
            "encryption_algorithm": algorithm,
        }
        peers.with_old_pyarrow(version, peers.pyarrow_factory_write, table, theirs, MASTER_KEYS, "kf", **config)
        assert rows_of(decrypted(theirs, material.key)) == rows_of(table)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", peers.OLD_PYARROWS)
def test_ctr_that_calls_itself_gcm(tmp_path: Path, version: str) -> None:
    """Up to pyarrow 25: a plaintext footer with column keys. Nobody reads such a file, and it is turned to the spec."""
    table, theirs = flat(), tmp_path / "theirs"
    config: dict[str, Any] = {
        "column_keys": {"kc1": ["id"], "kc2": ["text"]},
        "plaintext_footer": True,
        "encryption_algorithm": CTR,
    }
    peers.with_old_pyarrow(version, peers.pyarrow_factory_write, table, theirs, MASTER_KEYS, "kf", **config)
    material = ref.Pkmt1(MASTER_KEYS)
    with pytest.raises(Exception, match=r"(?i)decrypt|tag|length|size|overflow|deserialize"):
        peers.pyarrow_factory_read(theirs, MASTER_KEYS)
    for call in (
        lambda: parquet.decrypt_file(theirs, bytearray(), material.key),
        lambda: parquet.verify(theirs, material.key),
    ):
        with pytest.raises((IntegrityError, FormatError), match=r"id|text"):
            call()
    quirk = {"arrow-ctr-mislabel"}
    with pytest.raises(PolicyError, match="allow_ctr=True"):
        parquet.verify(theirs, material.key, quirks=quirk)
    assert rows_of(decrypted(theirs, material.key, quirks=quirk, allow_ctr=True)) == rows_of(table)
    new = Keys(
        KF,
        {"id": K1, "text": K2},
        footer_metadata=material.metadata(KF, "kf", footer=True),
        column_metadata={"id": material.metadata(K1, "kc1"), "text": material.metadata(K2, "kc2")},
    )
    for algorithm in (GCM, CTR):
        turned = tmp_path / algorithm
        options: dict[str, Any] = {"quirks": quirk, "algorithm": algorithm, "other_columns": "plain", "allow_ctr": True}
        parquet.reencrypt_file(theirs, turned, material.key, new, **options)
        assert rows_of(peers.pyarrow_factory_read(turned, MASTER_KEYS)) == rows_of(table)
        assert ref.ParquetFile(turned, material.footer, material).algorithm == algorithm
        assert rows_of(decrypted(turned, material.key, quirks=quirk)) == rows_of(table)  # does no harm
        assert rows_of(decrypted(turned, material.key)) == rows_of(table)


@pytest.mark.parametrize("algorithm", [GCM, CTR])
@pytest.mark.parametrize("footer", [False, True])
def test_what_pyarrow_writes(footer: bool, algorithm: str) -> None:
    for table, version in itertools.product((flat(), nested(), flat(0)), ("1.0", "2.0")):
        for size, stored in ((16, True), (24, False), (32, True)):
            keys = PmeKeys(key("f", size), {}, b"p", stored, algorithm, footer)
            sink = io.BytesIO()
            peers.pyarrow_write(table, sink, keys, **{**PAGED, "data_page_version": version})
            assert rows_of(decrypted(sink.getvalue(), keys)) == rows_of(table)
            if size == 16:
                with pytest.raises(AgsError):
                    decrypted(sink.getvalue(), PmeKeys(key("g"), {}, b"p"))


# ---------------------------------------------------------------- parquet-java

JAVA = {
    "uniform": PmeKeys(key("f")),
    "uniform signed 256": PmeKeys(key("f", 32), plaintext_footer=True),
    "uniform ctr 192": PmeKeys(key("f", 24), algorithm=CTR, aad_prefix=b"p"),
    "columns": PmeKeys(
        key("f", 32), {"id": K1, "text": key("t", 24), "real": None}, b"p", column_metadata={"id": b"k1"}
    ),
    "columns ctr signed": PmeKeys(KF, {"id": key("i", 32)}, b"p", False, CTR, True),
    "columns complete": PmeKeys(KF, {"number": key("n", 24)}, b"p", False, GCM, True, True),
}
FEW = ("uniform ctr 192", "columns", "columns ctr signed")  # both algorithms, both kinds of footers, several keys


@needs_java
@pytest.mark.parametrize("mode", rest_in_more(JAVA, *FEW))
def test_parquet_java_reads_ours(tmp_path: Path, corpus: dict[str, Path], parquet_java: ParquetJava, mode: str) -> None:
    """It verifies CRCs, reads several row groups, and columns in the open next to others."""
    keys = JAVA[mode]
    names = [
        "page index",
        "v1 snappy dictionary",
        "bloom filters",
        "checksums",
        "row group without rows",
        "empty table",
    ]
    for name in names:
        encrypt(corpus[name], tmp_path / "sealed", keys, threads=1)
        assert rows_of(parquet_java.read(tmp_path / "sealed", keys)) == rows_of(pq.ParquetFile(corpus[name]).read()), (
            name
        )
    wrong = PmeKeys(key("wrong", len(keys.footer)), keys.columns, keys.aad_prefix)
    with pytest.raises(PeerError):
        parquet_java.read(tmp_path / "sealed", wrong)


@needs_java
@pytest.mark.parametrize("algorithm", [GCM, CTR])
def test_parquet_java_reads_the_corpus(
    tmp_path: Path, corpus: dict[str, Path], parquet_java: ParquetJava, algorithm: str
) -> None:
    """Whatever it reads in plaintext; V2 pages in its own layout."""
    for number, (name, path) in enumerate(corpus.items()):
        if (
            name in UNREADABLE["parquet-java"]
            or name in ("many tiny pages", "large page")
            or number % 2 != (algorithm == CTR)
        ):
            continue  # fmt: skip
        keys = PmeKeys(KF, algorithm=algorithm, plaintext_footer=bool(number & 2), aad_prefix=b"p")
        encrypt(path, tmp_path / "sealed", keys, v2_layout="parquet-java", threads=1)
        assert rows_of(parquet_java.read(tmp_path / "sealed", keys)) == rows_of(pq.ParquetFile(path).read()), name


@needs_java
@pytest.mark.parametrize(
    ("writer", "mode"),
    rest_in_more(
        itertools.product(["v1", "v2"], JAVA),
        *(("v1", mode) for mode in FEW),
        *(("v2", mode) for mode in JAVA if mode not in FEW),
    ),
)
def test_what_parquet_java_writes(tmp_path: Path, parquet_java: ParquetJava, mode: str, writer: str) -> None:
    """Its padded modules and its V2 pages; decrypted, with other keys, and with other keys in the same place."""
    keys = JAVA[mode]
    pq.write_table(flat(), tmp_path / "plain")
    options: dict[str, Any] = {
        "writer": writer,
        "bloom_filters": ["id"],
        "page_rows": 100,
        "row_group_rows": 200,
        "codec": "snappy",
    }
    parquet_java.write(tmp_path / "plain", tmp_path / "sealed", keys, **options)
    sealed = (tmp_path / "sealed").read_bytes()
    assert rows_of(decrypted(sealed, keys)) == rows_of(flat())

    turned = PmeKeys(
        key("new footer", 32),
        {path: None if value is None else key(f"new {path}") for path, value in keys.columns.items()},
        keys.aad_prefix,
        keys.store_aad_prefix,
        keys.algorithm,
        keys.plaintext_footer,
        keys.complete,
        column_metadata=keys.column_metadata,
    )
    for same_size in (False, True):
        target = tmp_path / f"turned{same_size}"
        more = {"same_size": True} if same_size else {"other_columns": "footer" if keys.complete or not keys.columns else "plain"}  # fmt: skip  # noqa: E501
        parquet.reencrypt_file(
            sealed,
            target,
            ours(keys),
            ours(turned),
            aad_prefix=keys.aad_prefix,
            allow_ctr=keys.algorithm == CTR,
            **more,
        )
        assert (target.stat().st_size == len(sealed)) or not same_size
        assert rows_of(parquet_java.read(target, turned)) == rows_of(flat())
        assert rows_of(decrypted(target, turned)) == rows_of(flat())
        if writer == "v1" and not turned.columns:
            assert rows_of(peers.pyarrow_read(target, turned)) == rows_of(flat())


def test_columns_of_others_without_the_footer_key(tmp_path: Path) -> None:
    """By pyarrow's factory, with a signed footer."""
    config: dict[str, Any] = {"column_keys": {"kc1": ["id"], "kc2": ["text"]}, "plaintext_footer": True}
    peers.pyarrow_factory_write(flat(), tmp_path / "theirs", MASTER_KEYS, "kf", **config)
    material = ref.Pkmt1(MASTER_KEYS)
    chunks = ref.ParquetFile(tmp_path / "theirs", material.footer, material).chunks()
    (secret,) = {chunk.key for chunk in chunks if chunk.path == ("id",)}
    keys = Keys(None, {"id": secret})  # type: ignore[dict-item]
    report = parquet.verify(tmp_path / "theirs", keys, missing="skip")
    assert not report.footer_verified
    assert {row.path for row in report.columns if row.key == "missing"} == {"text"}
    with parquet.open_plain(tmp_path / "theirs", keys, missing="hide") as view:
        assert rows_of(pq.read_table(view)) == rows_of(flat().drop(["text"]))


@needs_java
def test_columns_of_parquet_java_without_the_footer_key(tmp_path: Path, parquet_java: ParquetJava) -> None:
    pq.write_table(flat(), tmp_path / "plain", **PAGED)
    written = PmeKeys(KF, {"id": K1, "text": K2}, plaintext_footer=True)
    parquet_java.write(tmp_path / "plain", tmp_path / "sealed", written, page_rows=100, row_group_rows=200)
    with parquet.open_plain(tmp_path / "sealed", Keys(None, {"text": K2}), missing="hide") as view:
        assert "id" not in view.columns
        assert not view.footer_verified
        assert rows_of(pq.read_table(view)) == rows_of(flat().drop(["id"]))


@needs_java
def test_columns_that_pass_are_read_with_their_old_keys(tmp_path: Path, parquet_java: ParquetJava) -> None:
    """same_size by somebody who holds the footer key only."""
    pq.write_table(flat(), tmp_path / "plain", **PAGED)
    for number, (algorithm, footer) in enumerate(itertools.product((GCM, CTR), (False, True))):
        keys = PmeKeys(KF, {"id": K1, "text": K2}, algorithm=algorithm, plaintext_footer=footer, complete=True)
        if number % 2:
            encrypt(tmp_path / "plain", tmp_path / "sealed", keys)
        else:
            parquet_java.write(tmp_path / "plain", tmp_path / "sealed", keys, page_rows=100, row_group_rows=200)
        new = PmeKeys(key("new"), keys.columns)
        size = (tmp_path / "sealed").stat().st_size
        options: dict[str, Any] = {"same_size": True, "allow_ctr": algorithm == CTR}
        parquet.reencrypt_file(tmp_path / "sealed", tmp_path / "sealed", Keys(KF), Keys(new.footer), **options)
        assert (tmp_path / "sealed").stat().st_size == size
        assert rows_of(parquet_java.read(tmp_path / "sealed", new)) == rows_of(flat())
        if algorithm == GCM:
            assert rows_of(peers.polars_read(tmp_path / "sealed", new)) == rows_of(flat())
        with pytest.raises(PeerError):
            parquet_java.read(tmp_path / "sealed", keys)


@needs_java
@pytest.mark.parametrize(
    "mode",
    rest_in_more(["uniform", "columns", "columns ctr signed", "columns complete"], "uniform", "columns ctr signed"),
)
def test_filters(tmp_path: Path, corpus: dict[str, Path], parquet_java: ParquetJava, mode: str) -> None:
    """Each keeps as much out of our file as of the plaintext one, and the rows that are left are the same."""
    keys = JAVA[mode]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("page index", {"column": "id", "is": "eq", "value": 333, "use": ["stats"]}),
        ("page index", {"column": "id", "is": "eq", "value": 333, "use": ["stats", "column index", "rows"]}),
        ("page index", {"column": "id", "is": "lt", "value": 5}),
        ("page index", {"column": "text", "is": "eq", "value": "b", "use": ["dictionary"]}),
        ("page index", {"column": "text", "is": "eq", "value": "a", "use": ["dictionary", "rows"]}),
        ("bloom filters", {"column": "id", "is": "eq", "value": 601, "use": ["bloom"]}),
        ("bloom filters", {"column": "id", "is": "eq", "value": 600, "use": ["bloom", "rows"]}),
    ]
    kept = set()
    for name, question in asked:
        encrypt(corpus[name], tmp_path / "sealed", keys, threads=1)
        plain = parquet_java.count(corpus[name], **question)
        assert parquet_java.count(tmp_path / "sealed", keys, **question) == plain, question
        kept.add(plain["page_rows"])
        if "use" not in question:
            rows = rows_of(parquet_java.read(tmp_path / "sealed", keys, question))
            assert rows == rows_of(parquet_java.read(corpus[name], None, question))
            assert len(rows) == 5
    assert {0, 20} <= kept  # something was kept out


@needs_java
@pytest.mark.parametrize("mode", rest_in_more(JAVA, "uniform", "columns ctr signed"))
def test_splits(tmp_path: Path, corpus: dict[str, Path], parquet_java: ParquetJava, mode: str) -> None:
    """Each row group is read by just one of the tasks that a file is split into, wherever the cuts are."""
    keys = JAVA[mode]
    encrypt(corpus["page index"], tmp_path / "sealed", keys)
    size = (tmp_path / "sealed").stat().st_size
    for step in (size + 1, 9000, 1500):
        tasks = parquet_java.splits(tmp_path / "sealed", keys, [(at, at + step) for at in range(0, size, step)])
        assert sorted(group for task in tasks for group in task["row_groups"]) == [0, 1, 2]
        assert sum(task["rows"] for task in tasks) == 600


@needs_java
@pytest.mark.parametrize("algorithm", [GCM, CTR])
@pytest.mark.parametrize("nulls", ["required", "some", "all", "nested"])
def test_v2_pages(tmp_path: Path, parquet_java: ParquetJava, nulls: str, algorithm: str) -> None:
    """Its layout is read by parquet-java, Arrow's by Arrow; the other one is told of in advance."""
    plain = files.write(tmp_path / "plain", v2(nulls))
    rows = rows_of(pq.read_table(plain))
    keys = PmeKeys(KF, algorithm=algorithm)
    java, arrow = tmp_path / "java", tmp_path / "arrow"
    for layout, path in (("parquet-java", java), ("arrow", arrow)):
        report = encrypt(plain, path, keys, v2_layout=layout)
        assert bool(report.warnings) == (nulls != "required")
    assert rows_of(parquet_java.read(java, keys)) == rows
    assert rows_of(peers.pyarrow_read(arrow, keys)) == rows
    if algorithm == GCM:
        assert rows_of(peers.polars_read(arrow, keys)) == rows
    if nulls == "required":
        assert rows_of(peers.pyarrow_read(java, keys)) == rows == rows_of(parquet_java.read(arrow, keys))
    else:
        if nulls != "all":
            with pytest.raises((PeerError, OSError, pa.ArrowInvalid)):
                parquet_java.read(arrow, keys)
        with pytest.raises((OSError, pa.ArrowInvalid)):
            peers.pyarrow_read(java, keys)
    # what parquet-java writes is turned to what the others read
    parquet_java.write(plain, java, keys, writer="v2", page_rows=10)
    assert rows_of(decrypted(java, keys)) == rows
    parquet.reencrypt_file(java, arrow, ours(keys), ours(keys), v2_layout="arrow", allow_ctr=algorithm == CTR)
    assert rows_of(peers.pyarrow_read(arrow, keys)) == rows


# ---------------------------------------------------------------- Spark


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_reads_a_file_in_several_tasks(tmp_path: Path, corpus: dict[str, Path]) -> None:
    from support import program, run_python

    pytest.importorskip("pyspark")
    keys = JAVA["columns ctr signed"]
    encrypt(corpus["page index"], tmp_path / "sealed.parquet", keys)
    conf = "\n".join(f"{name}\t{value}" for name, value in peers.spark_conf(keys).items())
    (tmp_path / "conf").write_text(conf)
    out = run_python(program(spark.read_split, tmp_path / "sealed.parquet", tmp_path / "conf"), timeout=250)
    tasks = int(out.split("tasks ")[1].split()[0])
    assert tasks > 3, out
    assert "rows True" in out, out
    assert "filtered [333] 0" in out, out


# ---------------------------------------------------------------- polars, DuckDB


POLARS = {
    "uniform": PmeKeys(key("f")),
    "uniform 256": PmeKeys(key("f", 32), aad_prefix=b"p"),
    "columns": PmeKeys(KF, {"id": K1, "struct.name": key("n")}, b"p"),
    "signed": PmeKeys(key("f", 32), {"id": key("i", 32), "list.list.element": key("l", 32)}, b"p", False, GCM, True),
}


@pytest.mark.parametrize("mode", POLARS)
def test_polars(tmp_path: Path, corpus: dict[str, Path], mode: str) -> None:
    pytest.importorskip("polars")
    keys = POLARS[mode]
    for name in ("nested", "nested v2") if keys.columns else ("nested", "nested v2", "page index", "encodings"):
        rows = rows_of(pq.ParquetFile(corpus[name]).read())
        encrypt(corpus[name], tmp_path / "ours", keys)
        assert rows_of(peers.polars_read(tmp_path / "ours", keys)) == rows
    peers.polars_write(nested(), tmp_path / "theirs", keys, row_group_size=200)
    tiled = not keys.columns  # it leaves bytes in between that nothing in the footer names
    assert rows_of(decrypted(tmp_path / "theirs", keys, tiled=tiled)) == rows_of(nested())


@pytest.mark.parametrize("size", [16, 32])
def test_duckdb(tmp_path: Path, size: int) -> None:
    """It reads of the spec flat columns of one page; its own dialect is read by us, and turned to the spec."""
    pytest.importorskip("duckdb")
    table = flat(50).select(["id", "number", "text"])
    secret = (KF * 2)[:size]
    pq.write_table(table, tmp_path / "plain", use_dictionary=False)
    keys = PmeKeys(secret)
    encrypt(tmp_path / "plain", tmp_path / "ours", keys)
    assert rows_of(peers.duckdb_read(tmp_path / "ours", secret)) == rows_of(table)

    theirs = tmp_path / "theirs"
    peers.duckdb_write(table, theirs, secret)
    for call in (
        lambda: parquet.decrypt_file(theirs, bytearray(), Keys(secret)),
        lambda: parquet.verify(theirs, Keys(secret)),
        lambda: parquet.reencrypt_file(theirs, bytearray(), Keys(secret), Keys(secret)),
    ):
        with pytest.raises(FormatError, match="duckdb"):
            call()
    assert parquet.inspect(theirs)["aad_file_unique"] is None
    assert rows_of(decrypted(theirs, Keys(secret), quirks={"duckdb"})) == rows_of(table)
    with pytest.raises(IntegrityError):
        decrypted(theirs, Keys(key("wrong", size)), quirks={"duckdb"})
    parquet.reencrypt_file(theirs, tmp_path / "spec", Keys(secret), Keys(secret), quirks={"duckdb"})
    assert ref.ParquetFile(tmp_path / "spec", secret).complaints() == []
    assert rows_of(peers.pyarrow_read(tmp_path / "spec", keys)) == rows_of(table)
    assert rows_of(decrypted(tmp_path / "spec", keys)) == rows_of(table)
    with pytest.raises(ValueError, match="dialect"):
        parquet.reencrypt_file(theirs, tmp_path / "x", Keys(secret), Keys(secret), quirks={"duckdb"}, same_size=True)


def test_plaintext_columns_are_read_without_keys(tmp_path: Path, corpus: dict[str, Path]) -> None:
    """Of a plaintext footer, by everybody."""
    mode = Mode(GCM, True, "columns")
    path = corpus["page index"]
    leaves = files.leaves_of(path.read_bytes())
    keys = Keys(KF, {"id": K1, "text": FOOTER_KEY})
    parquet.encrypt_file(path, tmp_path / "sealed", keys, plaintext_footer=True, other_columns="plain")
    some = ["number", "small", "flag"]
    rows = rows_of(pq.read_table(path, columns=some))
    assert rows_of(peers.pyarrow_read(tmp_path / "sealed", columns=some)) == rows
    assert rows_of(peers.polars_read(tmp_path / "sealed", columns=some)) == rows
    with pytest.raises(Exception, match=r"(?i)encrypt|decrypt"):
        peers.pyarrow_read(tmp_path / "sealed", columns=["id"])
    assert seal(path.read_bytes(), mode, leaves)[:4] == b"PAR1"


# ---------------------------------------------------------------- the files of other projects


def test_encrypted_files_of_parquet_testing(vectors: Path) -> None:
    folder = vectors / "parquet-testing" / "data"
    shapes = []
    for name, (algorithm, magic, keyed) in ENCRYPTED.items():
        path = folder / f"{name}.parquet.encrypted"
        footer, columns = parquet_testing_keys(name)
        keys: Any = Keys(footer, columns)
        if name.startswith("external"):
            keys = ref.Pkmt1(MASTER_KEYS, path).key
        prefix = b"tester" if "disable_aad" in name else None
        table = decrypted(path, keys, aad_prefix=prefix)
        known: dict[str, Any] = {"aad_prefix": prefix, "allow_ctr": algorithm == CTR}
        report = parquet.verify(path, keys, **known)
        assert report.algorithm == algorithm
        assert report.footer == ("encrypted" if magic == b"PARE" else "signed")
        assert sum(row.key == "column" for row in report.columns) == keyed
        shapes.append((table.num_rows, table.num_columns))
        if table.num_columns == 8:
            assert table.column("boolean_field").to_pylist() == [True, False] * 25
            assert [row["float_field"] for row in rows_of(table)][:2] == [0.0, pytest.approx(1.1)]
        again = bytearray()
        new = Keys(key("new"), {row.path: key(row.path) for row in report.columns if row.key == "column"})
        parquet.reencrypt_file(path, again, keys, new, same_size=True, **known)
        assert len(again) <= path.stat().st_size  # key metadata that are left out, in the footer
        assert rows_of(decrypted(again, new, aad_prefix=prefix)) == rows_of(table)
    assert len(shapes) == 13
