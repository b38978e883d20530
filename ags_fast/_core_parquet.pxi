# Part of _core.pyx: Thrift, footers, modules and the pages of column chunks. csrc/agsf_parquet.h explains them.

FRAME_NBYTES = AGSF_FRAME_NBYTES
ORDINAL_MAX = AGSF_ORDINAL_MAX

# By the type that stands in a module's AAD.
MODULES = (
    "footer", "column metadata", "data page", "dictionary page", "data page header", "dictionary page header",
    "column index", "offset index", "bloom filter header", "bloom filter bitset",
)

# What a PageRun does, and what it stopped for.
COPY, SAME_SIZE, VIEW, CHECK, LIST = range(5)
DONE, MORE_INPUT, MORE_OUTPUT = AGSF_STOP_DONE, AGSF_STOP_INPUT, AGSF_STOP_OUTPUT


cdef int _read(agsf_status status) except -1:
    return _check(status, "a struct in Thrift's compact protocol")


cdef memoryview _hold_from(object data, size_t offset):
    cdef memoryview view = _hold(data, False)
    if offset > _nbytes(view):
        raise ValueError(f"there are {_nbytes(view)} bytes, none at {offset}")
    return view


def thrift_fields(data, size_t offset=0):
    """Return the fields of the struct at `offset`, {id: (type, begin, end)} of their values, and where the struct ends.

    A bool has no bytes: its type is its value (1 or 2). Raises FormatError if the bytes are not the compact protocol.
    """
    cdef memoryview view = _hold_from(data, offset)
    cdef agsf_thrift_value value
    memset(&value, 0, sizeof(value))
    value.end = offset
    fields = {}
    while True:
        _read(agsf_thrift_next(_data(view), _nbytes(view), False, &value))
        if value.type == AGSF_THRIFT_STOP:
            return fields, value.end
        fields[value.id] = (value.type, value.begin, value.end)


def thrift_list(data, size_t offset):
    """Return the elements of the list at `offset`: their type, [(begin, end)], and where the list ends."""
    cdef memoryview view = _hold_from(data, offset)
    cdef agsf_thrift_value value
    cdef size_t count = 0
    memset(&value, 0, sizeof(value))
    value.begin = offset
    _read(agsf_thrift_list_head(_data(view), _nbytes(view), &value, &count))
    elements = []
    for _ in range(count):
        _read(agsf_thrift_next(_data(view), _nbytes(view), True, &value))
        elements.append((value.begin, value.end))
    return value.type, elements, value.end


cdef enum:
    VARINT_NBYTES = 10  # of an i64 at most
    SPLICED_NBYTES = 4096  # of a struct with edits, on the stack


cdef size_t _put_varint(uint8_t *out, int64_t value) noexcept:
    cdef uint64_t left = <uint64_t> value << 1 ^ (<uint64_t> 0 - (value < 0))
    cdef size_t n = 0
    while left >= 0x80:
        out[n] = left & 0x7F | 0x80
        left >>= 7
        n += 1
    out[n] = <uint8_t> left
    return n + 1


cdef bytes _spliced(const uint8_t *data, size_t left, const agsf_thrift_edit *edits, size_t count):
    """The struct at data, where `left` bytes are, with edits."""
    cdef size_t room = agsf_thrift_splice_nbytes(left, edits, count), nbytes = 0, end = 0
    cdef uint8_t near[SPLICED_NBYTES]
    cdef uint8_t *out = near
    cdef agsf_status status
    if room == 0:
        raise MemoryError
    if room > SPLICED_NBYTES:
        out = <uint8_t *> malloc(room)
        if out == NULL:
            raise MemoryError
    try:
        _read(agsf_thrift_splice(data, left, edits, count, out, &nbytes, &end))
        return PyBytes_FromStringAndSize(<const char *> out, <Py_ssize_t> nbytes)
    finally:
        if out != near:
            free(out)


def thrift_splice(data, size_t offset, list edits not None):
    """Return a copy of the struct at `offset` with edits [(id, type, value)], sorted by id.

    A value is bytes, an int that becomes an i16, i32 or i64, or None to remove the field. All other fields are copied byte by byte, also those with unknown ids.
    """
    cdef memoryview view = _hold_from(data, offset)
    cdef list held = list(edits)  # keeps the values, and no other thread can change it
    cdef Py_ssize_t n = len(held), i
    cdef int last = 0
    cdef bytearray memory = bytearray(n * sizeof(agsf_thrift_edit))
    cdef agsf_thrift_edit *raw = <agsf_thrift_edit *> PyByteArray_AS_STRING(memory)
    cdef bytearray integers = bytearray(n * VARINT_NBYTES)
    cdef uint8_t *at = <uint8_t *> PyByteArray_AS_STRING(integers)
    cdef bytes encoded
    for i, (number, kind, value) in enumerate(held):
        raw[i].id = number
        if raw[i].id <= last:
            raise ValueError("the field ids of edits must ascend from 1")
        last = raw[i].id
        if value is not None:
            if not AGSF_THRIFT_STOP < kind <= AGSF_THRIFT_UUID:
                raise ValueError(f"Thrift's compact protocol has no type {kind}")
            raw[i].type = kind
            if type(value) is int:
                raw[i].value = at
                raw[i].nbytes = _put_varint(at, value)
                at += VARINT_NBYTES
            else:
                encoded = value
                raw[i].value = <const uint8_t *> PyBytes_AS_STRING(encoded)
                raw[i].nbytes = <size_t> PyBytes_GET_SIZE(encoded)
    return _spliced(_data(view) + offset, _nbytes(view) - offset, raw, <size_t> n)


@cython.final
@cython.auto_pickle(False)
cdef class ColumnMetadata:
    """The numbers of a ColumnMetaData: sizes in bytes, and offsets into the file. -1: the field is missing.

    `path`, `encodings` and `encoding_stats` are where these values begin, or 0.
    """

    cdef readonly size_t begin, end, path, encodings, encoding_stats
    cdef readonly int64_t codec, num_values, uncompressed_nbytes, compressed_nbytes
    cdef readonly int64_t data_page, index_page, dictionary_page, bloom_filter, bloom_filter_nbytes

    def __init__(self, data, size_t begin=0):
        cdef memoryview view = _hold_from(data, begin)
        cdef agsf_column_metadata raw
        _read(agsf_column_metadata_read(_data(view), _nbytes(view), begin, &raw))
        self._fill(&raw)

    @property
    def first_page(self):
        """The offset of the chunk's first page in the file, in bytes; 0 if it has none."""
        return self._first_page()

    cdef int64_t _first_page(self) noexcept:
        if 0 < self.dictionary_page and (self.dictionary_page < self.data_page or self.data_page <= 0):
            return self.dictionary_page
        return max(0, self.data_page)

    cdef void _fill(self, const agsf_column_metadata *raw) noexcept:
        self.begin, self.end, self.path = raw.begin, raw.end, raw.path
        self.encodings, self.encoding_stats = raw.encodings, raw.encoding_stats
        self.codec, self.num_values = raw.codec, raw.num_values
        self.uncompressed_nbytes, self.compressed_nbytes = raw.uncompressed_nbytes, raw.compressed_nbytes
        self.data_page, self.index_page, self.dictionary_page = raw.data_page, raw.index_page, raw.dictionary_page
        self.bloom_filter, self.bloom_filter_nbytes = raw.bloom_filter, raw.bloom_filter_nbytes


@cython.final
@cython.auto_pickle(False)
cdef class ColumnChunk:
    """A ColumnChunk of a footer: where its parts begin (0: missing), and its indexes in the file (-1: missing).

    `footer_key` and `column_key` are what its crypto_metadata say, if they are known ones, and `key_metadata` is what
    they say of the column key.
    """

    cdef readonly size_t begin, end, metadata, crypto, sealed_metadata, sealed_metadata_nbytes
    cdef readonly bint file_path, footer_key, column_key
    cdef readonly bytes key_metadata
    cdef readonly int64_t offset_index, offset_index_nbytes, column_index, column_index_nbytes

    cdef int _fill(self, memoryview view, const agsf_chunk *raw) except -1:
        self.begin, self.end, self.metadata, self.crypto = raw.begin, raw.end, raw.metadata.begin, raw.crypto
        self.sealed_metadata, self.sealed_metadata_nbytes = raw.sealed_metadata, raw.sealed_metadata_nbytes
        self.file_path, self.footer_key, self.column_key = raw.file_path, raw.footer_key, raw.column_key
        if raw.key_metadata_nbytes > 0:
            self.key_metadata = (<const char *> _data(view))[raw.key_metadata:raw.key_metadata + raw.key_metadata_nbytes]
        self.offset_index, self.offset_index_nbytes = raw.offset_index, raw.offset_index_nbytes
        self.column_index, self.column_index_nbytes = raw.column_index, raw.column_index_nbytes
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class Footer:
    """A Parquet FileMetaData, walked once. Offsets are into `data`; chunks are numbered through all row groups."""

    cdef readonly object data
    cdef memoryview _view
    cdef agsf_footer _raw

    def __cinit__(self, data):
        cdef agsf_status status
        cdef const uint8_t *raw
        cdef size_t nbytes
        self.data = data
        self._view = _hold(data, False)
        raw, nbytes = _data(self._view), _nbytes(self._view)
        with nogil:
            status = agsf_footer_read(raw, nbytes, &self._raw)
        _check(status, "the footer")

    def __dealloc__(self):
        agsf_footer_clear(&self._raw)

    @property
    def end(self):
        """Where the struct ends. Encrypted footers may have padding behind it."""
        return self._raw.end

    @property
    def columns(self):
        """How many columns the schema has."""
        return self._raw.ncolumns

    @property
    def rows(self):
        """How many rows it says that there are; 0 if it does not say."""
        return self._raw.rows

    @property
    def signed(self):
        """Whether it has an encryption_algorithm, as only a signed footer has."""
        return self._raw.algorithm != 0

    @property
    def chunks(self):
        """How many column chunks there are."""
        return self._raw.nchunks

    def groups(self):
        """Return [(begin, end, first chunk, chunks)] of the row groups."""
        return [(g.begin, g.end, g.first, g.count) for g in self._raw.groups[:self._raw.ngroups]]

    def schema(self):
        """Yield (name, number of children) of the schema's elements, a tree in depth-first order."""
        cdef agsf_schema_element one
        cdef const char *text = <const char *> _data(self._view)
        cdef size_t i
        for i in range(self._raw.nschema):
            one = self._raw.schema[i]
            yield text[one.name:one.name + one.name_nbytes].decode("utf-8", "surrogateescape"), one.children

    def chunk(self, size_t number):
        """Return the ColumnChunk of this number."""
        cdef agsf_chunk raw
        return self._chunk(number, &raw)

    cdef ColumnChunk _chunk(self, size_t number, agsf_chunk *raw):
        cdef ColumnChunk chunk = ColumnChunk.__new__(ColumnChunk)
        if number >= self._raw.nchunks:
            raise IndexError(number)
        _read(agsf_chunk_read(_data(self._view), _nbytes(self._view), self._raw.chunks[number].begin, raw))
        chunk._fill(self._view, raw)
        return chunk

    def encrypted(self):
        """Return how many chunks have crypto_metadata."""
        cdef size_t i, count = 0
        for i in range(self._raw.nchunks):
            count += self._raw.chunks[i].crypto != 0
        return count

    def plain(self, dict opened not None):
        """Return the footer without the fields of encryption; `opened` is {chunk number: its ColumnMetaData}."""
        cdef size_t n = self._raw.nchunks, room = self._raw.end + 8 * n, nbytes = 0
        cdef bytearray pointers = bytearray(n * sizeof(uint8_t *)), numbers = bytearray(n * sizeof(size_t)), out
        cdef const uint8_t **metas = <const uint8_t **> PyByteArray_AS_STRING(pointers)
        cdef size_t *sizes = <size_t *> PyByteArray_AS_STRING(numbers)
        cdef agsf_status status
        cdef const uint8_t *raw = _data(self._view)
        cdef uint8_t *target
        cdef bytes meta
        opened = dict(opened)  # no other thread can change the copy
        for number, meta in opened.items():
            if meta is None:
                raise TypeError("a ColumnMetaData is bytes, not None")
            if not 0 <= number < <Py_ssize_t> n:
                raise IndexError(number)
            metas[<size_t> number] = <const uint8_t *> PyBytes_AS_STRING(meta)
            sizes[<size_t> number] = <size_t> PyBytes_GET_SIZE(meta)
            room += <size_t> PyBytes_GET_SIZE(meta)
        out = bytearray()
        PyByteArray_Resize(out, <Py_ssize_t> room)
        target = <uint8_t *> PyByteArray_AS_STRING(out)
        with nogil:
            status = agsf_footer_plain(raw, &self._raw, metas, sizes, target, &nbytes)
        _read(status)
        PyByteArray_Resize(out, <Py_ssize_t> nbytes)
        return out


@cython.final
@cython.no_gc  # no cycle can lead through it, and wide files have one for each chunk
@cython.auto_pickle(False)
cdef class Modules:
    """How the modules of one column chunk, or of a footer (`row_group` and `column` None), are sealed.

    `aad` is aad_prefix followed by aad_file_unique; None means no AAD at all. With `ctr`, pages have no tag.
    `label` is the column's name in errors.
    """

    cdef readonly Key key
    cdef readonly bytes aad
    cdef readonly object row_group, label
    cdef agsf_modules _raw

    def __cinit__(self, Key key not None, aad, row_group, column, *, bint ctr=False, label=None):
        self.key = key
        self.aad = aad
        self.row_group = row_group
        self.label = label
        for ordinal in (row_group, column):
            if ordinal is not None and not 0 <= ordinal <= AGSF_ORDINAL_MAX:
                raise FormatError(f"Parquet encryption numbers row groups and columns up to 32767, not {ordinal}")
        self._raw.key = key._key
        self._raw.without_aad = aad is None
        if aad is not None:
            self._raw.aad = <const uint8_t *> PyBytes_AS_STRING(self.aad)
            self._raw.aad_nbytes = <size_t> PyBytes_GET_SIZE(self.aad)
        self._raw.row_group = -1 if row_group is None else row_group
        self._raw.column = -1 if column is None else column
        self._raw.ctr = ctr

    @property
    def ctr(self):
        return self._raw.ctr

    def __repr__(self):
        return f"<ags_fast Parquet modules of {self.label or 'footer'!r}>"

    cdef int _check(self, agsf_status status, unsigned module) except -1:
        if status != AGSF_OK:
            raise _module_error(status, module, self.row_group, self.label, None)
        return 0

    def seal(self, unsigned module, data):
        """Seal one module that is not a page. Returns its frame: length, nonce, ciphertext, tag."""
        cdef memoryview view = _hold(data, False)
        cdef const uint8_t *plain = _data(view)
        cdef size_t nbytes = _nbytes(view)
        cdef agsf_status status
        cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (nbytes + AGSF_FRAME_NBYTES))
        cdef uint8_t *raw = <uint8_t *> PyBytes_AS_STRING(out)
        _known(module)
        with nogil:
            status = agsf_module_seal(&self._raw, module, plain, nbytes, raw)
        self._check(status, module)
        return out

    def open(self, unsigned module, data):
        """Open the module at the start of `data`. Returns its plaintext and the size of its frame in bytes."""
        cdef memoryview view = _hold(data, False)
        cdef agsf_status status
        cdef const uint8_t *sealed = _data(view)
        cdef size_t nbytes = 0, frame = 0
        cdef bytes out
        cdef uint8_t *raw
        _known(module)
        if _nbytes(view) >= AGSF_FRAME_NBYTES:
            frame = <size_t> (sealed[0] | sealed[1] << 8 | sealed[2] << 16 | <uint32_t> sealed[3] << 24) + 4
        if not AGSF_FRAME_NBYTES <= frame <= _nbytes(view):
            self._check(AGSF_BAD_FORMAT, module)
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (frame - AGSF_FRAME_NBYTES))
        raw = <uint8_t *> PyBytes_AS_STRING(out)
        with nogil:
            status = agsf_module_open(&self._raw, module, sealed, frame, raw, &nbytes, &frame)
        self._check(status, module)
        return out, frame


cdef int _known(unsigned module) except -1:
    if module >= <unsigned> len(MODULES):
        raise ValueError(f"there is no module type {module}")
    return 0


cdef object _module_error(agsf_status status, unsigned module, row_group, column, page):
    name = MODULES[module]
    where = name if page is None else f"{name} {page}"
    if column is not None:
        where += f" of column {column!r}, row group {row_group}"
    return _error_of(status, where, {"module": name, "row_group": row_group, "column": column, "page": page})


@cython.final
@cython.no_gc  # no cycle can lead through it, and wide files have one for each chunk
@cython.auto_pickle(False)
cdef class PageRun:
    """The pages of one column chunk, from one side to another. Each side is plain (None) or sealed by its Modules.

    `mode` is COPY, SAME_SIZE, VIEW, CHECK or LIST: see csrc/agsf_parquet.h. `nbytes` and `values` are the chunk's
    total_compressed_size and num_values on the side that is read. Pass bytes with `feed`, call `run_pages`, and look at
    `stop`: DONE, MORE_INPUT or MORE_OUTPUT. The last two need at least `wanted` bytes, counted from what is `consumed`
    or `produced`. `dictionary`: the first page should be a dictionary, which an error names if the page is unreadable.
    `label` and `row_group` name a plain chunk in errors.
    """

    cdef readonly Modules source, target
    cdef agsf_pages _raw
    cdef memoryview _in, _out
    cdef readonly size_t consumed, produced  # of what was fed
    cdef readonly size_t wanted
    cdef readonly int stop
    cdef readonly uint64_t in_total, out_total, values
    cdef readonly uint64_t uncompressed  # total_uncompressed_size of the chunk on the side that is written
    cdef readonly uint32_t pages  # the ordinal of the next data page: the number of data pages so far, if `page` was 0
    cdef readonly uint32_t outside_levels  # V2 pages so far with levels outside of their modules, without a tag
    cdef bint _running
    cdef size_t _at  # where its output begins in a buffer that several runs share
    cdef object _label, _row_group

    def __init__(self, Modules source, Modules target, int mode, uint64_t nbytes, uint64_t values, *, int v2_layout=0,
                  bint short_sizes=False, bint keep_checksum=True, bint refuse_levels=False, bint table=False,
                  uint32_t page=0, bint began=False, bint dictionary=False, label=None, row_group=None):
        self._set(source, target, mode, nbytes, values, short_sizes)
        self._raw.v2_layout = v2_layout
        self._raw.keep_checksum = keep_checksum
        self._raw.refuse_levels = refuse_levels
        self._raw.page = self.pages = page
        self._raw.began = began
        self._raw.dictionary = dictionary
        self._label, self._row_group = label, row_group
        if table:
            self._grow_table()

    def __dealloc__(self):
        self._free_header()
        free(self._raw.table)

    cdef int _set(self, Modules source, Modules target, int mode, uint64_t nbytes, uint64_t values,
                  bint short_sizes) except -1:
        if self._raw.nbytes:
            raise ValueError("a PageRun is made once")
        if mode == AGSF_PAGES_COPY and source is None and target is None:
            raise ValueError("pages are copied from or to a sealed side")
        if mode == AGSF_PAGES_SAME_SIZE and (source is None or target is None or source._raw.ctr != target._raw.ctr
                                             or short_sizes):
            raise ValueError("frames keep their size only from one sealed side to another, in the same algorithm")
        if mode == AGSF_PAGES_VIEW and (source is None or target is not None):
            raise ValueError("a view is of a sealed side, in plaintext")
        if not 0 <= mode <= <int> AGSF_PAGES_LIST:
            raise ValueError(f"there is no mode {mode}")
        self.source, self.target = source, target
        self._raw.source = &source._raw if source is not None else NULL
        self._raw.to = &target._raw if target is not None else NULL
        self._raw.mode = <agsf_pages_mode> mode
        self._raw.nbytes = nbytes
        self._raw.values_left = values
        self._raw.short_sizes = short_sizes
        return 0

    cdef int _free_header(self) except -1:
        if self._raw.header != NULL:
            agsf_wipe(self._raw.header, self._raw.header_nbytes)
            free(self._raw.header)
        return 0

    cdef int _grow_table(self) except -1:
        cdef size_t room = self._raw.table_room * 2
        if room == 0:  # wide files have a table for each of many small chunks
            room = <size_t> min(<uint64_t> 64, max(<uint64_t> 4, self._raw.nbytes >> 12))
        cdef agsf_page *bigger = <agsf_page *> realloc(self._raw.table, room * sizeof(agsf_page))
        if bigger == NULL:
            raise MemoryError
        self._raw.table, self._raw.table_room = bigger, room
        return 0

    cdef int _grow_header(self) except -1:
        cdef size_t room = max(self._raw.wanted, <size_t> 4096)
        cdef uint8_t *bigger = <uint8_t *> malloc(room)
        if bigger == NULL:
            raise MemoryError
        self._free_header()
        self._raw.header, self._raw.header_nbytes = bigger, room
        return 0

    @cython.critical_section
    def feed(self, data, bint is_all, out=None):
        """Pass the input that follows, whether nothing comes after it, and room for output."""
        if self._running:
            raise ValueError("these pages are being run")
        self._in = _hold(data, False)
        self._out = None if out is None else _hold(out, True)
        self.consumed = self.produced = 0
        self._raw.data = _data(self._in)
        self._raw.in_nbytes = _nbytes(self._in)
        self._raw.in_is_all = is_all
        self._raw.out = NULL if out is None else _data(self._out)
        self._raw.out_nbytes = 0 if out is None else _nbytes(self._out)
        if out is not None:
            _refuse_overlap(self._raw.data, self._raw.in_nbytes, self._raw.out, self._raw.out_nbytes)
        self._raw.stop = AGSF_STOP_NOT
        self.stop = AGSF_STOP_NOT

    @cython.critical_section
    cdef bint _begin(self) except -1:
        """Whether this thread runs it now. No other thread does until it has `_ended`."""
        if self._running:
            return False
        self._running = True
        return True

    cdef bint _again(self) except -1:
        """Take note of a run. Returns whether it stopped only for more room here, and so goes on."""
        cdef size_t past = min(self._raw.in_done, self._raw.in_nbytes)  # a LIST may be past the end
        self.consumed += self._raw.in_done
        self.produced += self._raw.out_done
        self._raw.data += past
        self._raw.in_nbytes -= past
        if self._raw.out != NULL:
            self._raw.out += self._raw.out_done
            self._raw.out_nbytes -= self._raw.out_done
        self._raw.in_done = self._raw.out_done = 0
        if self._raw.stop == AGSF_STOP_HEADER:
            self._grow_header()
        elif self._raw.stop == AGSF_STOP_TABLE:
            self._grow_table()
        else:
            return False
        self._raw.stop = AGSF_STOP_NOT
        return True

    cdef void _ended(self):
        self._running = False
        self.stop, self.wanted, self.values = self._raw.stop, self._raw.wanted, self._raw.values
        self.in_total, self.out_total = self._raw.in_total, self._raw.out_total
        self.uncompressed, self.pages = self._raw.uncompressed, self._raw.page
        self.outside_levels = self._raw.outside_levels
        if self.stop == AGSF_STOP_DONE:
            self._in = self._out = None  # may be large, and this object may be kept
            self._raw.data = self._raw.out = NULL
            self._raw.in_nbytes = self._raw.out_nbytes = 0

    cdef int _clear(self) except -1:
        if self._out is not None:
            memset(_data(self._out), 0, _nbytes(self._out))
        return 0

    cdef object _failed(self):
        cdef Modules modules = self.source if self.source is not None else self.target
        page = self._raw.page if self._raw.bad_module in (AGSF_DATA_PAGE, AGSF_DATA_PAGE_HEADER) else None
        label = self._label if modules is None else modules.label
        row_group = self._row_group if modules is None else modules.row_group
        return _module_error(self._raw.status, self._raw.bad_module, row_group, label, page)

    @property
    def first_data_page(self):
        """The offset of the first data page from the chunk's first byte, or None. Needs the table."""
        return self._raw.table[0].out_offset if self._raw.table_count else None

    @property
    def dictionary_pages(self):
        return self._raw.dictionary_pages

    @property
    def counts(self):
        return {
            "dictionary_pages": self._raw.dictionary_pages,
            "v2_pages": self._raw.v2_pages,
            "v2_levels": self._raw.v2_levels,
            "outside_levels": self._raw.outside_levels,
            "checksums": self._raw.checksums,
            "wrong_checksums": self._raw.wrong_checksums,
            "dropped_checksums": self._raw.dropped_checksums,
        }

    @property
    def encodings(self):
        """[(page type, encoding, number of pages)], as in ColumnMetaData.encoding_stats."""
        cdef int kind, encoding
        return [
            (kind, encoding, self._raw.encodings[kind][encoding])
            for kind in range(AGSF_PAGE_TYPES)
            for encoding in range(AGSF_ENCODINGS)
            if self._raw.encodings[kind][encoding]
        ]

    def table(self):
        """Return [(in offset, in bytes, out offset, out bytes)] of the data pages, from the chunk's first byte."""
        cdef agsf_page page
        return [
            (page.in_offset, page.in_nbytes, page.out_offset, page.out_nbytes)
            for page in self._raw.table[:self._raw.table_count]
        ]

    def offset_index(self, data, int64_t in_chunk, int64_t out_chunk):
        """Return the OffsetIndex `data` with the new locations of its pages. Needs the table."""
        return _offset_index(data, self._raw.table, self._raw.table_count, in_chunk, out_chunk)


cdef bytes _offset_index(data, const agsf_page *table, size_t npages, int64_t in_chunk, int64_t out_chunk):
    cdef memoryview view = _hold(data, False)
    cdef size_t listed = 0, nbytes = 0
    cdef bytearray out
    _read(agsf_offset_index_pages(_data(view), _nbytes(view), &listed))
    out = bytearray()
    PyByteArray_Resize(out, <Py_ssize_t> (_nbytes(view) + 16 * listed))
    _check(agsf_offset_index(_data(view), _nbytes(view), table, npages, in_chunk, out_chunk,
                             <uint8_t *> PyByteArray_AS_STRING(out), &nbytes),
           "an offset index, which names a page that is not in its column chunk,")
    return PyBytes_FromStringAndSize(PyByteArray_AS_STRING(out), <Py_ssize_t> nbytes)


def offset_index(data, int64_t in_chunk, int64_t out_chunk):
    """Return the OffsetIndex `data` of a chunk that was moved unchanged."""
    return _offset_index(data, NULL, 0, in_chunk, out_chunk)


def run_pages(list runs not None, unsigned threads):
    """Run the chunks in parallel on what was fed. Raises the first chunk's error; then all output is zeros."""
    cdef list held = list(runs), running = []
    cdef Py_ssize_t n = len(held), i
    cdef bytearray memory = bytearray(n * sizeof(agsf_pages *))
    cdef agsf_pages **raw = <agsf_pages **> PyByteArray_AS_STRING(memory)
    cdef agsf_status status
    cdef PageRun run
    cdef bint again = True
    try:
        for i in range(n):
            run = held[i]
            if run is None or not run._begin():
                raise ValueError("each PageRun is run once at a time")
            running.append(run)
            raw[i] = &run._raw
        while again:
            with nogil:
                status = agsf_pages_run(raw, n, threads)
            again = status == AGSF_PAUSED
            if not again:
                _check(status, "the pages")
            for run in running:
                if run._raw.stop == AGSF_STOP_FAILED:
                    raise run._failed()
                if run._raw.stop != AGSF_STOP_NOT and run._again():
                    again = True
            PyErr_CheckSignals()
    except BaseException:
        for run in running:
            run._clear()
        raise
    finally:
        for run in running:
            run._ended()
