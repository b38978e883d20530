"""What the proofs of ags_fast.parquet share: the modes of the spec, a file that has all module types, files taken apart
and put together otherwise. All offsets and sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_peers import CTR, GCM, PmeKeys

from ags_fast import parquet
from ags_fast.parquet import FOOTER_KEY, Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pa, pq = peers.pa, peers.pq
KF = b"0123456789012345"
Error = TypeVar("Error", bound=Exception)
PREFIX = b"warehouse/table/file"


def key(name: str, size: int = 16) -> bytes:
    """Return a key, always the same for a name."""
    return hashlib.sha256(name.encode()).digest()[:size]


# ---------------------------------------------------------------- modes


@dataclass(frozen=True)
class Mode:
    """A way to encrypt a file, whatever columns it has. Sizes of keys differ between modes and columns."""

    algorithm: str = GCM
    plaintext_footer: bool = False
    columns: str = "uniform"
    prefix: str | None = None  # "stored" or "supplied"
    footer_size: int = 16
    generation: str = ""  # other keys for the same columns

    def __str__(self) -> str:
        footer = "signed" if self.plaintext_footer else "encrypted"
        return "-".join(("ctr" if self.algorithm == CTR else "gcm", footer, self.columns, str(self.prefix).lower()))

    @property
    def ctr(self) -> bool:
        """Return what a reader must allow."""
        return self.algorithm == CTR

    @property
    def footer(self) -> bytes:
        return key(f"footer {self.generation}", self.footer_size)

    @property
    def aad_prefix(self) -> bytes | None:
        return PREFIX if self.prefix else None

    @property
    def supplied(self) -> bytes | None:
        """Return what a reader must know."""
        return PREFIX if self.prefix == "supplied" else None

    def by_column(self, leaves: Sequence[tuple[str, ...]]) -> dict[Any, bytes | None]:
        """Return keys by path; None is the footer key."""
        if self.columns == "uniform" or not leaves:
            return {}
        if self.columns == "groups":  # a key for all that is in a top-level field
            tops = list(dict.fromkeys(leaf[:1] for leaf in leaves))
            return {top: self._key(top) for top in tops[::2]}
        some = leaves[:1] if self.columns == "partial" else leaves[::2]
        found: dict[Any, bytes | None] = {leaf: self._key(leaf) for leaf in some}
        if len(leaves) > 2:
            found[leaves[1]] = None
        return found

    def _key(self, path: tuple[str, ...]) -> bytes:
        return key(f"{path} {self.generation}", (16, 24, 32)[len("".join(path)) % 3])

    def keys(self, leaves: Sequence[tuple[str, ...]]) -> Keys:
        columns = {path: FOOTER_KEY if value is None else value for path, value in self.by_column(leaves).items()}
        metadata = {path: b"of " + ".".join(path).encode() for path in columns if columns[path] is not FOOTER_KEY}
        return Keys(self.footer, columns, footer_metadata=b"of the footer", column_metadata=metadata)

    def pme(self, leaves: Sequence[tuple[str, ...]]) -> PmeKeys:
        """For peers that read; a group's key is told for each of its columns."""
        return PmeKeys(self.footer, self.leaf_keys(leaves), aad_prefix=self.supplied)

    def leaf_keys(self, leaves: Sequence[tuple[str, ...]]) -> dict[Any, bytes]:
        by_column, found = self.by_column(leaves), {}
        for leaf in leaves:
            value = next((by_column[leaf[:n]] for n in range(len(leaf), 0, -1) if leaf[:n] in by_column), None)
            if value is not None:
                found[leaf] = value
        return found

    @property
    def options(self) -> dict[str, Any]:
        """Of encrypt_file."""
        return {
            "algorithm": self.algorithm,
            "plaintext_footer": self.plaintext_footer,
            "other_columns": "plain" if self.columns == "partial" else "footer",
            "aad_prefix": self.aad_prefix,
            "store_aad_prefix": self.prefix == "stored",
        }


COLUMNS_OF_MODES = ("uniform", "columns", "partial", "groups")
PREFIXES_OF_MODES = (None, "stored", "supplied")
MODES = [
    # The size of the footer key goes through its three values with columns and prefix, like a Latin square.
    Mode(algorithm, plaintext_footer, columns, prefix, (16, 24, 32)[(i + j) % 3])
    for algorithm in (GCM, CTR)
    for plaintext_footer in (False, True)
    for i, columns in enumerate(COLUMNS_OF_MODES)
    for j, prefix in enumerate(PREFIXES_OF_MODES)
]


def pairs_of(mode: Mode) -> set[tuple[Any, Any]]:
    """Every two values of a mode, each as (dimension, value)."""
    values = [(one.name, getattr(mode, one.name)) for one in dataclasses.fields(mode)]
    return set(itertools.combinations(values, 2))


def pairwise(modes: Sequence[Mode]) -> list[Mode]:
    """A few of the modes, in which any two values are together that are together in one of all: most faults need no
    more. The same few each time.
    """
    left, chosen = set().union(*map(pairs_of, modes)), []
    while left:
        chosen.append(max(modes, key=lambda mode: len(pairs_of(mode) & left)))
        left -= pairs_of(chosen[-1])
    return chosen


PAIRWISE = pairwise(MODES)
# Marks a test of modes: `make test` runs the pairwise dozen, `make test-long` the rest of the product.
in_every_mode = pytest.mark.parametrize(
    "mode", [*PAIRWISE, *(pytest.param(one, marks=pytest.mark.slow) for one in MODES if one not in PAIRWISE)], ids=str
)
in_pairwise_modes = pytest.mark.parametrize("mode", PAIRWISE, ids=str)
FOUR = [Mode(algorithm, footer, "columns", "stored") for algorithm in (GCM, CTR) for footer in (False, True)]


UNIFORM, COLUMNS = Mode(), Mode(columns="columns")


def leaves_of(plain: bytes) -> list[tuple[str, ...]]:
    return ref.ParquetFile(plain).leaves


def seal(plain: Any, mode: Mode, leaves: Sequence[tuple[str, ...]] | None = None, **options: Any) -> bytes:
    """A plaintext file encrypted by ags_fast, in memory."""
    out = bytearray()
    keys = mode.keys(leaves_of(plain) if leaves is None else leaves)
    parquet.encrypt_file(plain, out, keys, **{"threads": 1, **mode.options, **options})
    return bytes(out)


def unseal(sealed: Any, mode: Mode, leaves: Sequence[tuple[str, ...]], **options: Any) -> bytes:
    out = bytearray()
    known = {"threads": 1, "aad_prefix": mode.supplied, "allow_ctr": mode.ctr, **options}
    parquet.decrypt_file(sealed, out, mode.keys(leaves), **known)
    return bytes(out)


def reference(sealed: bytes, mode: Mode, leaves: Sequence[tuple[str, ...]]) -> ref.ParquetFile:
    """The file as the reference opens it, which shares nothing with ags_fast."""
    return ref.ParquetFile(sealed, mode.footer, mode.leaf_keys(leaves), aad_prefix=mode.supplied)


def data_of(file: bytes) -> bytes:
    """Return everything before the footer except the magic."""
    return file[4 : len(file) - 8 - int.from_bytes(file[-8:-4], "little")]


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


def refused(error: type[Exception], match: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call, whose target comes second, raises, and leaves nothing in its target."""
    out = bytearray()
    with pytest.raises(error, match=match):
        call(args[0], out, *args[1:], **kwargs)
    assert out == b""


def caught(errors: type[Error] | tuple[type[Error], ...], call: Callable[[], object], what: object) -> Error:
    """The error that a call raises; `what` names the case in the failure of a call that raises none."""
    try:
        call()
    except errors as error:
        return error
    raise AssertionError(f"{what}: nothing was raised")


# ---------------------------------------------------------------- files


def rich_table(rows: int = 24) -> Any:
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "word": pa.array([f"word{i % 3}" for i in range(rows)]),
            "list": pa.array([[i, None] if i % 4 else None for i in range(rows)], pa.list_(pa.int32())),
            "open": pa.array(range(1000, 1000 + rows), pa.int32()),
        }
    )


RICH_LEAVES = [("id",), ("word",), ("list", "list", "element"), ("open",)]


def rich(seed: int = 0, **options: Any) -> bytes:
    """A small plaintext file that has all types of modules: dictionaries, indexes, bloom filters; CRCs, two row groups,
    and two data pages in each chunk, of which many have equal length.
    """
    sink = io.BytesIO()
    table = rich_table()
    table = table.set_column(0, "id", pa.array([i + seed for i in range(table.num_rows)], pa.int64()))
    settings = {
        "row_group_size": 12,
        "max_rows_per_page": 6,
        "write_batch_size": 6,
        "write_page_index": True,
        "write_page_checksum": True,
        "use_dictionary": ["word"],
        "compression": "none",
        "bloom_filter_options": {"word": {"ndv": 4}, "id": {"ndv": 4}},
    }
    pq.write_table(table, sink, **{**settings, **options})
    return sink.getvalue()


@dataclass
class Part:
    """What a column chunk consists of."""

    pages: list[tuple[ref.Struct, bytes]]
    indexes: dict[int, ref.Struct] = field(default_factory=dict)
    bloom: tuple[ref.Struct, bytes] | None = None


class Pieces:
    """A plaintext file taken apart. `build` puts together what has become of it, with offsets and sizes that fit."""

    def __init__(self, plain: bytes) -> None:
        file = ref.ParquetFile(plain)
        self.footer = file.footer
        self.parts: dict[tuple[int, int], Part] = {}
        modules = list(file.modules())
        for chunk in file.chunks():
            place = chunk.row_group, chunk.column
            mine = [module for module in modules if (module.row_group, module.column) == place]
            headers = [one for one in mine if one.kind in (ref.DATA_HEADER, ref.DICTIONARY_HEADER)]
            bodies = [one for one in mine if one.kind in ref.PAGES]
            part = Part([(ref.parse(h.plain)[0], b.plain) for h, b in zip(headers, bodies, strict=True)])
            part.indexes = {
                one.kind: ref.parse(one.plain)[0] for one in mine if one.kind in (ref.COLUMN_INDEX, ref.OFFSET_INDEX)
            }
            bloom = {one.kind: one.plain for one in mine if one.kind in (ref.BLOOM_HEADER, ref.BLOOM_BITSET)}
            if bloom:
                part.bloom = ref.parse(bloom[ref.BLOOM_HEADER])[0], bloom[ref.BLOOM_BITSET]
            self.parts[place] = part

    def chunk(self, row_group: int, column: int) -> ref.Struct:
        return self.footer[4].items[row_group][1].items[column]

    def meta(self, row_group: int, column: int) -> ref.Struct:
        return self.chunk(row_group, column)[3]

    def build(self, *, order: str = "pbco", gap: bytes = b"") -> bytes:
        """order: of pages, bloom filters, column and offset indexes. gap: what stands between any two parts."""
        before = b""
        while True:  # an offset index may be longer for where the pages are, and so move them
            data = self._lay(order, gap)
            if data == before:
                return data
            before = data

    def _lay(self, order: str, gap: bytes) -> bytes:
        out = bytearray(b"PAR1")
        for kind in order:
            for (row_group, column), part in self.parts.items():
                chunk, meta = self.chunk(row_group, column), self.meta(row_group, column)
                before = len(out)
                if kind == "p":
                    self._lay_pages(out, part, meta)
                elif kind == "b" and part.bloom:
                    out += ref.serialise(part.bloom[0]) + part.bloom[1]
                    meta.set(14, ref.I64, before)
                    meta.set(15, ref.I32, len(out) - before)
                elif kind in "co":
                    index = part.indexes.get(ref.COLUMN_INDEX if kind == "c" else ref.OFFSET_INDEX)
                    if index is not None:
                        out += ref.serialise(index)
                        number = 6 if kind == "c" else 4
                        chunk.set(number, ref.I64, before)
                        chunk.set(number + 1, ref.I32, len(out) - before)
                if len(out) > before:
                    out += gap
        for row_group, group in enumerate(self.footer[4].items):
            metas = [self.meta(row_group, column) for column in range(len(group[1].items))]
            group.set(2, ref.I64, sum(meta[6] for meta in metas))
            for number, value in ((5, None), (6, sum(meta[7] for meta in metas))):
                if group[number] is not None and value is not None:
                    group.set(number, ref.I64, value)
        footer = ref.serialise(self.footer)
        return bytes(out) + footer + len(footer).to_bytes(4, "little") + b"PAR1"

    @staticmethod
    def _lay_pages(out: bytearray, part: Part, meta: ref.Struct) -> None:
        start, uncompressed, places = len(out), 0, []
        dictionary = first = None
        for header, body in part.pages:
            at = len(out)
            out += ref.serialise(header) + body
            uncompressed += len(out) - at - len(body) + header[2]
            if header[1] == 2:
                dictionary = at
            else:
                first = at if first is None else first
                places.append((at, len(out) - at))
        meta.set(6, ref.I64, uncompressed)
        meta.set(7, ref.I64, len(out) - start)
        if first is not None:
            meta.set(9, ref.I64, first)
        if meta[11] is not None and dictionary is not None:
            meta.set(11, ref.I64, dictionary)
        if ref.OFFSET_INDEX in part.indexes:
            for location, (at, nbytes) in zip(part.indexes[ref.OFFSET_INDEX][1].items, places, strict=True):
                location.set(1, ref.I64, at)
                location.set(2, ref.I32, nbytes)


def with_footer(plain: bytes, edit: Callable[[ref.Struct], None]) -> bytes:
    """Return a plaintext file with another footer; everything else stays where it is."""
    file = ref.ParquetFile(plain)
    edit(file.footer)
    return file.with_footer()


def footer_without_places(plain: bytes) -> bytes:
    """A plaintext file's footer without what encryption puts into it for good: a row group's file_offset,
    total_compressed_size and ordinal, a chunk's file_offset.
    """
    footer, _ = ref.parse(plain, len(plain) - 8 - int.from_bytes(plain[-8:-4], "little"))
    for group in footer[4].items:
        group.remove(5, 6, 7)
        for chunk in group[1].items:
            chunk.remove(2)
    return ref.serialise(footer)


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


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
