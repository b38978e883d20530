# Part of _core.pyx: the column chunks of a file, and how their pages move to another one.
# Wide files have fifty thousand chunks: what is done for each of them is here, without a call of Python's.

cdef enum: PACKED_NBYTES = 16384  # of a chunk's pages: to move fewer bytes is faster than to write them alone

cdef list _NO_EDITS = []  # one for all chunks that need none


@cython.final
@cython.no_gc  # no cycle can lead through these, and wide files have one for each chunk
@cython.auto_pickle(False)
cdef class Side:
    """How the chunks of a column are to be sealed.

    Args:
        kind: Of key: "plain" (none), "footer" or "column".
        key: The key.
        aad: aad_prefix followed by aad_file_unique; None means no AAD at all.
        ctr: Whether pages have no tag.
        by_ordinal: Whether AADs have the row group's ordinal in the source, not its number.
        key_metadata: The column key's.
        crypto_metadata: The ColumnCryptoMetaData that says so.
    """

    cdef readonly str kind
    cdef readonly Key key
    cdef readonly bytes aad, key_metadata, crypto_metadata
    cdef readonly bint ctr, by_ordinal

    def __cinit__(self, str kind not None, Key key=None, bytes aad=None, *, bint ctr=False, bint by_ordinal=False,
                  bytes key_metadata=None, bytes crypto_metadata=None):
        self.kind, self.key, self.aad, self.ctr, self.by_ordinal = kind, key, aad, ctr, by_ordinal
        self.key_metadata, self.crypto_metadata = key_metadata, crypto_metadata


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Moved:
    """Where a chunk's parts are in the target, in bytes from its beginning. 0: it has no such page."""

    cdef readonly int64_t begin, nbytes, uncompressed, first_data_page, dictionary_page
    cdef readonly PageRun run
    cdef readonly bint outside_levels  # whether levels of V2 pages are outside of their modules, in the sealed file
    cdef readonly bint copied  # as it is, with all offsets moved by `shift`
    cdef readonly int64_t shift
    cdef dict _parts

    @property
    def parts(self):
        """{module type: (offset, size)} of indexes and bloom filters, both with frame."""
        return self._parts or {}

    cdef int _add(self, unsigned module, offset, size) except -1:
        if self._parts is None:
            self._parts = {}
        self._parts[module] = (offset, size)
        return 0


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Chunk:
    """A column chunk: its place, its ColumnMetaData once that is known, and how its modules are sealed.

    `data` is the ColumnChunk, and `kept` are its fields that came out of field `kept_in` of the sealed ColumnMetaData.
    `ordinal` is the row group's, as its AADs have it. `kind` is "plain", "footer" or "column", after the key. `modules`
    is None if the chunk is plain or its key is not held (`missing`). `metadata` is None if its key is not held and the
    footer is encrypted. A Mover settles how it is to be sealed (`side`, and `target`: None if it becomes plain) and
    where its parts come (`moved`).
    """

    cdef readonly size_t number
    cdef readonly Py_ssize_t column
    cdef public Py_ssize_t row_group, ordinal
    cdef readonly tuple path
    cdef readonly str name
    cdef readonly ColumnChunk raw
    cdef public bytes data, metadata_bytes, key_metadata
    cdef public ColumnMetadata metadata
    cdef public Modules modules
    cdef public str kind
    cdef public list kept
    cdef public int kept_in
    cdef public bint missing
    cdef readonly Side side
    cdef readonly Modules target
    cdef readonly Moved moved

    def __cinit__(self, Footer footer not None, size_t number, Py_ssize_t row_group, Py_ssize_t ordinal,
                  Py_ssize_t column, tuple path not None, str name not None):
        cdef agsf_chunk raw
        cdef ColumnChunk there = footer._chunk(number, &raw)
        cdef const char *data = <const char *> _data(footer._view)
        self.number, self.row_group, self.ordinal, self.column = number, row_group, ordinal, column
        self.path, self.name, self.raw, self.kind, self.kept, self.metadata_bytes = path, name, there, "plain", _NO_EDITS, b""
        self.data = data[raw.begin:raw.end]
        if raw.metadata.begin:
            self.metadata = ColumnMetadata.__new__(ColumnMetadata)
            self.metadata._fill(&raw.metadata)
            self.metadata_bytes = data[raw.metadata.begin:raw.metadata.end]

    @property
    def whole(self):
        """Whether the metadata are there, with sizes and a count."""
        return self.metadata is not None and self.metadata.compressed_nbytes >= 0 and self.metadata.num_values >= 0

    def seal_as(self, Side side not None):
        """Settle how it is to be sealed."""
        self.side, self.target = side, None
        if side.key is not None:
            row_group = self.ordinal if side.by_ordinal else self.row_group
            self.target = Modules.__new__(Modules, side.key, side.aad, row_group, self.column)
            self.target._raw.ctr, self.target.label = side.ctr, self.name

    cpdef ColumnMetadata numbers(self):
        """Return the metadata. KeyAccessError if the column's key is not held."""
        if self.metadata is None:
            raise KeyAccessError(f"the key of column {self.name!r} is needed and not given")
        return self.metadata

    def shown_metadata(self):
        """Return the ColumnMetaData without the field that keeps fields of the ColumnChunk."""
        return thrift_splice(self.metadata_bytes, 0, [(self.kept_in, 0, None)]) if self.kept_in else self.metadata_bytes

    def begin(self):
        """Return the offset of its first page in the file, in bytes."""
        return self.numbers()._first_page()

    cdef Moved _moved(self):
        if self.moved is None:
            self.moved = Moved()
        return self.moved

    def part(self, unsigned module, offset, size):
        """Note where its index or bloom filter is in the target, with frame, in bytes."""
        self._moved()._add(module, offset, size)

    cdef bint _passes(self):
        return self.modules is None and self.target is None


def column_chunks(Footer footer not None, size_t first, Py_ssize_t row_group, Py_ssize_t ordinal, list paths not None,
                  list names not None):
    """Yield the column chunks of a row group, of which `first` is the number of the first one in the footer."""
    cdef Py_ssize_t i
    for i in range(len(paths)):
        yield Chunk.__new__(Chunk, footer, first + <size_t> i, row_group, ordinal, i, paths[i], names[i])


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Piece:
    """A part of a column chunk, from offset `begin` to `end` in the file. Module AGSF_DATA_PAGE stands for all pages.

    `limit` is where the next part begins: pages that are longer than the footer says may go on until there.
    """

    cdef readonly int64_t begin
    cdef public int64_t end, limit
    cdef readonly unsigned module
    cdef readonly Chunk chunk


cdef int _add_piece(list found, int64_t begin, int64_t nbytes, unsigned module, Chunk chunk) except -1:
    cdef Piece piece = Piece.__new__(Piece)
    piece.begin, piece.module, piece.chunk = begin, module, chunk
    piece.end = begin + nbytes if nbytes <= INT64_MAX - begin else -1  # which is outside of any file
    found.append(piece)
    return 0


def list_pieces(list chunks not None, dict bloom_filters not None, int64_t footer_offset, int64_t beyond):
    """Return the parts of chunks in file order, and the numbers of those that must be looked at.

    These are outside the data, overlap with the next part, or are plain pages that may go on behind their end.
    `bloom_filters` has the sizes of bloom filters that footers of old files do not tell, by the chunk's number. Pages
    may be up to `beyond` bytes longer than the footer says.
    """
    cdef Chunk chunk
    cdef Piece piece
    cdef ColumnMetadata metadata
    cdef ColumnChunk raw
    cdef Py_ssize_t i, n
    cdef int64_t last = INT64_MIN
    cdef bint sorted = True
    cdef list found = [], odd = []
    for chunk in chunks:
        metadata, raw = chunk.numbers(), chunk.raw
        if metadata.compressed_nbytes > 0:
            _add_piece(found, metadata._first_page(), metadata.compressed_nbytes, AGSF_DATA_PAGE, chunk)
        if metadata.bloom_filter > 0:
            nbytes = bloom_filters.get(chunk.number, metadata.bloom_filter_nbytes)
            _add_piece(found, metadata.bloom_filter, nbytes, AGSF_BLOOM_FILTER_HEADER, chunk)
        if raw.column_index > 0:
            _add_piece(found, raw.column_index, raw.column_index_nbytes, AGSF_COLUMN_INDEX, chunk)
        if raw.offset_index > 0:
            _add_piece(found, raw.offset_index, raw.offset_index_nbytes, AGSF_OFFSET_INDEX, chunk)
    for piece in found:
        sorted = sorted and last <= piece.begin
        last = piece.begin
    if not sorted:
        found.sort(key=_begin_of)
    n = len(found)
    for i in range(n):
        piece = <Piece> found[i]
        piece.limit = (<Piece> found[i + 1]).begin if i + 1 < n else footer_offset
        if (piece.begin < 4 or piece.end < piece.begin or piece.end > footer_offset or piece.limit < piece.end
                or (piece.limit > piece.end and piece.module == AGSF_DATA_PAGE and piece.chunk.modules is None)):
            odd.append(i)
        else:
            piece.limit = min(piece.limit, piece.end + beyond)
    return found, odd


def _begin_of(Piece piece not None):
    return piece.begin


# ---------------------------------------------------------------------------------------------------------- pages


@cython.final
@cython.auto_pickle(False)
cdef class PageMover:
    """Opens and seals the pages of chunks, from a window of the source to a buffer, and notes where they come.

    Args:
        same_size: Whether every module stays where it is, and as long as it is.
        v2_layout: Of V2 pages, as PageRun numbers them; 0 keeps what they have.
        check_crc: Whether a wrong CRC of a page under AES_GCM_CTR_V1 is an error.
        refuse_levels: Whether levels outside of a sealed page's module are an error.
        threads: How many threads work.
    """

    cdef readonly int v2_layout
    cdef bint _same_size, _check_crc, _refuse_levels
    cdef unsigned _threads
    cdef readonly list unauthenticated_levels  # [(column, row group)], in the source or in the target
    cdef readonly uint64_t v2_levels, wrong_checksums, dropped_checksums

    def __cinit__(self, bint same_size, int v2_layout, bint check_crc, bint refuse_levels, unsigned threads):
        self._same_size, self.v2_layout = same_size, v2_layout
        self._check_crc, self._refuse_levels, self._threads = check_crc, refuse_levels, threads
        self.unauthenticated_levels = []

    cpdef PageRun run(self, Chunk chunk):
        """Return a PageRun over the pages of a chunk."""
        cdef ColumnMetadata metadata = chunk.numbers()
        cdef PageRun run = PageRun.__new__(PageRun)
        cdef bint dialect = chunk.modules is not None and chunk.modules.aad is None
        cdef bint ctr = chunk.modules is not None and chunk.modules._raw.ctr
        run._set(chunk.modules, chunk.target, AGSF_PAGES_SAME_SIZE if self._same_size else AGSF_PAGES_COPY,
                 metadata.compressed_nbytes, max(0, metadata.num_values), dialect)
        run._raw.v2_layout = self.v2_layout
        run._raw.keep_checksum = not (ctr and self._check_crc)
        run._raw.refuse_levels = self._refuse_levels
        run._raw.dictionary = metadata.dictionary_page > 0
        run._label = chunk.name
        run._grow_table()
        return run

    def group(self, list waiting not None, Py_ssize_t i, int64_t window_nbytes):
        """Return the pages of consecutive chunks from piece i on: as many as a window holds."""
        cdef Piece first = waiting[i], last = first, piece
        cdef bint passes = first.chunk._passes()
        cdef list group = [first]
        for i in range(i + 1, len(waiting)):
            piece = <Piece?> waiting[i]
            if piece.module != AGSF_DATA_PAGE or piece.chunk._passes() != passes:
                break
            if not passes and piece.end - first.begin > window_nbytes:
                break
            if (self._same_size or passes) and piece.begin != last.end:
                break
            group.append(piece)
            last = piece
        return group, passes

    def room(self, list group not None):
        """Return the bytes that the pages of a group may take in the target, but for many small ones."""
        cdef Piece piece
        cdef int64_t nbytes = 0
        for piece in group:
            nbytes += page_room(piece.end - piece.begin)
        return nbytes

    def run_group(self, list group not None, window, int64_t begin, int64_t end, out):
        """Run the pages of a group, whose window is from `begin` to `end` in the source. Returns their PageRuns."""
        cdef memoryview view = _hold(window, False), target = _hold(out, True)
        cdef list runs = []
        cdef Piece piece
        cdef PageRun run
        cdef int64_t at = 0, most
        _refuse_overlap(_data(view), _nbytes(view), _data(target), _nbytes(target))
        for piece in group:
            run = self.run(piece.chunk)
            most = min(piece.limit, end) - begin
            if not (0 <= piece.begin - begin <= most <= <int64_t> _nbytes(view)
                    and at + page_room(piece.end - piece.begin) <= <int64_t> _nbytes(target)):
                raise ValueError("the pages are not in the window, or have no room")
            run._in, run._out = view, target
            run._raw.data = _data(view) + (piece.begin - begin)
            run._raw.in_nbytes = <size_t> (most - (piece.begin - begin))
            run._raw.in_is_all = True
            run._raw.out = _data(target) + at
            run._raw.out_nbytes = <size_t> page_room(piece.end - piece.begin)
            run._at = <size_t> at
            at += page_room(piece.end - piece.begin)
            runs.append(run)
        run_pages(runs, self._threads)
        return runs

    def pack(self, list group not None, list runs not None, Py_ssize_t i, out, int64_t position):
        """Take what runs of a group have put to `out`, from run i to the last one, or to one that is not done.

        Small outputs are moved up to the one before, to be one piece with it.

        Returns:
            The pieces to write, at `position` of the target; the number of the run that is not done, or how many
            runs there are; and where that run's pages begin in the target.
        """
        cdef memoryview view = _hold(out, True)
        cdef uint8_t *data = _data(view)
        cdef list pieces = []
        cdef size_t begin = 0, end = 0, at, nbytes
        cdef PageRun run
        for i in range(i, len(runs)):
            run = <PageRun?> runs[i]
            at, nbytes = run._at, run.produced
            if at != end and nbytes <= PACKED_NBYTES and end > begin:  # over bytes that were nobody's, or were moved
                memmove(data + end, data + at, nbytes)
            else:
                if end > begin:
                    pieces.append(view[begin:end])
                begin = end = at
            end += nbytes
            if run.stop != AGSF_STOP_DONE:
                break
            self.done((<Piece?> group[i]).chunk, run, position)
            position += <int64_t> nbytes
        else:
            i = len(runs)
        if end > begin:
            pieces.append(view[begin:end])
        return pieces, i, position

    cpdef done(self, Chunk chunk, PageRun run, int64_t start):
        """Note where the pages of a chunk are, whose run is done: from `start` in the target."""
        cdef Moved moved = chunk._moved()
        cdef const agsf_pages *raw = &run._raw
        # Without a layout that was asked for, pages keep their layout.
        cdef uint32_t outside = raw.outside_levels
        if run.target is not None and self.v2_layout:
            outside = raw.v2_levels if self.v2_layout == 2 else 0
        moved.begin, moved.nbytes, moved.uncompressed = start, raw.out_total, raw.uncompressed
        moved.first_data_page = start + <int64_t> raw.table[0].out_offset if raw.table_count else 0
        moved.dictionary_page = start if raw.dictionary_pages else 0
        moved.run = run
        moved.outside_levels = outside > 0
        if raw.outside_levels or outside:
            self.unauthenticated_levels.append((chunk.name, chunk.row_group))
        self.v2_levels += raw.v2_levels
        self.wrong_checksums += raw.wrong_checksums
        self.dropped_checksums += raw.dropped_checksums

    def copied(self, list group not None, int64_t start):
        """Note that plain pages of consecutive chunks were copied as they are: from `start` in the target."""
        cdef int64_t shift = start - (<Piece?> group[0]).begin
        cdef ColumnMetadata metadata
        cdef Piece piece
        cdef Moved moved
        for piece in group:
            metadata, moved = piece.chunk.numbers(), piece.chunk._moved()
            moved.copied, moved.shift = True, shift
            moved.begin, moved.nbytes = piece.begin + shift, piece.end - piece.begin
            moved.uncompressed = metadata.uncompressed_nbytes
            moved.first_data_page = _moved_by(metadata.data_page, shift) if metadata.data_page > 0 else 0
            moved.dictionary_page = _moved_by(metadata.dictionary_page, shift) if metadata.dictionary_page > 0 else 0


cdef inline int64_t _moved_by(int64_t offset, int64_t shift) noexcept:
    return <int64_t> (<uint64_t> offset + <uint64_t> shift)  # a footer may name any offset: signed, this could overflow


cpdef int64_t page_room(int64_t nbytes) noexcept:
    """Return the bytes that `nbytes` of pages may take in the target, but for many small ones."""
    return nbytes + nbytes // 8 + 1024


# ---------------------------------------------------------------------------------------------------------- footers


cdef struct _Edits:
    agsf_thrift_edit one[10]
    uint8_t integers[10][VARINT_NBYTES]
    size_t count


cdef void _edit(_Edits *edits, int16_t number, unsigned kind, bytes value) noexcept:
    cdef agsf_thrift_edit *one = &edits.one[edits.count]
    edits.count += 1
    one.id, one.type, one.value, one.nbytes = number, AGSF_THRIFT_STOP if value is None else kind, NULL, 0
    if value is not None:
        one.value, one.nbytes = <const uint8_t *> PyBytes_AS_STRING(value), <size_t> PyBytes_GET_SIZE(value)


cdef void _edit_integer(_Edits *edits, int16_t number, unsigned kind, int64_t value) noexcept:
    cdef agsf_thrift_edit *one = &edits.one[edits.count]
    one.id, one.type, one.value = number, kind, edits.integers[edits.count]
    one.nbytes = _put_varint(edits.integers[edits.count], value)
    edits.count += 1


cdef void _edit_place(_Edits *edits, int16_t number, Moved moved, unsigned module):
    """An offset and a size, in two fields that follow each other."""
    place = None if moved._parts is None else moved._parts.get(module)
    if place is None:
        _edit(edits, number, AGSF_THRIFT_STOP, None)
        _edit(edits, number + 1, AGSF_THRIFT_STOP, None)
    else:
        _edit_integer(edits, number, AGSF_THRIFT_I64, place[0])
        _edit_integer(edits, number + 1, AGSF_THRIFT_I32, place[1])


cdef Moved _NOT_MOVED = Moved()  # of a chunk without pages


cdef bytes _moved_metadata(Chunk chunk, encoding_stats):
    """A chunk's ColumnMetaData with its new places and sizes."""
    cdef ColumnMetadata old = chunk.numbers()
    cdef Moved moved = _NOT_MOVED if chunk.moved is None else chunk.moved
    cdef bytes shown = chunk.shown_metadata(), stats
    cdef int64_t data_page = moved.first_data_page
    cdef _Edits edits
    if data_page == 0 and old.data_page > 0:
        data_page = moved.begin  # a chunk that has no data page, and names one nevertheless
    edits.count = 0
    _edit_integer(&edits, 6, AGSF_THRIFT_I64, moved.uncompressed)
    _edit_integer(&edits, 7, AGSF_THRIFT_I64, moved.nbytes)
    _edit_integer(&edits, 9, AGSF_THRIFT_I64, data_page)
    if moved.copied and old.index_page > 0:
        _edit_integer(&edits, 10, AGSF_THRIFT_I64, _moved_by(old.index_page, moved.shift))
    else:
        _edit(&edits, 10, AGSF_THRIFT_STOP, None)
    if moved.dictionary_page:
        _edit_integer(&edits, 11, AGSF_THRIFT_I64, moved.dictionary_page)
    else:
        _edit(&edits, 11, AGSF_THRIFT_STOP, None)
    if old.encoding_stats == 0 and moved.run is not None and (rows := moved.run.encodings):
        stats = encoding_stats(rows)
        _edit(&edits, 13, AGSF_THRIFT_LIST, stats)
    _edit_place(&edits, 14, moved, AGSF_BLOOM_FILTER_HEADER)
    return _spliced(<const uint8_t *> PyBytes_AS_STRING(shown), <size_t> PyBytes_GET_SIZE(shown), edits.one, edits.count)


cpdef bytes moved_chunk(Chunk chunk, bytes metadata, bytes sealed):
    """Return the ColumnChunk as it goes into the new footer (Parquet Modular Encryption, section 5.3).

    Args:
        metadata: Its meta_data, or None.
        sealed: Its encrypted_column_metadata, with the length, or None.
    """
    cdef Moved moved = _NOT_MOVED if chunk.moved is None else chunk.moved
    cdef bytes data = chunk.data
    cdef _Edits edits
    edits.count = 0
    _edit_integer(&edits, 2, AGSF_THRIFT_I64, 0)
    _edit(&edits, 3, AGSF_THRIFT_STRUCT, metadata)
    _edit_place(&edits, 4, moved, AGSF_OFFSET_INDEX)
    _edit_place(&edits, 6, moved, AGSF_COLUMN_INDEX)
    _edit(&edits, 8, AGSF_THRIFT_STRUCT, chunk.side.crypto_metadata)
    _edit(&edits, 9, AGSF_THRIFT_BINARY, sealed)
    return _spliced(<const uint8_t *> PyBytes_AS_STRING(data), <size_t> PyBytes_GET_SIZE(data), edits.one, edits.count)


def moved_chunks(list chunks not None, bint plaintext_footer, sealed_chunk, encoding_stats):
    """Return the ColumnChunks of a row group as they go into the new footer, and its place and sizes.

    Args:
        chunks: The chunks, which a Mover has moved.
        plaintext_footer: Whether the new footer is in plain text.
        sealed_chunk: Makes a ColumnChunk of a chunk and its new ColumnMetaData, which are a module of their own.
        encoding_stats: Encodes [(page type, encoding, number of pages)], from which parquet-java infers whether there
            is a dictionary. Called for chunks whose metadata have no encoding_stats.

    Returns:
        The ColumnChunks, where the row group begins, its size, and its size without compression.
    """
    cdef Chunk chunk
    cdef list columns = []
    cdef bytes metadata
    cdef int64_t begin = 0
    cdef uint64_t nbytes = 0, uncompressed = 0  # a hostile footer may make them wrap
    for chunk in chunks:
        metadata = _moved_metadata(chunk, encoding_stats)
        if chunk.target is not None and (plaintext_footer or chunk.side.kind == "column"):
            columns.append(sealed_chunk(chunk, metadata))
        else:
            columns.append(moved_chunk(chunk, metadata, None))
        if chunk.moved is not None:
            begin = begin or chunk.moved.begin
            nbytes += <uint64_t> chunk.moved.nbytes
            uncompressed += <uint64_t> chunk.moved.uncompressed
    return columns, begin, <int64_t> nbytes, <int64_t> uncompressed


# ---------------------------------------------------------------------------------------------------------- reports


cdef struct _Count:
    uint64_t nbytes, data_pages, dictionary_pages, modules
    unsigned seals


@cython.final
@cython.auto_pickle(False)
cdef class ColumnCounts:
    """Counts what a Mover has moved, by column. `plaintext_footer`: of the file that was encrypted."""

    cdef _Count *_counts
    cdef size_t _room
    cdef bint _plaintext

    def __cinit__(self, bint plaintext_footer):
        self._plaintext = plaintext_footer

    def __dealloc__(self):
        free(self._counts)

    cdef _Count *_of(self, size_t column) except NULL:
        cdef size_t room = max(column + 1, 2 * self._room)
        cdef _Count *bigger
        if column >= self._room:
            bigger = <_Count *> realloc(self._counts, room * sizeof(_Count))
            if bigger == NULL:
                raise MemoryError
            memset(bigger + self._room, 0, (room - self._room) * sizeof(_Count))
            self._counts, self._room = bigger, room
        return &self._counts[column]

    def add(self, list chunks not None):
        """Count chunks. Returns those that are sealed otherwise than all before, of their columns."""
        cdef Chunk chunk
        cdef Modules modules
        cdef Moved moved
        cdef _Count *count
        cdef unsigned seal
        cdef list found = []
        for chunk in chunks:
            count, moved = self._of(<size_t> chunk.column), chunk.moved
            modules = chunk.target if chunk.target is not None else chunk.modules
            seal = 1 << (8 if chunk.missing else 4 * (modules is not None)
                         + 2 * (modules is not None and modules._raw.ctr) + (moved is not None and moved.outside_levels))
            if not count.seals & seal:
                count.seals |= seal
                found.append(chunk)
            if chunk.missing or moved is None:
                continue
            count.nbytes += <uint64_t> moved.nbytes
            if chunk.target is None:
                count.modules += chunk.raw.sealed_metadata > 0
            else:
                count.modules += self._plaintext or chunk.side.kind == "column"
            if moved.run is not None:
                count.data_pages += moved.run.pages
                count.dictionary_pages += moved.run._raw.dictionary_pages
                count.modules += 2 * (moved.run.pages + moved.run._raw.dictionary_pages)
                if moved._parts is not None:
                    count.modules += len(moved._parts) + (AGSF_BLOOM_FILTER_HEADER in moved._parts)  # which is two modules
        return found

    def of(self, size_t column):
        """Return the data pages, dictionary pages, modules and bytes of a column."""
        cdef _Count *count = self._of(column)
        return count.data_pages, count.dictionary_pages, count.modules, count.nbytes
