"""What somebody can do to an encrypted Parquet file, without its keys and with them: each time a typed error that says
where, and nothing of the file. Never wrong rows, never a crash, never more memory than the file is worth.
"""

from __future__ import annotations

import io
import itertools
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis
import parquet_peers as peers
import pme_reference as ref
import pytest
from hypothesis import strategies as st
from parquet_files import FOUR, RICH_LEAVES, Mode, caught, key, reference, rich, seal, unseal
from parquet_peers import CTR, GCM
from programs import parquets
from shares import rest_in_more
from support import program, run_python

from ags_fast import AgsError, FormatError, IntegrityError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pa, pq = peers.pa, peers.pq
BROKEN = (IntegrityError, FormatError)
PLAIN = rich()


def fails(file: bytes, mode: Mode, threads: int = 1, **options: Any) -> AgsError:
    """The error of decrypt_file, which gives nothing away; verify and reencrypt_file raise the same."""
    keys = mode.keys(RICH_LEAVES)
    out = bytearray(b"before")
    with pytest.raises(BROKEN) as caught:
        parquet.decrypt_file(file, out, keys, aad_prefix=mode.supplied, threads=threads, **options, allow_ctr=mode.ctr)
    assert out in (b"", b"before")  # type: ignore[comparison-overlap]  # a footer is looked at before anything is written
    with pytest.raises(BROKEN) as again:
        parquet.verify(file, keys, aad_prefix=mode.supplied, threads=threads, allow_ctr=mode.ctr)
    assert type(again.value) is type(caught.value)
    if isinstance(caught.value, IntegrityError):
        assert place(again.value) == place(caught.value), (str(caught.value), str(again.value))  # type: ignore[arg-type]
    with pytest.raises(BROKEN):
        parquet.reencrypt_file(file, out, keys, keys, aad_prefix=mode.supplied, threads=threads, allow_ctr=mode.ctr)
    assert out in (b"", b"before")  # type: ignore[comparison-overlap]
    return caught.value


def place(error: IntegrityError) -> tuple[Any, ...]:
    return error.module, error.row_group, error.column, error.page


def place_of(module: ref.Module) -> tuple[Any, ...]:
    if module.kind == ref.FOOTER:
        return "footer", None, None, None
    page = module.page if module.kind in (ref.DATA_PAGE, ref.DATA_HEADER) else None
    return module.name, module.row_group, ".".join(module.path or ()), page


def modules_of(mode: Mode, plain: bytes | None = None) -> tuple[ref.ParquetFile, list[ref.Module]]:
    file = reference(seal(rich() if plain is None else plain, mode), mode, RICH_LEAVES)
    return file, [module for module in file.modules() if module.sealed]


# ---------------------------------------------------------------- without keys


@pytest.mark.parametrize("mode", [*FOUR, Mode(columns="partial"), Mode(CTR, True, "uniform", "supplied")], ids=str)
def test_every_module_names_itself(mode: Mode) -> None:
    """A bit of the nonce, the ciphertext and the tag of every module."""
    file, modules = modules_of(mode)
    assert {module.name for module in modules} >= set(ref.MODULE_NAMES) - {"column metadata"}
    for number, module in enumerate(modules):
        # A signature is behind the footer: 12 bytes of nonce, 16 of tag.
        signed = module.kind == ref.FOOTER and mode.plaintext_footer
        spots = (5, -20, -3) if signed else (4, 16, -16, -1)
        for byte in spots if number % 3 == 0 else spots[-2:]:
            error = fails(file.flip(module, byte), mode, threads=1 + number % 2)
            if signed and byte == 5 and isinstance(error, FormatError):
                continue  # it was no footer any more
            assert isinstance(error, IntegrityError), (module.name, byte, error)
            assert place(error) == place_of(module), (module.name, byte, error)
            for part in place_of(module):
                assert part is None or str(part) in str(error)


@pytest.mark.parametrize("mode", rest_in_more(FOUR, FOUR[0], FOUR[3]), ids=str)
def test_lengths_that_lie(mode: Mode) -> None:
    file, modules = modules_of(mode)
    for module in modules:
        if module.kind == ref.FOOTER and mode.plaintext_footer:
            continue  # has none
        right = module.length - 4
        for length in (
            0,
            1,
            11,
            12,
            27,
            28,
            right - 1,
            right + 1,
            right ^ 1 << 8,
            1 << 31,
            (1 << 31) - 1,
            (1 << 32) - 1,
        ):
            if length != right:
                stored = bytearray(file.stored(module))
                stored[:4] = struct.pack("<I", length)
                error = fails(file.replace(module, bytes(stored)), mode)
                if module.kind != ref.FOOTER:
                    assert ".".join(module.path) in str(error), error  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", FOUR, ids=str)
def test_modules_open_in_their_place_only(mode: Mode) -> None:
    """Swapped between pages, row groups and columns, and from another file under the same keys."""
    file, modules = modules_of(mode)
    other, others = modules_of(mode)
    assert file.aad != other.aad
    count = 0
    for one, two in itertools.permutations(modules, 2):
        # Modules of two keys are told apart by these; CTR pages have no tag, only a CRC.
        same = one.kind == two.kind and one.length == two.length and one.kind != ref.FOOTER
        if same and (one.at < two.at or one.path == two.path):
            error = fails(file.replace(one, file.stored(two)), mode)
            assert place(error) == place_of(one), (one.at, two.at, error)  # type: ignore[arg-type]
            count += 1
    assert count > 60
    for one, two in zip(modules, others, strict=True):
        if one.length == two.length and one.kind != ref.FOOTER:
            error = fails(file.replace(one, other.stored(two)), mode)
            assert place(error) == place_of(one)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", FOUR, ids=str)
def test_footers_of_other_files(mode: Mode) -> None:
    """Of one with the same keys, and of the file itself before it was turned to other keys."""
    one, two = (seal(rich(seed, write_page_checksum=False), mode) for seed in (0, 1))
    first, second = (reference(file, mode, RICH_LEAVES) for file in (one, two))
    assert len(one) == len(two)
    fails(one[: first.tail] + two[second.tail :], mode)
    turned = Mode(mode.algorithm, mode.plaintext_footer, mode.columns, mode.prefix, 16, "second")
    out = bytearray()
    parquet.reencrypt_file(
        one, out, mode.keys(RICH_LEAVES), turned.keys(RICH_LEAVES), same_size=True, allow_ctr=mode.ctr
    )
    fails(bytes(out[: first.tail]) + one[first.tail :], mode)
    fails(one[: first.tail] + bytes(out[first.tail :]), turned)


@pytest.mark.parametrize("mode", FOUR, ids=str)
def test_cuts(mode: Mode) -> None:
    """At, before and behind the end of each module; also with the footer put behind what is left."""
    file, modules = modules_of(mode)
    ends = {module.offset + module.length for module in modules if module.offset is not None}
    for end in sorted(ends | {0, 3, 4, 8, 11, 12, len(file.data) - 4, len(file.data) - 8}):
        for cut in {end - 1, end, end + 1} & set(range(len(file.data))):
            assert isinstance(fails(file.data[:cut], mode), FormatError)
    for module in modules:
        if module.offset is not None and module.offset < file.tail:
            error = fails(file.data[: module.offset] + file.data[file.tail :], mode)
            assert error  # type: ignore[truthy-bool]
    for junk in (b"\0", bytes(100), b"PAR1", file.data):  # and what is put behind it
        with pytest.raises(BROKEN):
            unseal(file.data + junk, mode, RICH_LEAVES) if junk != file.data else unseal(file.data + junk[:-4], mode, RICH_LEAVES)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("mode", FOUR, ids=str)
def test_bytes_between_and_before(mode: Mode) -> None:
    """A byte more or less anywhere moves what is behind it."""
    file, modules = modules_of(mode)
    for module in modules[1::4]:
        if module.offset is not None:
            at = module.offset
            fails(file.data[:at] + b"\0" + file.data[at:], mode)
            fails(file.data[:at] + file.data[at + 1 :], mode)
    for magic in (b"PAR2", b"PARE" if mode.plaintext_footer else b"PAR1"):
        fails(magic + file.data[4:], mode)
        fails(file.data[:-4] + magic, mode)
        fails(magic + file.data[4:-4] + magic, mode)
    for length in (0, 1, 7, 1 << 31, (1 << 32) - 1, len(file.data) - 8, len(file.data) - 11):
        fails(file.data[:-8] + struct.pack("<I", length) + file.data[-4:], mode)


def test_other_keys_and_prefixes() -> None:
    for mode in FOUR:
        sealed = seal(rich(), mode)
        columns = mode.leaf_keys(RICH_LEAVES)
        with pytest.raises(IntegrityError) as caught:
            parquet.decrypt_file(sealed, bytearray(), Keys(key("wrong"), columns), allow_ctr=mode.ctr)
        assert caught.value.module == "footer"
        wrong = {**columns, RICH_LEAVES[2]: key("wrong", 24)}
        with pytest.raises(IntegrityError) as caught:
            parquet.decrypt_file(sealed, bytearray(), Keys(mode.footer, wrong), allow_ctr=mode.ctr)
        assert place(caught.value) == ("column metadata", 0, "list.list.element", None)


# ---------------------------------------------------------------- CTR


@pytest.mark.parametrize("footer", [False, True])
def test_pages_under_ctr(footer: bool) -> None:
    """They carry no tag: a change is caught by a CRC, where there is one, and named where there is not."""
    mode = Mode(CTR, footer, "columns")
    file, modules = modules_of(mode)
    bare, bare_modules = modules_of(mode, rich(write_page_checksum=False))
    count = 0
    for module in modules:
        if module.ctr:
            changed = file.flip(module)
            error = fails(changed, mode)
            assert isinstance(error, IntegrityError)
            assert place(error) == place_of(module)
            out = unseal(changed, mode, RICH_LEAVES, check_crc=False)  # asked for
            assert len(out) > 1000
            count += 1
    assert count == 18
    for module in bare_modules:
        if module.ctr:
            changed = bare.flip(module)
            report = parquet.verify(changed, mode.keys(RICH_LEAVES), allow_ctr=mode.ctr)
            assert not any(row.authenticated for row in report.columns)
            assert any("pages carry no tag" in warning for warning in report.warnings)
            back = unseal(changed, mode, RICH_LEAVES)
            assert sum(a != b for a, b in zip(back, unseal(bare.data, mode, RICH_LEAVES), strict=True)) == 1
    sound = parquet.verify(seal(rich(), Mode()), Mode().keys([]))
    assert all(row.authenticated for row in sound.columns)
    assert sound.warnings == []


def test_a_page_that_lost_its_tag() -> None:
    """The file says GCM: a page in CTR's form does not pass, nor the other way round."""
    for mode, ctr in ((FOUR[0], True), (FOUR[2], False)):
        file, modules = modules_of(mode)
        page = next(one for one in modules if one.kind == ref.DATA_PAGE)
        secret = mode.leaf_keys(RICH_LEAVES)[page.path]
        aad = ref.module_aad(file.aad, page.kind, page.row_group, page.column, page.page)
        size = page.length - (16 if ctr else 32)
        forged = ref.seal(secret, page.plain[:size].ljust(size, b"\0"), aad, ctr=ctr)
        error = fails(file.replace(page, forged), mode)
        assert place(error) == place_of(page)  # type: ignore[arg-type]


# ---------------------------------------------------------------- with keys: what no tag can catch


def resealed(file: ref.ParquetFile, module: ref.Module, plain: bytes) -> bytes:
    """The file with other plaintext, no longer than it was, sealed as it must be in place of a module."""
    chunk = next(one for one in file.chunks() if (one.row_group, one.column) == (module.row_group, module.column))
    overhead = 16 if module.ctr else 32
    aad = ref.module_aad(file.aad, module.kind, module.row_group, module.column, module.page)
    return file.replace(module, ref.seal(chunk.key, plain.ljust(module.length - overhead, b"\0"), aad, ctr=module.ctr))  # type: ignore[arg-type]


def edited(module: ref.Module, edit: Callable[[ref.Struct], Any]) -> bytes:
    parsed, _ = ref.parse(module.plain)
    edit(parsed)
    return ref.serialise(parsed)


HOSTILE = {
    "empty": b"\x00",
    "cut": b"\x15\x00\x15",
    "deep": b"\x1c" * 300,
    "deep lists": b"\x19\x19" * 150,
    "a long list": b"\x19\xfc\xff\xff\xff\xff\x07",
    "a long text": b"\x18\xff\xff\xff\xff\x07",
    "a long map": b"\x1b\xff\xff\xff\xff\x07\x88",
    "a varint without end": b"\x15" + b"\xff" * 40,
    "a field twice": b"\x15\x00\x05\x02\x00\x00",
    "an id beyond": b"\x05\xff\xff\xff\xff\x0f\x00\x00",
    "an unknown type": b"\x1f\x00",
    "ones": b"\xff" * 60,
}


def hostile_headers(right: ref.Struct) -> Iterator[tuple[str, bytes]]:
    """Page headers that say what cannot be, in no more bytes than there were."""

    def with_(number: int, value: int) -> bytes:
        changed, _ = ref.parse(ref.serialise(right))
        changed.remove(4)  # the CRC leaves room
        changed.set(number, ref.I32, value)
        return ref.serialise(changed)

    yield from HOSTILE.items()
    for number, name in ((1, "type"), (2, "uncompressed size"), (3, "size")):
        for value in (-1, -(1 << 31), (1 << 31) - 1, 4 if number == 1 else 0, 1 if number == 1 else 5):
            if number == 2 and value >= 0:
                continue  # nobody here decompresses it
            yield f"{name} {value}", with_(number, value)
    for name, edit in (
        ("no data page header", lambda one: one.remove(5, 8)),
        ("no size", lambda one: one.remove(3)),
        ("no type", lambda one: one.remove(1)),
        ("values", lambda one: one[5].set(1, ref.I32, -1)),
    ):
        changed, _ = ref.parse(ref.serialise(right))
        changed.remove(4)
        edit(changed)
        yield name, ref.serialise(changed)


@pytest.mark.parametrize("mode", [FOUR[0], FOUR[3]], ids=str)
def test_hostile_headers_behind_a_tag(mode: Mode) -> None:
    file, modules = modules_of(mode)
    column = ("id",)
    header = next(one for one in modules if one.kind == ref.DATA_HEADER and one.path == column and one.page == 0)
    right, _ = ref.parse(header.plain)
    for name, plain in hostile_headers(right):
        plain = plain[: header.length - 32]
        error = fails(resealed(file, header, plain), mode)
        assert "id" in str(error), (name, error)
    dictionary = next(one for one in modules if one.kind == ref.DICTIONARY_HEADER)
    for plain in (header.plain, *HOSTILE.values()):
        if len(plain) <= dictionary.length - 32:
            fails(resealed(file, dictionary, plain[: dictionary.length - 32]), mode)


def v2_file() -> bytes:
    sink = io.BytesIO()
    values = pa.array([None if i % 3 else i for i in range(40)], pa.int64())
    options = {"data_page_version": "2.0", "compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"a": values}), sink, write_page_checksum=True, **options)
    return sink.getvalue()


@pytest.mark.parametrize("layout", ["arrow", "parquet-java"])
def test_levels_that_lie(layout: Any) -> None:
    """V2 pages say how long their levels are: as long as the page, longer, negative."""
    mode, leaves = Mode(columns="columns"), [("a",)]
    sealed = bytearray()
    parquet.encrypt_file(v2_file(), sealed, mode.keys(leaves), v2_layout=layout)
    file = reference(bytes(sealed), mode, leaves)
    header = next(one for one in file.modules() if one.kind == ref.DATA_HEADER)
    right = ref.parse(header.plain)[0]
    for number, value in itertools.product((5, 6), (-1, 1, right[3] - 31, right[3], (1 << 31) - 1, -(1 << 31))):
        changed, _ = ref.parse(header.plain)
        changed.remove(4)
        changed[8].set(number, ref.I32, value)
        plain = ref.serialise(changed)
        if len(plain) > header.length - 32:
            continue
        hostile = resealed(file, header, plain)
        for call in (parquet.decrypt_file, parquet.reencrypt_file):
            out = bytearray()
            try:
                arguments = (mode.keys(leaves),) * (1 if call is parquet.decrypt_file else 2)
                call(hostile, out, *arguments)
            except BROKEN:
                assert out == b""
            else:
                # The frame fills the page whatever is said of levels: then only a decoder can tell.
                assert layout == "arrow"
                assert 0 <= value <= right[3]


META = {
    "pages outside": (9, ref.I64, 1 << 40),
    "pages in the footer": (9, ref.I64, 5300),
    "pages before the file": (9, ref.I64, -5),
    "pages at the magic": (9, ref.I64, 1),
    "another page first": (9, ref.I64, 100),
    "a size beyond": (7, ref.I64, 1 << 40),
    "the largest size": (7, ref.I64, (1 << 63) - 1),
    "a negative size": (7, ref.I64, -1),
    "a smaller size": (7, ref.I64, 100),
    "no size": (7, ref.I64, 0),
    "more values": (5, ref.I64, 13),
    "fewer values": (5, ref.I64, 11),
    "the most values": (5, ref.I64, (1 << 63) - 1),
    "a bloom filter outside": (14, ref.I64, 1 << 40),
    "a bloom filter elsewhere": (14, ref.I64, 50),
    "a longer bloom filter": (15, ref.I32, (1 << 31) - 1),
    "a dictionary elsewhere": (11, ref.I64, 1 << 40),
}


@pytest.mark.parametrize("what", [*META, *HOSTILE])
def test_hostile_column_metadata_behind_a_tag(what: str) -> None:
    """What decrypt_file could be led to read by somebody who has the key; verify finds all of it."""
    for mode in (FOUR[0], FOUR[1]):
        file, modules = modules_of(mode)
        module = next(one for one in modules if one.kind == ref.COLUMN_META and one.path == ("id",))
        if what in META:
            number, kind, value = META[what]
            plain = edited(module, lambda meta, n=number, k=kind, v=value: (meta.remove(12, 13), meta.set(n, k, v)))  # type: ignore[misc]
        else:
            plain = HOSTILE[what]
        hostile = resealed(file, module, plain[: module.length - 32])
        with pytest.raises(BROKEN) as caught:
            parquet.verify(hostile, mode.keys(RICH_LEAVES), threads=1, allow_ctr=mode.ctr)
        assert "id" in str(caught.value) or what in HOSTILE, caught.value
        out = bytearray()
        try:
            parquet.decrypt_file(hostile, out, mode.keys(RICH_LEAVES), threads=1, allow_ctr=mode.ctr)
        except BROKEN:
            assert out == b""
        else:
            assert "values" in what or what in ("another page first", "no size", "a dictionary elsewhere"), what


def hostile_footers(file: ref.ParquetFile) -> Iterator[ref.Struct]:
    """The file's footer, with one thing in it changed each time."""

    def swap_columns(footer: ref.Struct) -> None:
        chunks = footer[4].items[0][1].items
        chunks[1], chunks[3] = chunks[3], chunks[1]

    def first(footer: ref.Struct) -> ref.Struct:
        return footer[4].items[0][1].items[0]

    unknown = ref.Struct([[3, ref.STRUCT, ref.Struct()]])
    sizes = ((4, 1 << 40), (5, (1 << 31) - 1), (6, 1 << 62), (6, 3), (7, -1))
    edits: list[Callable[[ref.Struct], Any]] = [
        lambda footer: footer.remove(2),
        lambda footer: footer[2].items[0].set(5, ref.I32, (1 << 31) - 1),
        lambda footer: footer[2].items[0].set(5, ref.I32, -1),
        lambda footer: footer[4].items[0][1].items.pop(),
        lambda footer: footer[4].items[1].set(7, ref.I16, -5),
        lambda footer: footer[4].items.reverse(),  # their ordinals go with them: readers go by the place or the ordinal
        lambda footer: footer[4].items[1].set(7, ref.I16, 0),
        swap_columns,
        *(
            lambda footer, n=n, value=value: first(footer).set(n, ref.I64 if n in (4, 6) else ref.I32, value)
            for n, value in sizes
        ),
        lambda footer: first(footer).remove(8),
        lambda footer: first(footer).set(8, ref.STRUCT, unknown),
        lambda footer: first(footer).set(9, ref.BINARY, b""),
    ]
    for edit in edits:
        footer, _ = ref.parse(ref.serialise(file.footer))
        edit(footer)
        yield footer


@pytest.mark.parametrize("mode", FOUR, ids=str)
def test_hostile_footers_behind_a_tag(mode: Mode) -> None:
    file, _ = modules_of(mode)
    keys = mode.keys(RICH_LEAVES)
    for number, one in enumerate(hostile_footers(file)):
        hostile = file.with_footer(one)
        caught(BROKEN, partial(parquet.verify, hostile, keys, threads=1, allow_ctr=mode.ctr), number)
    for plain in HOSTILE.values():
        with pytest.raises(BROKEN):
            parquet.decrypt_file(file.with_footer(plain), bytearray(), mode.keys(RICH_LEAVES), allow_ctr=mode.ctr)


def test_hostile_file_crypto_metadata() -> None:
    """Before any key is used."""
    file, _ = modules_of(FOUR[0])
    keys = FOUR[0].keys(RICH_LEAVES)
    crypto = ref.serialise(file.crypto)  # type: ignore[arg-type]
    tail = file.data[file.tail + len(crypto) : -8]
    for name, plain in HOSTILE.items():
        hostile = file.data[: file.tail] + plain + tail
        hostile += struct.pack("<I", len(hostile) - file.tail) + b"PARE"
        for call in (lambda data: parquet.decrypt_file(data, bytearray(), keys), parquet.inspect):
            caught(BROKEN, partial(call, hostile), name)
    for number in (3, 0):
        union = ref.Struct([[number, ref.STRUCT, ref.Struct()]]) if number else ref.Struct()
        changed = ref.Struct([[1, ref.STRUCT, union]])
        with pytest.raises(FormatError, match="algorithm"):
            parquet.inspect(file.with_footer(crypto=changed))
    # CTR that is said to be GCM does not pass. The other way round no tag tells: what is allowed, every report names.
    for mode, number in ((FOUR[2], 1), (FOUR[0], 2)):
        file, _ = modules_of(mode)
        changed = ref.Struct([[1, ref.STRUCT, ref.Struct([[number, ref.STRUCT, file.crypto[1].fields[0][2]]])]])  # type: ignore[index]
        hostile = file.with_footer(crypto=changed)
        if number == 1:
            assert isinstance(fails(hostile, mode), IntegrityError | FormatError)
        else:
            report = parquet.decrypt_file(hostile, bytearray(), mode.keys(RICH_LEAVES), allow_ctr=True)
            assert report.algorithm == CTR
            assert not any(row.authenticated for row in report.columns)
            report = parquet.verify(hostile, mode.keys(RICH_LEAVES), allow_ctr=True)
            assert report.algorithm == CTR
            assert not any(row.authenticated for row in report.columns)


# ---------------------------------------------------------------- what verify finds and decrypt_file does not


def test_verify_compares_indexes_with_pages() -> None:
    for mode in (FOUR[0], FOUR[3]):
        file, modules = modules_of(mode)
        index = next(one for one in modules if one.kind == ref.OFFSET_INDEX)

        def swap(one: ref.Struct) -> None:
            first, second = (location[1] for location in one[1].items)
            one[1].items[0].set(1, ref.I64, second)
            one[1].items[1].set(1, ref.I64, first)

        for name, edit in (
            ("swapped", swap),
            ("moved", lambda one: one[1].items[0].set(1, ref.I64, one[1].items[0][1] + 1)),
            ("longer", lambda one: one[1].items[0].set(2, ref.I32, one[1].items[0][2] + 1)),
            ("one less", lambda one: one[1].items.pop()),
            ("outside", lambda one: one[1].items[1].set(1, ref.I64, 8000)),
            ("rows not from the first", lambda one: one[1].items[0].set(3, ref.I64, 1)),
            ("rows beyond", lambda one: one[1].items[1].set(3, ref.I64, 63)),
            ("rows backwards", lambda one: one[1].items[1].set(3, ref.I64, -1)),
        ):
            hostile = resealed(file, index, edited(index, edit))
            verify = partial(parquet.verify, hostile, mode.keys(RICH_LEAVES), threads=1, allow_ctr=mode.ctr)
            assert place(caught(IntegrityError, verify, name)) == place_of(index), name
        for plain in HOSTILE.values():
            hostile = resealed(file, index, plain[: index.length - 32])
            with pytest.raises(BROKEN):
                parquet.verify(hostile, mode.keys(RICH_LEAVES), threads=1, allow_ctr=mode.ctr)


def test_verify_reads_column_indexes_and_bloom_filters() -> None:
    mode = FOUR[0]
    file, modules = modules_of(mode)
    index = next(one for one in modules if one.kind == ref.COLUMN_INDEX)
    header = next(one for one in modules if one.kind == ref.BLOOM_HEADER)
    for module, plains in (
        (index, HOSTILE.values()),
        (header, [edited(header, lambda one: one.set(1, ref.I32, 33)), *HOSTILE.values()]),
    ):
        for plain in plains:
            if plain == b"\x00" and module is index:
                continue
            with pytest.raises(BROKEN):
                parquet.verify(
                    resealed(file, module, plain[: module.length - 32]),
                    mode.keys(RICH_LEAVES),
                    threads=1,
                    allow_ctr=mode.ctr,
                )


@pytest.mark.parametrize("mode", FOUR, ids=str)
def test_verify_compares_the_footer_with_the_columns(mode: Mode) -> None:
    """Row groups and rows that are said to be more or fewer, sizes that are not the columns'."""
    file, _ = modules_of(mode)
    for name, edit in (
        ("size", lambda footer: footer[4].items[0].set(6, ref.I64, 1)),
        ("ordinal", lambda footer: footer[4].items[0].set(7, ref.I16, 1)),
    ):
        footer, _ = ref.parse(ref.serialise(file.footer))
        edit(footer)
        hostile = file.with_footer(footer)
        verify = partial(parquet.verify, hostile, mode.keys(RICH_LEAVES), threads=1, allow_ctr=mode.ctr)
        error = caught(IntegrityError, verify, name)
        assert error.module in ("footer", "column metadata")
        assert error.row_group in (0, 1)
    for edit in (lambda footer: footer.set(3, ref.I64, 25), lambda footer: footer[4].items.pop()):
        footer, _ = ref.parse(ref.serialise(file.footer))
        edit(footer)
        report = parquet.verify(file.with_footer(footer), mode.keys(RICH_LEAVES), threads=1, allow_ctr=mode.ctr)
        assert any("rows, its row groups have" in warning for warning in report.warnings)


# ---------------------------------------------------------------- plaintext files, which have no tags


def damaged(edit: Callable[[ref.Struct], Any]) -> bytes:
    file = ref.ParquetFile(PLAIN)
    edit(file.footer)
    return file.with_footer()


def test_damaged_plaintext_files_are_refused(tmp_path: Path) -> None:
    """What would be lost, or read as what it is not, once it is encrypted and the source is gone."""

    def chunk(footer: ref.Struct, column: int = 0) -> ref.Struct:
        return footer[4].items[0][1].items[column]

    cases = {
        "a chunk where another is": lambda footer: chunk(footer)[3].set(9, ref.I64, chunk(footer, 3)[3][9]),
        "a bloom filter in pages": lambda footer: chunk(footer)[3].set(14, ref.I64, 40),
        "an index in pages": lambda footer: chunk(footer).set(6, ref.I64, 40),
        "a longer index": lambda footer: chunk(footer).set(7, ref.I32, chunk(footer)[7] + 2),
        "a column less": lambda footer: footer[4].items[1][1].items.pop(),
        "pages outside": lambda footer: chunk(footer)[3].set(7, ref.I64, 1 << 40),
        "an index outside": lambda footer: chunk(footer).set(4, ref.I64, 1 << 40),
        "an index of 2 GiB": lambda footer: chunk(footer).set(5, ref.I32, (1 << 31) - 1),
        "a shorter chunk": lambda footer: chunk(footer)[3].set(5, ref.I64, 1 << 40),
        "no metadata": lambda footer: chunk(footer).remove(3),
        "no size": lambda footer: chunk(footer)[3].remove(7),
        "no children": lambda footer: footer[2].items[0].set(5, ref.I32, 3),
    }
    for name, edit in cases.items():
        for source in (damaged(edit), tmp_path / "plain"):
            if isinstance(source, bytes):
                (tmp_path / "plain").write_bytes(source)
            out = bytearray(b"before")
            caught(FormatError, partial(parquet.encrypt_file, source, out, Keys(key("k")), threads=1), name)
            assert out in (b"", b"before")  # type: ignore[comparison-overlap]
    file = ref.ParquetFile(PLAIN)
    for module in file.modules():
        if module.kind in (ref.COLUMN_INDEX, ref.OFFSET_INDEX, ref.BLOOM_HEADER, ref.DATA_HEADER):
            with pytest.raises(FormatError):
                parquet.encrypt_file(file.replace(module, b"\xff" * module.length), bytearray(), Keys(key("k")))


# ---------------------------------------------------------------- anything at all


@pytest.fixture(scope="module")
def sealed_files() -> list[tuple[Mode, bytes]]:
    return [(mode, seal(rich(), mode)) for mode in (*FOUR, Mode(columns="partial"), Mode(GCM, True, "partial"))]


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300, suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None)
def test_any_change_is_an_error_of_ours(sealed_files: list[tuple[Mode, bytes]], data: st.DataObject) -> None:
    """A few bytes changed, cut out or put in: rows are right, or there are none."""
    mode, sealed = data.draw(st.sampled_from(sealed_files))
    changed = bytearray(sealed)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(0, len(changed) - 1), st.integers(len(changed) - 900, len(changed) - 1)))
        what = data.draw(st.sampled_from(["flip", "cut", "put", "number"]))
        if what == "flip":
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del changed[at : at + data.draw(st.integers(1, 40))]
        elif what == "put":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=40))
        else:
            changed[at : at + 4] = struct.pack(
                "<I", data.draw(st.sampled_from([0, 27, 1 << 31, (1 << 32) - 1, 1 << 16]))
            )
    keys = mode.keys(RICH_LEAVES)
    open_columns = mode.columns == "partial"
    for call in (
        lambda out: parquet.decrypt_file(bytes(changed), out, keys, threads=1),
        lambda out: parquet.reencrypt_file(bytes(changed), out, keys, keys, threads=1),
        lambda out: parquet.reencrypt_file(bytes(changed), out, keys, keys, threads=1, same_size=True),
        lambda out: parquet.verify(bytes(changed), keys, threads=1),
        lambda out: parquet.inspect(bytes(changed)),
        lambda out: parquet.encrypt_file(bytes(changed), out, keys, threads=1),
    ):
        out = bytearray()
        try:
            call(out)
        except AgsError:
            assert out == b""
    if not open_columns and mode.algorithm == GCM and changed != sealed:
        with pytest.raises(AgsError):
            parquet.verify(bytes(changed), keys, threads=1)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=200, suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None)
def test_any_plaintext_file_is_an_error_of_ours(data: st.DataObject) -> None:
    """Plaintext files have no tags: what encrypt_file makes of damaged ones it can decrypt again."""
    changed = bytearray(PLAIN)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, len(changed) - 1), st.integers(len(changed) - 1400, len(changed) - 1)))
        changed[at] = data.draw(st.integers(0, 255))
    out, back = bytearray(), bytearray()
    try:
        parquet.inspect(bytes(changed))
        parquet.encrypt_file(bytes(changed), out, Keys(key("k")), threads=1, plaintext_footer=data.draw(st.booleans()))
    except AgsError:
        assert out == b""
    else:
        parquet.decrypt_file(out, back, Keys(key("k")), threads=1)
        assert back


def test_lies_allocate_nothing(tmp_path: Any) -> None:
    """Every length, count and size that a file can lie about, in a process that may have 24 MiB more than it has: what
    the windows of any file take.
    """
    import pickle

    cases: list[tuple[int, bytes]] = [(number, seal(PLAIN, mode)) for number, mode in enumerate(FOUR)]
    for number, mode in enumerate(FOUR):
        file, modules = modules_of(mode)
        for module in modules:
            if module.kind == ref.FOOTER and mode.plaintext_footer:
                continue
            for length in ((1 << 31) - 1, (1 << 32) - 1, 1 << 30):
                stored = bytearray(file.stored(module))
                stored[:4] = struct.pack("<I", length)
                cases.append((number, file.replace(module, bytes(stored))))
        tails = (struct.pack("<I", length) + file.data[-4:] for length in (1 << 30, (1 << 32) - 1))
        cases += [(number, file.data[:-8] + tail) for tail in tails]
        cases += [(number, file.with_footer(plain)) for plain in HOSTILE.values()]
        header = next(one for one in modules if one.kind == ref.DATA_HEADER)
        for _, plain in hostile_headers(ref.parse(header.plain)[0]):
            cases.append((number, resealed(file, header, plain[: header.length - 32])))
        meta = next(one for one in modules if one.kind == ref.COLUMN_META)
        for n, kind, value in META.values():
            plain = edited(meta, lambda one, n=n, kind=kind, value=value: (one.remove(12, 13), one.set(n, kind, value)))  # type: ignore[misc]
            cases.append((number, resealed(file, meta, plain[: meta.length - 32])))
        for n in (4, 5, 6, 7):
            footer, _ = ref.parse(ref.serialise(file.footer))
            footer[4].items[0][1].items[0].set(n, ref.I64 if n in (4, 6) else ref.I32, (1 << 31) - 1)
            cases.append((number, file.with_footer(footer)))
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    assert f"done {len(cases)}" in run_python(program(parquets.open_in_little_memory, tmp_path / "cases"), timeout=100)
