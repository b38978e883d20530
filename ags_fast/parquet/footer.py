"""Footers that are made here: of a new file, of one with other keys, without columns, and as plain readers see one.

All fields that encryption does not touch are copied byte by byte (Parquet Modular Encryption, sections 5.2 to 5.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast._core import FRAME_NBYTES, Footer, moved_chunk, moved_chunks, thrift_splice
from ags_fast.columnar import thrift
from ags_fast.columnar.schema import tree
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError
from ags_fast.parquet.keys import dotted
from ags_fast.parquet.opened import unknown_fields, with_kept
from ags_fast.parquet.spec import (
    COLUMN_METADATA,
    ENCRYPTED_MAGIC,
    FOOTER,
    PLAIN_MAGIC,
    TAIL_NBYTES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast._core import Chunk, Modules
    from ags_fast.columnar.thrift import Edits
    from ags_fast.files.sink import Target
    from ags_fast.parquet.masked import Masked
    from ags_fast.parquet.opened import Crypto, Opened

__all__ = [
    "SPECULATIVE_NBYTES",
    "Dropped",
    "NewFooter",
    "plain_footer",
    "put_footer",
    "resealed_footer",
    "resealed_plain_length",
    "sorting_before",
    "unsigned",
    "view_length",
    "without",
]

SPECULATIVE_NBYTES = 64 << 10  # from the end: what Arrow reads in the hope that it has all of the footer


def _redacted(metadata: bytes) -> bytes:
    """Return what a plaintext footer may show of an encrypted column: nothing that was computed from its values."""
    shown = {*range(1, 8), 9, 10, 11, 14, 15}
    fields = thrift.Struct(metadata).fields
    return thrift_splice(metadata, 0, [(number, 0, None) for number in sorted(fields) if number not in shown])


def _encoding_stats(rows: list[tuple[int, int, int]]) -> bytes:
    """Encode the PageEncodingStats of (page type, encoding, number of pages)."""
    return thrift.list_of(
        thrift.STRUCT,
        [thrift.struct((i, thrift.I32, thrift.integer(value)) for i, value in enumerate(row, 1)) for row in rows],
    )


class NewFooter:
    """The FileMetaData of a new file, made row group by row group.

    Args:
        crypto: How the new file is encrypted; None if it is not.
        plaintext_footer: Whether the footer is signed, in plain text.
    """

    def __init__(self, crypto: Crypto | None = None, plaintext_footer: bool = False) -> None:
        self.groups: list[bytes] = []
        self._crypto = crypto
        self._plaintext = plaintext_footer
        self._chunks = 0
        self._sealed: dict[int, bytes] = {}  # ColumnMetaData that are modules of their own, by number in this footer
        self._kept: dict[int, Edits] = {}  # fields of ColumnChunks that moved into these

    def add(self, data: bytes, chunks: list[Chunk], sorting: Edits | None = None) -> None:
        """Add a row group.

        Args:
            data: The RowGroup of the source.
            chunks: Its column chunks, which a Mover has moved.
            sorting: Edits of its sorting_columns.
        """
        columns, first, total, uncompressed = moved_chunks(chunks, self._plaintext, self._sealed_chunk, _encoding_stats)
        self._chunks += len(chunks)
        edits: Edits = [
            (1, thrift.LIST, thrift.list_of(thrift.STRUCT, columns)),
            (2, thrift.I64, thrift.integer(uncompressed)),
            *(sorting or []),
            (5, thrift.I64, thrift.integer(first)),
            (6, thrift.I64, thrift.integer(total)),
            (7, thrift.I16, thrift.integer(len(self.groups))),
        ]
        self.groups.append(thrift_splice(data, 0, edits))

    def _sealed_chunk(self, chunk: Chunk, metadata: bytes) -> bytes:
        """Return a ColumnChunk whose metadata are a module of their own (section 5.3)."""
        modules, number = chunk.target, self._chunks + chunk.column
        assert modules is not None
        self._sealed[number] = metadata
        if not self._plaintext:
            return moved_chunk(chunk, None, thrift.binary(modules.seal(COLUMN_METADATA, metadata)))
        shown, unknown = _redacted(metadata), unknown_fields(chunk)
        if not unknown:
            return moved_chunk(chunk, shown, thrift.binary(modules.seal(COLUMN_METADATA, metadata)))
        fields = Struct(chunk.data).fields
        self._kept[number] = [(one, fields[one][0], chunk.data[fields[one][1] : fields[one][2]]) for one in unknown]
        sealed = thrift.binary(modules.seal(COLUMN_METADATA, with_kept(metadata, chunk.data)))
        return thrift_splice(moved_chunk(chunk, shown, sealed), 0, [(one, 0, None) for one in unknown])

    def of_file(self, opened: Opened, chunks: Iterable[Chunk], dropped: Dropped | None = None) -> bytes:
        """Add all row groups of a file, and return the FileMetaData, unsealed. `dropped` are columns to leave out."""
        by_group: list[list[Chunk]] = [[] for _ in opened.groups]
        for chunk in chunks:
            by_group[chunk.row_group].append(chunk)
        for (begin, end, _, _), group in zip(opened.groups, by_group, strict=True):
            self.add(
                opened.data[begin:end],
                group,
                None if dropped is None else sorting_before(opened.data, begin, dropped.numbers),
            )
        return self.encode(opened, [], dropped)

    def encode(self, opened: Opened, edits: Edits, dropped: Dropped | None = None) -> bytes:
        """Return the FileMetaData, unsealed.

        Args:
            opened: The file that all other fields come from.
            edits: Of fields before the row groups.
            dropped: Columns that are left out.
        """
        data = opened.data[: opened.footer.end]
        all_edits: Edits = [
            *([] if dropped is None else dropped.schema(data)),
            *edits,
            (4, thrift.LIST, thrift.list_of(thrift.STRUCT, self.groups)),
            *([] if dropped is None else dropped.orders(data)),
            *_signing(self._crypto if self._plaintext else None),
        ]
        return thrift_splice(data, 0, all_edits)

    def plain_length(self, offset: int, footer: bytes) -> int:
        """Return the length of the file's plaintext view in bytes.

        Args:
            offset: Where the footer begins in the file.
            footer: What `encode` returned.
        """
        if len(footer) + TAIL_NBYTES <= SPECULATIVE_NBYTES:  # the plain footer is never longer than this one
            return view_length(offset, 0)
        return view_length(offset, len(plain_footer(Footer(footer), self._sealed, self._kept, self._plaintext)))


def _signing(crypto: Crypto | None) -> Edits:
    """Return FileMetaData's fields of a signed footer; an encrypted footer must not have them."""
    metadata = thrift.binary(crypto.key_metadata) if crypto is not None and crypto.key_metadata else None
    return [
        (8, thrift.STRUCT, None if crypto is None else crypto.encode()),
        (9, thrift.BINARY, metadata),
    ]


def put_footer(target: Target, footer: bytes, crypto: Crypto | None, modules: Modules | None, plaintext: bool) -> None:
    """Write the end of the file: the footer, sealed or signed, its length and the magic (sections 5.4 and 5.5)."""
    magic = PLAIN_MAGIC
    if crypto is not None:
        assert modules is not None
        sealed = modules.seal(FOOTER, footer)
        if plaintext:
            footer += sealed[4:16] + sealed[-16:]  # nonce and tag: a signature
        else:
            magic = ENCRYPTED_MAGIC
            metadata = thrift.binary(crypto.key_metadata) if crypto.key_metadata else None
            outer = thrift.struct([(1, thrift.STRUCT, crypto.encode()), (2, thrift.BINARY, metadata)])
            footer = outer + sealed
    if len(footer) > 0x7FFFFFFF:
        raise FormatError("the footer would have more than 2 GiB")
    target.put(footer)
    target.put(len(footer).to_bytes(4, "little") + magic)
    target.finish()


def resealed_footer(opened: Opened, held: list[Chunk], crypto: Crypto, plaintext: bool) -> bytes:
    """Return the same footer, with the crypto_metadata and the sealed ColumnMetaData of the new keys."""
    by_number = {chunk.number: chunk for chunk in held if chunk.modules is not None}
    groups = []
    for begin, end, first, count in opened.groups:
        columns = []
        for number in range(first, first + count):
            raw = opened.footer.chunk(number)
            data = opened.data[raw.begin : raw.end]
            chunk = by_number.get(number)
            if chunk is not None:
                assert chunk.target is not None
                edits: Edits = [(8, thrift.STRUCT, chunk.side.crypto_metadata)]
                if raw.sealed_metadata:
                    sealed = chunk.target.seal(COLUMN_METADATA, _padded(chunk))
                    edits.append((9, thrift.BINARY, thrift.binary(sealed)))
                data = thrift_splice(data, 0, edits)
            columns.append(data)
        edits = [(1, thrift.LIST, thrift.list_of(thrift.STRUCT, columns))]
        groups.append(thrift_splice(opened.data[begin:end], 0, edits))
    edits = [(4, thrift.LIST, thrift.list_of(thrift.STRUCT, groups)), *_signing(crypto if plaintext else None)]
    footer = thrift_splice(opened.data[: opened.footer.end], 0, edits)
    return footer if plaintext else footer.ljust(len(opened.data), b"\0")  # parquet-java pads


def resealed_plain_length(opened: Opened, chunks: list[Chunk], offset: int, footer: bytes) -> int | None:
    """Return the length of the plaintext view of a file with a `resealed_footer`; None if it is not known."""
    if len(footer) + TAIL_NBYTES <= SPECULATIVE_NBYTES:
        return view_length(offset, 0)
    if any(chunk.missing for chunk in chunks):
        return None
    metadata = {chunk.number: chunk.shown_metadata() for chunk in chunks if chunk.modules is not None}
    kept = {chunk.number: chunk.kept for chunk in chunks}
    return view_length(offset, len(plain_footer(Footer(footer), metadata, kept, not opened.encrypted_footer)))


def _padded(chunk: Chunk) -> bytes:
    """Return a ColumnMetaData with the zeros that parquet-java puts after it, so that its module keeps its size."""
    nbytes = chunk.raw.sealed_metadata_nbytes - FRAME_NBYTES
    return chunk.metadata_bytes + bytes(nbytes - len(chunk.metadata_bytes))


class Dropped:
    """Columns whose keys are not held, as whole top-level fields, and a footer's fields without them."""

    def __init__(self, opened: Opened, chunks: Iterable[Chunk]) -> None:
        tops = {chunk.path[0] for chunk in chunks if chunk.missing}
        self.columns = {i for i, leaf in enumerate(opened.leaves) if leaf[0] in tops}
        self.names = [dotted(opened.leaves[i]) for i in sorted(self.columns)]
        kept = [i for i in range(len(opened.leaves)) if i not in self.columns]
        self.numbers = {old: new for new, old in enumerate(kept)}

    def schema(self, footer: bytes) -> Edits:
        """Return FileMetaData's schema."""
        nodes, elements = tree(footer), Struct(footer).elements(2) or []
        kept = [i for i, node in enumerate(nodes) if node.parent is not None and node.first not in self.columns]
        fields = sum(nodes[i].parent is nodes[0] for i in kept)
        root = thrift_splice(footer, elements[0][0], [(5, thrift.I32, thrift.integer(fields))])
        return [(2, thrift.LIST, thrift.list_of(thrift.STRUCT, [root, *(footer[slice(*elements[i])] for i in kept)]))]

    def orders(self, footer: bytes) -> Edits:
        """Return FileMetaData's column_orders, one for each leaf."""
        elements = Struct(footer).elements(7)
        if elements is None:
            return []
        kept = [footer[begin:end] for i, (begin, end) in enumerate(elements) if i not in self.columns]
        return [(7, thrift.LIST, thrift.list_of(thrift.STRUCT, kept))]

    def stand_in(self, number: int) -> None:
        """Return None: a chunk that is left out has nothing in its place."""


def sorting_before(footer: bytes, group: int, numbers: Mapping[int, int]) -> Edits:
    """Return a row group's sorting_columns before the first whose values are not shown: it orders the later ones.

    Args:
        footer: The footer.
        group: Where the row group begins there.
        numbers: New numbers of the columns that are shown, by their old ones.
    """
    elements = Struct(footer, group).elements(4)
    if elements is None:
        return []
    kept = []
    for begin, _ in elements:
        number = numbers.get(Struct(footer, begin).integer(1) or 0)
        if number is None:
            break
        kept.append(thrift_splice(footer, begin, [(1, thrift.I32, thrift.integer(number))]))
    return [(4, thrift.LIST, thrift.list_of(thrift.STRUCT, kept) if kept else None)]


# ---------------------------------------------------------------------------------------------------------- plain views


def view_length(offset: int, footer_nbytes: int) -> int:
    """Return the length of a plaintext view in bytes, whose plain footer has `footer_nbytes`.

    Args:
        offset: Where the footer begins in the sealed file.
        footer_nbytes: Without its length and the magic.
    """
    # Bytes that a reader reads in the hope of a footer must not be pages. Such pages would be opened for nothing, and a
    # damaged one would keep the reader from all others.
    return offset + max(SPECULATIVE_NBYTES, footer_nbytes + TAIL_NBYTES)


def plain_footer(footer: Footer, metadata: dict[int, bytes], kept: dict[int, Edits], signed: bool) -> bytearray:
    """Return a footer without what encryption added.

    Args:
        footer: The opened footer.
        metadata: ColumnMetaData of chunks whose metadata are modules of their own, by the chunk's number.
        kept: Fields of ColumnChunks that were kept in these metadata, by the chunk's number.
        signed: Whether the footer is a signed one.
    """
    plain = footer.plain(metadata)
    if any(kept.values()):
        plain = _with_kept(bytes(plain), kept)
    return unsigned(plain) if signed else plain


def unsigned(footer: bytearray) -> bytearray:
    """Remove encryption_algorithm and footer_signing_key_metadata."""
    return bytearray(thrift_splice(footer, 0, [(8, 0, None), (9, 0, None)]))


def _with_kept(footer: bytes, kept: dict[int, Edits]) -> bytearray:
    """Put the kept fields of ColumnChunks back into a plain footer."""
    parsed = Footer(footer)
    groups = []
    for begin, end, first, count in parsed.groups():
        spans = [(number, parsed.chunk(number)) for number in range(first, first + count)]
        columns = [thrift_splice(footer[span.begin : span.end], 0, kept.get(number) or []) for number, span in spans]
        value = thrift.list_of(thrift.STRUCT, columns)
        groups.append(thrift_splice(footer[begin:end], 0, [(1, thrift.LIST, value)]))
    return bytearray(thrift_splice(footer, 0, [(4, thrift.LIST, thrift.list_of(thrift.STRUCT, groups))]))


def without(footer: bytes, gone: Dropped | Masked, chunks: list[Chunk]) -> bytearray:
    """Remove columns whose keys are not held from a plain footer, or show them as nulls; `chunks` are the others'."""
    parsed = Footer(footer)
    held = {chunk.number: chunk for chunk in chunks}
    groups = []
    for begin, end, first, count in parsed.groups():
        shown = []  # a ColumnChunk, where it begins, its sizes
        for number in range(first, first + count):
            if chunk := held.get(number):
                span, numbers = parsed.chunk(number), chunk.numbers()
                sizes = numbers.uncompressed_nbytes, numbers.compressed_nbytes
                shown.append((footer[span.begin : span.end], chunk.begin(), *sizes))
            elif stand_in := gone.stand_in(number):
                shown.append(stand_in)
        columns, begins, uncompressed, compressed = zip(*shown, strict=True) if shown else ([], [0], [], [])
        edits = [
            (1, thrift.LIST, thrift.list_of(thrift.STRUCT, list(columns))),
            (2, thrift.I64, thrift.integer(sum(uncompressed))),
            *sorting_before(footer, begin, gone.numbers),
            (5, thrift.I64, thrift.integer(begins[0])),
            (6, thrift.I64, thrift.integer(sum(compressed))),
        ]
        groups.append(thrift_splice(footer[begin:end], 0, edits))
    edits = [
        *gone.schema(footer),
        (4, thrift.LIST, thrift.list_of(thrift.STRUCT, groups)),
        *gone.orders(footer),
    ]
    return bytearray(thrift_splice(footer, 0, edits))
