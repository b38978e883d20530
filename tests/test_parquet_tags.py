"""What carries no tag in a Parquet file, or may be stripped of it: pages under CTR, levels, footers not verified."""

from __future__ import annotations

import contextlib
import io
import zlib
from typing import TYPE_CHECKING, Any

import fsspec
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_files import (
    COLUMNS,
    FOUR,
    KF,
    RICH_LEAVES,
    Mode,
    key,
    reference,
    refused,
    rich,
    seal,
)
from parquet_peers import CTR, GCM

from ags_fast import IntegrityError, PolicyError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from collections.abc import Callable

pa, pq = peers.pa, peers.pq


# ---------------------------------------------------------------- footers that are not verified


def plain_column(footer: ref.Struct) -> None:
    footer[4].items[0][1].items[0].remove(8, 9)


def another_name(footer: ref.Struct) -> None:
    names = {b"id": b"word", b"word": b"id"}
    for element in footer[2].items:
        element.set(4, ref.BINARY, names.get(element[4], element[4]))


def swapped(footer: ref.Struct) -> None:
    footer[4].items.reverse()


def twice(footer: ref.Struct) -> None:
    footer[4].items[1] = footer[4].items[0]


def unsealed(footer: ref.Struct) -> None:
    footer[4].items[0][1].items[0].remove(9)


def ctr(footer: ref.Struct) -> None:
    footer[8].fields[0][0] = 2


def another_unique(footer: ref.Struct) -> None:
    footer[8].fields[0][2].set(2, ref.BINARY, b"12345678")


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda footer: None, None),
        (plain_column, PolicyError),
        (another_name, IntegrityError),
        (swapped, IntegrityError),
        (twice, IntegrityError),
        (unsealed, IntegrityError),
        (ctr, PolicyError),
        (another_unique, IntegrityError),
    ],
)
def test_a_footer_that_is_not_verified_cannot_lie_about_a_column(
    edit: Callable[[ref.Struct], None], error: type[Exception] | None
) -> None:
    """What it says of a column that is read must be what the column's key has sealed."""
    same: dict[Any, bytes] = {("id",): key("1"), ("word",): key("1")}
    every = {**same, ("open",): key("2")}
    sealed, keys = bytearray(), Keys(None, same)
    parquet.encrypt_file(rich(), sealed, Keys(KF, every), plaintext_footer=True, threads=1)
    file = ref.ParquetFile(bytes(sealed), KF, every)
    edit(file.footer)
    data = ended(file.data[: file.tail] + ref.serialise(file.footer) + bytes(28), file.tail)
    for call in (
        lambda: parquet.verify(data, keys, missing="skip"),
        lambda: parquet.decrypt_file(data, bytearray(), keys, missing="drop"),
        lambda: parquet.open_plain(data, keys, missing="hide").read(),
    ):
        with pytest.raises(error) if error else contextlib.nullcontext():
            call()


# ---------------------------------------------------------------- modules without tags


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
    begin, end = body.begin + 16, body.begin + body.length  # behind length and nonce
    known = b"".join(value.to_bytes(8, "little") for value in range(5000, 5200))
    wanted = b"".join(value.to_bytes(8, "little") for value in range(905000, 905200))
    stream = bytes(a ^ b for a, b in zip(sealed[begin:end], known, strict=False))  # of GCM's counter, from 2 on
    # CTR begins with the counter 1: the first 16 bytes cannot be chosen, and 16 at the end are free.
    data[begin + 16 : begin + len(wanted)] = bytes(a ^ b for a, b in zip(stream, wanted[16:], strict=False))
    data[body.begin : end] = with_crc(bytes(data[body.begin : end]), zlib.crc32(sealed[body.begin : end]))
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


def shifted_nulls(layout: Any) -> tuple[bytes, bytes, Keys]:
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
