"""What inspect, verify and the reports of ags_fast.parquet say."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_files import (
    COLUMNS,
    FOUR,
    KF,
    PREFIX,
    RICH_LEAVES,
    UNIFORM,
    Mode,
    data_of,
    in_pairwise_modes,
    reference,
    refused,
    rich,
    seal,
    unseal,
)
from parquet_peers import CTR, GCM

from ags_fast import FormatError, IntegrityError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

pa, pq = peers.pa, peers.pq


@in_pairwise_modes
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


def test_inspect_of_other_files(tmp_path: Path, plain_files: dict[str, bytes]) -> None:
    for plain in plain_files.values():
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


@in_pairwise_modes
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
    wrong: list[dict[str, Any]] = [
        {"algorithm": "AES"},
        {"other_columns": "none"},
        {"v2_layout": None},
        {"threads": 0},
    ]
    for options in wrong:
        refused(ValueError, ".", parquet.encrypt_file, plain, Keys(KF), **options)
    sealed = seal(plain, UNIFORM)
    keys = UNIFORM.keys([])
    wrong = [{"missing": "hide"}, {"quirks": {"magic"}}, {"threads": -1}]
    for options in wrong:
        refused(ValueError, ".", parquet.decrypt_file, sealed, keys, **options)
    refused(ValueError, ".", parquet.reencrypt_file, sealed, keys, keys, algorithm="AES")
    with pytest.raises(ValueError, match="missing"):
        parquet.verify(sealed, keys, missing="drop")  # type: ignore[arg-type]


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
    changed[pages[1].begin] ^= 1
    with pytest.raises(IntegrityError, match=r"CRC") as caught:
        parquet.verify(changed, mode.keys(RICH_LEAVES))
    error = caught.value
    assert (error.module, error.row_group, error.column, error.page) == ("data page", 1, "open", 1)
    assert "column 'open', row group 1" in str(error)
