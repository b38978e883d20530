"""reencrypt_file: other keys, another mode, or the same size."""

from __future__ import annotations

from typing import Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from cryptography.exceptions import InvalidTag
from parquet_files import (
    COLUMNS,
    FOUR,
    KF,
    MODES,
    RICH_LEAVES,
    UNIFORM,
    Mode,
    Pieces,
    data_of,
    in_every_mode,
    in_pairwise_modes,
    key,
    nonces,
    reference,
    refused,
    rich,
    seal,
    unseal,
)
from parquet_peers import CTR, GCM

from ags_fast import AgsError, KeyAccessError, parquet
from ags_fast.parquet import Keys

pa, pq = peers.pa, peers.pq


@in_pairwise_modes
def test_reencrypt(plain_files: dict[str, bytes], mode: Mode) -> None:
    turned = Mode(
        CTR if mode.algorithm == GCM else GCM, not mode.plaintext_footer, mode.columns, "supplied", 32, "second"
    )
    options: dict[str, Any] = {**turned.options, "new_aad_prefix": turned.aad_prefix}
    del options["aad_prefix"]
    for name, plain in list(plain_files.items())[::4]:
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
    for mode in (one for one in MODES if one.columns == "columns"):
        turned = Mode(mode.algorithm, mode.plaintext_footer, mode.columns, mode.prefix, 24, "second")
        out = bytearray()
        old, new = mode.keys(RICH_LEAVES), turned.keys(RICH_LEAVES)
        parquet.reencrypt_file(seal(plain, mode), out, old, new, aad_prefix=mode.supplied, allow_ctr=mode.ctr)
        file = reference(bytes(out), turned, RICH_LEAVES)
        assert file.aad_prefix == mode.aad_prefix
        assert file.algorithm == mode.algorithm
        assert (file.magic == b"PAR1") == mode.plaintext_footer
        assert data_of(unseal(out, turned, RICH_LEAVES)) == data_of(plain)


@in_every_mode
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
        held: dict[Any, bytes] = {("id",): columns["id",]}
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
