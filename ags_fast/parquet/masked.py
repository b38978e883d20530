"""Columns whose keys are not held, shown as nulls: what becomes null, and the pages that say so.

In each part of the schema, the topmost field all of whose columns are refused is null. A page of nulls has levels and
no value. They are those of the field around the null one, up to that field: other columns in that field have them.
"""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

from ags_fast._core import thrift_splice
from ags_fast.columnar import thrift
from ags_fast.columnar.levels import HIDE, PLAIN, RLE, chunk_levels, constant, null_page, packed, packed_nbytes
from ags_fast.columnar.schema import OPTIONAL, REPEATED, REQUIRED, tree
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError
from ags_fast.parquet.keys import dotted
from ags_fast.parquet.shown import Part
from ags_fast.parquet.spec import PAGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ags_fast._core import Chunk
    from ags_fast.columnar.schema import Node
    from ags_fast.columnar.thrift import Edits
    from ags_fast.parquet.opened import Opened

__all__ = ["Masked"]

MAP, MAP_KEY_VALUE, LOGICAL_MAP, LOGICAL_VARIANT = 1, 2, 2, 16  # two converted types, two logical types
MAX_LEVEL = 255
MAX_VALUES = 0x7FFFFFFF  # of a page


def _refused(nodes: list[Node], chunks: list[Chunk]) -> set[int]:
    """Return the columns that become null. A map without its keys does, as a whole, and so does a part of a variant."""
    columns = {chunk.column for chunk in chunks if chunk.missing}
    for i, node in reversed(list(enumerate(nodes))):  # the inner ones first
        logical, needed = node.element.struct(10) or (), set[int]()
        is_map = LOGICAL_MAP in logical or node.element.integer(6) in (MAP, MAP_KEY_VALUE)
        if LOGICAL_VARIANT in logical:
            needed = node.leaves
        elif is_map and node.kind != REPEATED:  # old files call the repeated group in a map one, too
            needed = node.leaves & nodes[min(i + 2, len(nodes) - 1)].leaves  # of the keys
        if not needed.isdisjoint(columns):
            columns |= node.leaves
    return columns


class Masked:
    """Columns that are shown as nulls, a footer's fields with them, and their pages, which stand behind all others.

    Args:
        opened: The file.
        chunks: Its column chunks.
        reader: Returns what reads from the view, as `PlainView.read_at` does.

    Raises:
        FormatError: Nulls would need levels that cannot be made.
    """

    def __init__(self, opened: Opened, chunks: list[Chunk], reader: Callable[[], Any]) -> None:
        self._opened = opened
        self._chunks = chunks
        self._reader = reader
        self._nodes = tree(opened.data)
        self.columns = _refused(self._nodes, chunks)
        self.names = [dotted(opened.leaves[column]) for column in sorted(self.columns)]
        self.numbers = {column: column for column in range(len(opened.leaves)) if column not in self.columns}
        self._leaves = [node for node in self._nodes[1:] if not node.element.integer(5)]
        self._tops: dict[int, Node] = {}  # by column: the topmost field of nulls
        for node in self._nodes[1:]:
            if node.definition >= MAX_LEVEL:
                raise FormatError(f"a column is in {MAX_LEVEL} lists and structs, or more: {HIDE}")
            if node.first not in self._tops and node.leaves <= self.columns:
                self._tops.update(dict.fromkeys(node.leaves, node))
        self._stand_ins: dict[int, tuple[bytes, int, int, int]] = {}
        self.parts: list[Part] = []
        # Pages that are made from those of other columns come first: a reader must not get them where it hopes for a
        # footer, at the end of the view.
        gone = [chunk for chunk in chunks if chunk.column in self.columns]
        at = opened.footer_offset
        for chunk in gone:
            at = self._add(chunk, at, True)
        self.derived_end = at
        for chunk in gone:
            at = self._add(chunk, at, False)
        self.end = at

    def schema(self, footer: bytes) -> Edits:
        """Return FileMetaData's schema: a required field of nulls is optional."""
        optional = {id(node) for node in self._tops.values() if node.kind == REQUIRED}
        elements = [
            thrift_splice(footer, begin, [(3, thrift.I32, OPTIONAL)]) if id(node) in optional else footer[begin:end]
            for node, (begin, end) in zip(self._nodes, Struct(footer).elements(2) or [], strict=True)
        ]
        return [(2, thrift.LIST, thrift.list_of(thrift.STRUCT, elements))]

    def orders(self, footer: bytes) -> Edits:
        """Return no edit: all columns are there."""
        return []

    def stand_in(self, number: int) -> tuple[bytes, int, int, int]:
        """Return the ColumnChunk of a column of nulls, where its page begins, and its size, both as a footer has it."""
        return self._stand_ins[number]

    # ---- the pages

    def _add(self, chunk: Chunk, at: int, derived: bool) -> int:
        """Put the page of a chunk at an offset, if it is one of the derived ones, or not. Returns where it ends."""
        leaf, top = self._leaves[chunk.column], self._tops[chunk.column]
        around = top.parent
        assert around is not None
        if (around.definition > 0) is not derived:
            return at
        count = self._count(chunk, around)
        if not 0 <= count <= MAX_VALUES:
            raise FormatError(f"column {chunk.name!r}, row group {chunk.row_group} cannot have {count} nulls: {HIDE}")
        widths = leaf.repetition.bit_length(), (leaf.definition + (top.kind == REQUIRED)).bit_length()
        if derived:
            make = partial(self._derived, chunk, around, count, widths)
            room = [bytes(packed_nbytes(count, width)) for width in widths]
        else:
            room = [constant(0, count)] * 2
            make = partial(null_page, count, room, widths)
        end = at + len(null_page(count, room, widths))
        self.parts.append(Part(at, end, PAGES, None, make))
        self._stand_ins[chunk.number] = self._column_chunk(chunk, leaf.element.integer(1) or 0, count, at, end - at)
        return end

    def _column_chunk(self, chunk: Chunk, kind: int, count: int, at: int, nbytes: int) -> tuple[bytes, int, int, int]:
        path = [name.encode("utf-8", "surrogateescape") for name in chunk.path]
        size = thrift.integer(nbytes)
        metadata = thrift.struct(
            [
                (1, thrift.I32, thrift.integer(kind)),
                (2, thrift.LIST, thrift.list_of(thrift.I32, [thrift.integer(PLAIN), thrift.integer(RLE)])),
                (3, thrift.LIST, thrift.list_of(thrift.BINARY, [thrift.binary(name) for name in path])),
                (4, thrift.I32, thrift.integer(0)),  # not compressed
                (5, thrift.I64, thrift.integer(count)),
                (6, thrift.I64, size),
                (7, thrift.I64, size),
                (9, thrift.I64, thrift.integer(at)),
                (12, thrift.STRUCT, thrift.struct([(3, thrift.I64, thrift.integer(count))])),  # how many are null
            ]
        )
        encoded = thrift.struct([(2, thrift.I64, thrift.integer(0)), (3, thrift.STRUCT, metadata)])
        return encoded, at, nbytes, nbytes

    def _count(self, chunk: Chunk, around: Node) -> int:
        """Return how many entries a chunk of nulls has."""
        if around.repetition:
            sibling = self._sibling(chunk, around)
            if self._leaves[sibling.column].repetition == around.repetition:
                return sibling.numbers().num_values
            return len(self._levels(sibling, around)[1])
        return Struct(self._opened.data, self._opened.groups[chunk.row_group][0]).integer(3) or 0

    def _sibling(self, chunk: Chunk, around: Node) -> Chunk:
        """Return the chunk of a readable column whose levels are the easiest to read."""
        first = self._opened.groups[chunk.row_group][2]
        held = (self._chunks[first + column] for column in sorted(around.leaves - self.columns))
        return min(held, key=lambda one: (self._leaves[one.column].repetition, one.numbers().compressed_nbytes))

    def _derived(self, chunk: Chunk, around: Node, count: int, widths: tuple[int, int]) -> bytes:
        """Return a page of nulls whose entries are those of another column in the same field."""
        sibling = self._sibling(chunk, around)
        levels = self._levels(sibling, around)
        if len(levels[1]) != count:
            raise FormatError(
                f"column {sibling.name!r}, row group {sibling.row_group} has {len(levels[1])} values, and {count} by "
                "the footer: the file is damaged"
            )
        return null_page(count, [packed(*each) for each in zip(levels, widths, strict=True)], widths)

    def _levels(self, sibling: Chunk, around: Node) -> tuple[bytes, bytes]:
        """Return the levels of a column as far as the field `around` goes."""
        leaf, begin = self._leaves[sibling.column], sibling.begin()
        end = begin + sibling.numbers().compressed_nbytes
        codec = Struct(sibling.metadata_bytes).integer(4) or 0
        kept = bytes(level <= around.repetition for level in range(256))
        lowered = bytes(min(level, around.definition) for level in range(256))
        repetition, definition = bytearray(), bytearray()
        for r, d in chunk_levels(self._reader(), begin, end, codec, (leaf.repetition, leaf.definition)):
            chosen = r.translate(kept)
            repetition += bytes(compress(r, chosen))
            definition += bytes(compress(d.translate(lowered), chosen))
        return bytes(repetition), bytes(definition)
