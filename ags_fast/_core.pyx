# cython: language_level=3, binding=True, autotestdict=False
"""The binding: take hold of buffers, check sizes, make one call without the GIL, turn one status into one exception.

Formats and streams are above it, cryptography and threads below.
"""

cimport cython
from cpython.buffer cimport Py_buffer, PyBUF_WRITE
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.errno cimport EINTR, errno
from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

import os as _os
from _thread import RLock as _RLock

from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyLimitError

cdef extern from "Python.h":
    int PyUnicode_FSConverter(object path, PyObject **bytes_ret) except 0
    int PySys_Audit(const char *event, const char *format, ...) except -1
    Py_buffer *PyMemoryView_GET_BUFFER(object view)
    object PyMemoryView_FromMemory(char *mem, Py_ssize_t nbytes, int flags)
    Py_ssize_t PyNumber_AsSsize_t(object number, void *overflow_is_clipped) except? -1
    bint PyBuffer_IsContiguous(Py_buffer *buffer, char order)

cdef extern from "unistd.h" nogil:
    int _close "close"(int fd)

cdef extern from "agsf.h" nogil:
    enum:
        AGSF_NONCE_NBYTES
        AGSF_TAG_NBYTES
        AGSF_OVERHEAD_NBYTES
        AGSF_MAX_THREADS
        AGSF_LIBCRYPTO_BUNDLED  # a macro of the build, not of the header
    ctypedef enum agsf_status:
        AGSF_OK
        AGSF_PAUSED
        AGSF_BAD_TAG
        AGSF_BAD_ARGUMENT
        AGSF_NO_MEMORY
        AGSF_LIMIT
        AGSF_CRYPTO
        AGSF_IO
        AGSF_SHORT
        AGSF_BAD_FORMAT
        AGSF_ORDINAL
        AGSF_CHECKSUM
        AGSF_LEVELS
        AGSF_NO_RANDOM
    ctypedef struct agsf_key:
        pass
    ctypedef struct agsf_run:
        agsf_key *key
        const uint8_t *aad_prefix
        size_t aad_prefix_nbytes
        size_t block_nbytes
        uint64_t first_block
        uint8_t *plain
        size_t plain_nbytes
        uint8_t *sealed
        int fd
        uint64_t fd_offset
        unsigned threads
        uint64_t done
        uint64_t bad_block
        int os_error
    agsf_status agsf_library_init()
    void agsf_end_idle_threads()
    int agsf_open_below(const char *root, const char *path, int flags, unsigned mode, int *os_error_ret)
    agsf_status agsf_open_file(const char *root, const char *path, uint8_t *out, size_t nbytes, int *fd_ret,
                               uint64_t *nbytes_ret, int *os_error_ret)
    agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret)
    bint agsf_read_whole(const char *root, const char *path, uint8_t *out, size_t nbytes, const uint64_t *mtime_ns)
    bint agsf_write_whole(const char *root, const char *folder, const char *name, const uint8_t *data, size_t nbytes,
                          bint sync)
    void agsf_expect_fill(uint8_t *buffer, size_t nbytes)
    const char *agsf_libcrypto_version()
    const char *agsf_libcrypto_cpu()
    agsf_status agsf_key_new(const uint8_t *key, size_t key_nbytes, agsf_key **key_ret)
    void agsf_key_free(agsf_key *key)
    uint64_t agsf_key_sealed(agsf_key *key)
    agsf_status agsf_key_carry(agsf_key *key, uint64_t sealed_before)
    agsf_status agsf_seal(agsf_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                          const uint8_t *plain, size_t plain_nbytes, uint8_t *out)
    agsf_status agsf_open(agsf_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                          const uint8_t *sealed, size_t plain_nbytes, uint8_t *out)
    uint64_t agsf_sealed_nbytes(uint64_t plain_nbytes, uint64_t block_nbytes)
    agsf_status agsf_seal_run(agsf_run *run)
    agsf_status agsf_open_run(agsf_run *run)
    enum:
        AGSF_DEK_MAX_NBYTES
    ctypedef struct agsf_rewrap:
        agsf_key *source "from"
        agsf_key *to
        const uint8_t *prefix
        size_t prefix_nbytes
        const uint8_t *name_offsets
        const uint8_t *names
        size_t names_nbytes
        const uint8_t *offsets
        const uint8_t *data "in"
        size_t in_nbytes
        uint8_t *out
        size_t out_nbytes
        size_t nrows
        unsigned threads
        size_t done, begin, end, bad_row
    agsf_status agsf_rewrap_run(agsf_rewrap *run)
    void agsf_wipe(void *memory, size_t nbytes)

cdef extern from "agsf_parquet.h" nogil:
    enum:
        AGSF_THRIFT_STOP
        AGSF_THRIFT_UUID
        AGSF_FRAME_NBYTES
        AGSF_ENCODINGS
        AGSF_PAGE_TYPES
        AGSF_FOOTER
        AGSF_DATA_PAGE
        AGSF_DATA_PAGE_HEADER
        AGSF_ORDINAL_MAX
    ctypedef struct agsf_thrift_value:
        short id
        unsigned type
        size_t begin, end
    agsf_status agsf_thrift_next(const uint8_t *data, size_t nbytes, bint in_list, agsf_thrift_value *value)
    agsf_status agsf_thrift_list_head(const uint8_t *data, size_t nbytes, agsf_thrift_value *value, size_t *count_ret)
    ctypedef struct agsf_thrift_edit:
        short id
        unsigned type
        const uint8_t *value
        size_t nbytes
    size_t agsf_thrift_splice_nbytes(size_t nbytes, const agsf_thrift_edit *edits, size_t nedits)
    agsf_status agsf_thrift_splice(const uint8_t *data, size_t nbytes, const agsf_thrift_edit *edits, size_t nedits,
                                   uint8_t *out, size_t *nbytes_ret, size_t *end_ret)
    ctypedef struct agsf_schema_element:
        uint32_t name, name_nbytes, children
    ctypedef struct agsf_row_group:
        uint32_t begin, end, first, count
    ctypedef struct agsf_chunk_span:
        uint32_t begin, end, crypto
    ctypedef struct agsf_footer:
        size_t end
        agsf_schema_element *schema
        agsf_row_group *groups
        agsf_chunk_span *chunks
        size_t nschema, ngroups, nchunks
    agsf_status agsf_footer_read(const uint8_t *data, size_t nbytes, agsf_footer *footer)
    void agsf_footer_clear(agsf_footer *footer)
    agsf_status agsf_footer_plain(const uint8_t *data, const agsf_footer *footer, const uint8_t *const *metas,
                                  const size_t *metas_nbytes, uint8_t *out, size_t *nbytes_ret)
    ctypedef struct agsf_column_metadata:
        size_t begin, end
        int64_t codec, num_values, uncompressed_nbytes, compressed_nbytes
        int64_t data_page, index_page, dictionary_page, bloom_filter, bloom_filter_nbytes
        size_t path, encodings, encoding_stats
    ctypedef struct agsf_chunk:
        size_t begin, end, metadata, crypto, sealed_metadata, sealed_metadata_nbytes
        bint file_path
        int64_t offset_index, offset_index_nbytes, column_index, column_index_nbytes
    agsf_status agsf_chunk_read(const uint8_t *data, size_t nbytes, size_t begin, agsf_chunk *chunk)
    agsf_status agsf_column_metadata_read(const uint8_t *data, size_t nbytes, size_t begin,
                                          agsf_column_metadata *metadata)
    ctypedef struct agsf_modules:
        agsf_key *key
        const uint8_t *aad
        size_t aad_nbytes
        int16_t row_group, column
        bint without_aad, ctr
    agsf_status agsf_module_seal(const agsf_modules *modules, unsigned type, const uint8_t *plain, size_t nbytes,
                                 uint8_t *out)
    agsf_status agsf_module_open(const agsf_modules *modules, unsigned type, const uint8_t *sealed, size_t nbytes,
                                 uint8_t *out, size_t *nbytes_ret, size_t *frame_nbytes_ret)
    ctypedef enum agsf_pages_mode:
        AGSF_PAGES_COPY
        AGSF_PAGES_SAME_SIZE
        AGSF_PAGES_VIEW
        AGSF_PAGES_CHECK
        AGSF_PAGES_LIST
    ctypedef enum agsf_pages_stop:
        AGSF_STOP_NOT
        AGSF_STOP_DONE
        AGSF_STOP_INPUT
        AGSF_STOP_OUTPUT
        AGSF_STOP_HEADER
        AGSF_STOP_TABLE
        AGSF_STOP_FAILED
    ctypedef struct agsf_page:
        uint64_t in_offset, out_offset, in_nbytes, out_nbytes
    ctypedef struct agsf_pages:
        const agsf_modules *source "from"
        const agsf_modules *to
        agsf_pages_mode mode
        uint64_t nbytes, values_left
        int v2_layout
        bint short_sizes, keep_checksum, refuse_levels, dictionary
        const uint8_t *data "in"
        size_t in_nbytes
        bint in_is_all
        uint8_t *out
        size_t out_nbytes
        uint8_t *header
        size_t header_nbytes
        agsf_page *table
        size_t table_room
        size_t in_done, out_done
        agsf_pages_stop stop
        size_t wanted
        agsf_status status
        unsigned bad_module
        uint32_t page
        bint began
        size_t table_count
        uint64_t in_total, out_total, uncompressed, values
        uint32_t dictionary_pages, v2_pages, v2_levels, outside_levels, wrong_checksums, dropped_checksums, checksums
        uint32_t encodings[4][16]
    agsf_status agsf_pages_run(agsf_pages **runs, size_t nruns, unsigned threads)
    agsf_status agsf_offset_index(const uint8_t *data, size_t nbytes, const agsf_page *table, size_t npages,
                                  int64_t in_chunk, int64_t out_chunk, uint8_t *out, size_t *nbytes_ret)
    agsf_status agsf_offset_index_pages(const uint8_t *data, size_t nbytes, size_t *npages_ret)

NONCE_NBYTES = AGSF_NONCE_NBYTES
TAG_NBYTES = AGSF_TAG_NBYTES
OVERHEAD_NBYTES = AGSF_OVERHEAD_NBYTES
MAX_THREADS = AGSF_MAX_THREADS

# Below this, handing the GIL to another thread and waiting to have it back costs more than the work.
cdef enum: KEEP_GIL_NBYTES = 4096


cdef object _raise_for(agsf_status status, object block, int os_error=0):
    """The one place where a status becomes an exception. `block` is a block's index, or None where there is none."""
    where = "message" if block is None else f"block {block}"
    if status == AGSF_BAD_TAG:
        raise IntegrityError(
            f"{where} does not authenticate: its bytes were changed or moved, or the key or the AAD prefix is another "
            "(AES-GCM does not tell which)",
            block_index=block,
        )
    if status == AGSF_SHORT:
        raise IntegrityError(f"the source ends inside {where}: it was cut after its length was known", block_index=block)
    if status == AGSF_IO:
        raise OSError(os_error, _os.strerror(os_error))
    if status == AGSF_LIMIT:
        raise KeyLimitError("this would seal more than 2**32 messages with one key value: use a new key")
    if status == AGSF_NO_MEMORY:
        raise MemoryError
    if status == AGSF_BAD_ARGUMENT:
        raise ValueError("no AGS1 stream can have these sizes")
    if status == AGSF_NO_RANDOM:
        raise AgsError("the operating system gives no random bytes (getrandom, getentropy): nothing can be sealed")
    if status == AGSF_CRYPTO:
        raise AgsError(f"libcrypto failed ({openssl_version()})")
    raise AssertionError(f"unexpected status {<int> status}")


cdef memoryview _hold(object buffer, bint writable):
    """A view that keeps `buffer` in place while it lives. Read it with PyMemoryView_GET_BUFFER."""
    cdef memoryview view = memoryview(buffer)
    cdef Py_buffer *raw = PyMemoryView_GET_BUFFER(view)
    if not PyBuffer_IsContiguous(raw, b"C"):
        raise BufferError("the buffer must be C-contiguous: pass a copy of it")
    if writable and raw.readonly:
        raise TypeError(f"a writable bytes-like object is required, not a read-only {type(buffer).__name__!r}")
    return view


cdef uint8_t _nothing[1]


cdef inline uint8_t *_data(memoryview view):
    """Never NULL, which an empty buffer may have: C lets nothing be added to it or copied from it, not even 0 bytes."""
    cdef uint8_t *data = <uint8_t *> PyMemoryView_GET_BUFFER(view).buf
    return data if data != NULL else _nothing


cdef inline size_t _nbytes(memoryview view):
    return <size_t> PyMemoryView_GET_BUFFER(view).len


cdef int _refuse_overlap(const uint8_t *a, size_t a_nbytes, const uint8_t *b, size_t b_nbytes) except -1:
    if a_nbytes > 0 and b_nbytes > 0 and a < b + b_nbytes and b < a + a_nbytes:
        raise BufferError("input and output overlap: pass two separate buffers")
    return 0


@cython.final
@cython.auto_pickle(False)
cdef class Descriptor:
    """An open file's number, which stays this file's for as long as a call uses it.

    The system gives a closed number to the next file that is opened. So a thread that closes while others read or write
    only says that it is over: no call begins after that (ValueError), and the last one in flight closes the file. `close`
    waits for nobody. A `with` block is a call in flight: it gives the number, which must not be kept.
    """

    # Read and written with the GIL held, and never across a call that could let go of it.
    cdef int _fd, _calls
    cdef bint _closed

    def __cinit__(self, int fd):
        self._fd = fd

    def __dealloc__(self):
        if self._fd >= 0:  # collected without `close`; or calls in flight stayed behind in the process this was forked from
            _close(self._fd)

    def __repr__(self):
        return f"<ags_fast descriptor{', closed' if self._closed else ''}>"

    cdef int _take(self) except -1:
        if self._closed:
            raise ValueError("I/O operation on closed file")
        self._calls += 1
        return self._fd

    cdef int _give_back(self) except -1:
        self._calls -= 1
        return self._close_if_idle()

    cdef int _close_if_idle(self) except -1:
        cdef int fd = self._fd, os_error
        if not self._closed or self._calls > 0 or fd < 0:
            return 0
        self._fd = -1
        with nogil:
            os_error = errno if _close(fd) != 0 else 0
        if os_error != 0 and os_error != EINTR:
            raise OSError(os_error, _os.strerror(os_error))
        return 0

    def __enter__(self):
        return self._take()

    def __exit__(self, *error):
        self._give_back()

    @property
    def closed(self):
        return self._closed

    def close(self):
        """Let no further call begin, and close the file when none is in flight. Returns whether it is closed now."""
        self._closed = True
        self._close_if_idle()
        return self._fd < 0


cdef int _go(agsf_run *run, bint seal, Descriptor file) except -1:
    """Runs until the end, on a file if there is one. Comes back in between, so that an interrupt is answered."""
    if file is None:
        return _go_on(run, seal, None)
    run.fd = file._take()
    try:
        return _go_on(run, seal, file)
    finally:
        file._give_back()


cdef int _go_on(agsf_run *run, bint seal, Descriptor file) except -1:
    cdef agsf_status status
    while True:
        if run.sealed != NULL and run.plain_nbytes < KEEP_GIL_NBYTES:
            status = agsf_seal_run(run) if seal else agsf_open_run(run)
        else:
            with nogil:
                status = agsf_seal_run(run) if seal else agsf_open_run(run)
        if status == AGSF_OK:
            return 0
        if status != AGSF_PAUSED:
            _raise_for(status, run.first_block + run.bad_block, run.os_error)
        try:
            PyErr_CheckSignals()
            if file is not None and file._closed:  # what this call reads or writes is for nobody any more
                raise ValueError("I/O operation on closed file")
        except BaseException:
            if not seal:  # what is open by now has passed its tags, but a failed call hands out nothing
                memset(run.plain, 0, run.plain_nbytes)
            raise


cdef object _source(agsf_run *run, object source, uint64_t offset):
    """Let the run read what is sealed in `source` from `offset`. Keep `source`, and what this returns, for as long.

    That is a view, None, or the Descriptor, which `_go` is to take.
    """
    cdef memoryview view
    cdef const uint8_t *data
    cdef uint64_t sealed, nbytes
    if type(source) is Descriptor:
        run.fd_offset = offset
        return source
    if type(source) is bytes:  # which cannot change: a small block does without the cost of a view
        view = None
        data = <const uint8_t *> PyBytes_AS_STRING(source)
        nbytes = <uint64_t> PyBytes_GET_SIZE(source)
    else:
        view = _hold(source, False)
        data = _data(view)
        nbytes = _nbytes(view)
    sealed = agsf_sealed_nbytes(run.plain_nbytes, run.block_nbytes)
    if offset > nbytes or sealed > nbytes - offset:
        raise ValueError(f"the run needs {offset + sealed} bytes of input, there are {nbytes}")
    run.sealed = <uint8_t *> data + offset
    _refuse_overlap(run.plain, run.plain_nbytes, run.sealed, <size_t> sealed)
    return view


@cython.final
cdef class Key:
    """An AES key of 16, 24 or 32 bytes, and runs of AGS1 blocks under it. Threads may share it.

    Offsets and sizes are in bytes; `block_size` and `nbytes` count plaintext. A run is consecutive blocks from
    `first_block`; its last block may be short, and a run of 0 bytes is one empty block.
    """

    cdef agsf_key *_key

    def __cinit__(self, key):
        cdef memoryview view = _hold(key, False)
        cdef agsf_status status = agsf_key_new(_data(view), _nbytes(view), &self._key)
        if status == AGSF_BAD_ARGUMENT:
            raise ValueError(f"an AES key has 16, 24 or 32 bytes, this one has {_nbytes(view)}")
        if status != AGSF_OK:
            _raise_for(status, None)

    def __dealloc__(self):
        agsf_key_free(self._key)

    def __repr__(self):
        return "<ags_fast key>"

    def __reduce__(self):
        raise TypeError("a key is never pickled: send a reference to it, and load it where it is used")

    @property
    def sealed(self):
        """Messages sealed in this process with this key's value, by whatever object."""
        return agsf_key_sealed(self._key)

    def carry(self, uint64_t sealed_before):
        """Count messages that other processes have sealed with this key's value against its limit."""
        cdef agsf_status status = agsf_key_carry(self._key, sealed_before)
        if status != AGSF_OK:
            _raise_for(status, None)

    def seal(self, nonce, data, aad):
        """One message under a nonce of 12 bytes that the caller answers for: ciphertext and tag."""
        cdef memoryview nonce_view = _hold(nonce, False), view = _hold(data, False), aad_view = _hold(aad, False)
        cdef agsf_status status
        if _nbytes(nonce_view) != AGSF_NONCE_NBYTES:
            raise ValueError(f"a nonce has {AGSF_NONCE_NBYTES} bytes, this one has {_nbytes(nonce_view)}")
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (_nbytes(view) + AGSF_TAG_NBYTES))
        status = agsf_seal(self._key, _data(nonce_view), _data(aad_view), _nbytes(aad_view),
                           _data(view), _nbytes(view), <uint8_t *> PyBytes_AS_STRING(out))
        if status != AGSF_OK:
            _raise_for(status, None)
        return out

    def open(self, nonce, data, aad):
        """Opens what `seal` returned."""
        cdef memoryview nonce_view = _hold(nonce, False), view = _hold(data, False), aad_view = _hold(aad, False)
        cdef agsf_status status
        if _nbytes(nonce_view) != AGSF_NONCE_NBYTES:
            raise ValueError(f"a nonce has {AGSF_NONCE_NBYTES} bytes, this one has {_nbytes(nonce_view)}")
        if _nbytes(view) < AGSF_TAG_NBYTES:
            raise IntegrityError("the message is shorter than its tag")
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (_nbytes(view) - AGSF_TAG_NBYTES))
        status = agsf_open(self._key, _data(nonce_view), _data(aad_view), _nbytes(aad_view),
                           _data(view), _nbytes(view) - AGSF_TAG_NBYTES, <uint8_t *> PyBytes_AS_STRING(out))
        if status != AGSF_OK:
            _raise_for(status, None)
        return out

    cdef agsf_run _run(self, bytes aad_prefix, size_t block_size, uint64_t first_block, unsigned threads):
        cdef agsf_run run
        memset(&run, 0, sizeof(run))
        run.key = self._key
        run.aad_prefix = <const uint8_t *> PyBytes_AS_STRING(aad_prefix)
        run.aad_prefix_nbytes = <size_t> len(aad_prefix)
        run.block_nbytes = block_size
        run.first_block = first_block
        run.threads = threads
        return run

    def seal_run(self, bytes aad_prefix not None, size_t block_size, uint64_t first_block, plain, target,
                 uint64_t offset, unsigned threads):
        """Seals `plain` to `target` from `offset`: a writable buffer, or a Descriptor.

        Returns the sealed bytes written. Raises KeyLimitError, or the file's OSError.
        """
        cdef memoryview view = _hold(plain, False), out
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        cdef uint64_t sealed = agsf_sealed_nbytes(_nbytes(view), block_size)
        run.plain = _data(view)
        run.plain_nbytes = _nbytes(view)
        cdef Descriptor file = None
        if type(target) is Descriptor:
            file = target
            run.fd_offset = offset
        else:
            out = _hold(target, True)
            if offset > _nbytes(out) or sealed > _nbytes(out) - offset:
                raise ValueError(f"the output needs {offset + sealed} bytes, it has {_nbytes(out)}")
            run.sealed = _data(out) + offset
            _refuse_overlap(run.plain, run.plain_nbytes, _data(out), offset + sealed)
        _go(&run, True, file)
        return sealed

    def open_run(self, bytes aad_prefix not None, size_t block_size, uint64_t first_block, source, uint64_t offset,
                 size_t nbytes, out, unsigned threads):
        """Opens `nbytes` of plaintext from `source`, sealed there from `offset`: a buffer, or a Descriptor.

        They go to the start of the writable buffer `out`. Raises IntegrityError, or the file's OSError; then all
        `nbytes` of `out` are zero.
        """
        cdef memoryview out_view = _hold(out, True)
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        if nbytes > _nbytes(out_view):
            raise ValueError(f"the output needs {nbytes} bytes, it has {_nbytes(out_view)}")
        run.plain = _data(out_view)
        run.plain_nbytes = nbytes
        view = _source(&run, source, offset)
        _go(&run, False, view if type(view) is Descriptor else None)

    def open_bytes(self, bytes aad_prefix not None, size_t block_size, uint64_t first_block, source, uint64_t offset,
                   Py_ssize_t nbytes, unsigned threads):
        """Like `open_run`, but returns the plaintext, as new bytes."""
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        out = _new_bytes(nbytes)
        run.plain = <uint8_t *> PyBytes_AS_STRING(out)
        run.plain_nbytes = <size_t> nbytes
        view = _source(&run, source, offset)
        _go(&run, False, view if type(view) is Descriptor else None)
        return out


    def seal_bytes(self, bytes aad_prefix not None, size_t block_size, bytes header not None, bytes plain not None):
        """`header` and then all of a stream's blocks, as new bytes; one thread does it."""
        cdef agsf_run run = self._run(aad_prefix, block_size, 0, 1)
        cdef Py_ssize_t begin = PyBytes_GET_SIZE(header)
        cdef uint64_t sealed = agsf_sealed_nbytes(<uint64_t> PyBytes_GET_SIZE(plain), block_size)
        if sealed == 0:
            _raise_for(AGSF_BAD_ARGUMENT, None)
        out = _new_bytes(begin + <Py_ssize_t> sealed)
        memcpy(PyBytes_AS_STRING(out), PyBytes_AS_STRING(header), <size_t> begin)
        run.plain = <uint8_t *> PyBytes_AS_STRING(plain)
        run.plain_nbytes = <size_t> PyBytes_GET_SIZE(plain)
        run.sealed = <uint8_t *> PyBytes_AS_STRING(out) + begin
        _go(&run, True, None)
        return out


cdef bytes _new_bytes(Py_ssize_t nbytes):
    if nbytes < 0:
        raise ValueError(f"a size cannot be negative: {nbytes}")
    out = PyBytes_FromStringAndSize(NULL, nbytes)
    agsf_expect_fill(<uint8_t *> PyBytes_AS_STRING(out), <size_t> nbytes)
    return out


cdef size_t _rows(memoryview offsets) except? 0:
    """How many rows an Arrow array has by its int32 offsets. Of none, it need not have any."""
    if _nbytes(offsets) % sizeof(int32_t):
        raise ValueError(f"offsets are int32: these have {_nbytes(offsets)} bytes")
    return _nbytes(offsets) // sizeof(int32_t) - 1 if _nbytes(offsets) else 0


cdef tuple _row_span(const uint8_t *offsets, size_t row):
    cdef int32_t span[2]
    memcpy(span, offsets + row * sizeof(int32_t), sizeof(span))
    return span[0], span[1]


def rewrap(Key old not None, Key new not None, prefix, name_offsets, names, offsets, wrapped, out, *, int threads=1):
    """Wraps a column of data keys under `new` that are wrapped under `old`: the same keys and names, with new nonces.

    Row i of `wrapped` is a nonce, a key of 1 to 64 bytes sealed under `old`, and a tag; it authenticates `prefix`
    followed by row i of `names`. It goes to the same place in `out`, where what is before the first row and behind the
    last stays as it is. Both columns are buffers of Arrow binary arrays: n + 1 offsets (native int32), which say what n
    is and may begin anywhere, and data. To give a slice is to give a part of the offsets.

    ValueError names the first row that is impossible, KeyLimitError says that `new` may not seal n more messages: nothing
    was done. IntegrityError: `block_index` is the lowest row whose tag is wrong, and all rows in `out` are zeros. `out` may
    not overlap any input, not even be `wrapped` itself: a failure would leave neither the old nor the new (BufferError).
    """
    cdef memoryview prefix_view = _hold(prefix, False), out_view = _hold(out, True)
    cdef memoryview name_offsets_view = _hold(name_offsets, False), names_view = _hold(names, False)
    cdef memoryview offsets_view = _hold(offsets, False), wrapped_view = _hold(wrapped, False), view
    cdef agsf_rewrap run
    cdef agsf_status status = AGSF_PAUSED
    if threads < 1:
        raise ValueError(f"threads is at least 1, not {threads}")
    for view in (prefix_view, name_offsets_view, names_view, offsets_view, wrapped_view):
        _refuse_overlap(_data(view), _nbytes(view), _data(out_view), _nbytes(out_view))
    memset(&run, 0, sizeof(run))
    run.nrows = _rows(offsets_view)
    if _rows(name_offsets_view) != run.nrows:
        raise ValueError(f"there are {run.nrows} wrapped keys, and {_rows(name_offsets_view)} names")
    run.source, run.to = old._key, new._key
    run.prefix, run.prefix_nbytes = _data(prefix_view), _nbytes(prefix_view)
    run.name_offsets, run.names, run.names_nbytes = _data(name_offsets_view), _data(names_view), _nbytes(names_view)
    run.offsets, run.data, run.in_nbytes = _data(offsets_view), _data(wrapped_view), _nbytes(wrapped_view)
    run.out, run.out_nbytes = _data(out_view), _nbytes(out_view)
    run.threads = threads
    while status == AGSF_PAUSED:
        with nogil:
            status = agsf_rewrap_run(&run)
        if status == AGSF_PAUSED:
            try:
                PyErr_CheckSignals()
            except BaseException:
                memset(run.out + run.begin, 0, run.end - run.begin)
                raise
    if status == AGSF_BAD_TAG:
        raise IntegrityError(
            f"row {run.bad_row}: a wrapped key does not authenticate: it was changed, or wrapped for another name, or under "
            "another key (AES-GCM does not tell which)",
            block_index=run.bad_row,
        )
    if status == AGSF_BAD_ARGUMENT:
        name, key = _row_span(run.name_offsets, run.bad_row), _row_span(run.offsets, run.bad_row)
        raise ValueError(
            f"row {run.bad_row} is impossible: its name goes from {name[0]} to {name[1]} of {run.names_nbytes} bytes, its "
            f"wrapped key, of {AGSF_OVERHEAD_NBYTES + 1} to {AGSF_OVERHEAD_NBYTES + AGSF_DEK_MAX_NBYTES} bytes, from {key[0]} "
            f"to {key[1]} of {run.in_nbytes} bytes, and {run.out_nbytes} of output"
        )
    if status != AGSF_OK:
        _raise_for(status, None)


def new_bytes(Py_ssize_t nbytes):
    """A bytes object that is yet to be written, and a writable view of it: a result without a copy.

    Write all of it, let nobody else see it before, and keep the bytes as long as the view.
    """
    out = _new_bytes(nbytes)
    return out, PyMemoryView_FromMemory(PyBytes_AS_STRING(out), nbytes, PyBUF_WRITE)


def grow(bytearray buffer not None, Py_ssize_t nbytes):
    """Make a buffer longer. What is new in it can be anything: let nobody see it."""
    # In Python, zeros would be made and copied: all of that memory touched twice before it is used.
    if nbytes > PyByteArray_GET_SIZE(buffer):
        PyByteArray_Resize(buffer, nbytes)


@cython.final
@cython.auto_pickle(False)
cdef class Pending:
    """Plaintext that a writer has taken and is yet to seal, and the turn to work on it, which one thread has at a time.

    A `with` block waits for the turn and has it; within its own block a thread cannot have it again (RuntimeError: only
    a signal's handler would ask). Small pieces need no turn: `add` is over before another thread can look.
    """

    cdef public bytearray buffer  # its first `filled` bytes are pending
    cdef public Py_ssize_t filled
    cdef readonly bint busy  # somebody has the turn
    cdef bint _over
    cdef object _turn

    def __cinit__(self):
        self.buffer = bytearray()
        self._turn = _RLock()  # not a Lock, for which a handler would wait for ever

    def add(self, data):
        """Copy all of `data` behind what is pending, if that does not fill the buffer up and nobody has the turn.

        Returns how many bytes that is, or -1 if nothing was done.
        """
        cdef memoryview view = _hold(data, False)
        if self.busy or self._over or <Py_ssize_t> _nbytes(view) >= PyByteArray_GET_SIZE(self.buffer) - self.filled:
            return -1
        memcpy(PyByteArray_AS_STRING(self.buffer) + self.filled, _data(view), _nbytes(view))
        self.filled += _nbytes(view)
        return _nbytes(view)

    def end(self):
        """Let `add` take nothing more."""
        self._over = True

    def try_turn(self):
        """Whether the turn was free: then the caller has it, and must give it back with `__exit__`."""
        if self.busy or not self._turn.acquire(False):
            return False
        self.busy = True
        return True

    def __enter__(self):
        self._turn.acquire()
        if self.busy:
            self._turn.release()
            raise RuntimeError("reentrant call: a signal handler cannot write or close what it has interrupted")
        self.busy = True

    def __exit__(self, *error):
        self.busy = False
        self._turn.release()


cdef bytes _path(object path):
    """As the system takes it."""
    cdef PyObject *encoded = NULL
    PyUnicode_FSConverter(path, &encoded)
    raw = <bytes> encoded
    Py_DECREF(raw)  # the converter's reference
    return raw


def open_below(root, path, int flags, unsigned mode):
    """Open a path below the folder `root`; "." is that folder. Returns a descriptor.

    OSError with EXDEV: a link leads out, or only who goes step by step can tell whether one does.
    """
    cdef bytes raw_root = _path(root), raw = _path(path)
    cdef const char *at = PyBytes_AS_STRING(raw_root)
    cdef const char *name = PyBytes_AS_STRING(raw)
    cdef int fd = -1, os_error = 0
    PySys_Audit("open", "OOi", <PyObject *> path, <PyObject *> None, flags)
    while True:
        with nogil:
            fd = agsf_open_below(at, name, flags, mode, &os_error)
        if fd >= 0:
            return fd
        if os_error != EINTR:
            raise OSError(os_error, _os.strerror(os_error), f"{_os.fsdecode(root)}/{_os.fsdecode(path)}")
        PyErr_CheckSignals()


def open_file(path, length, uint64_t small, root=None):
    """Open a file to read, below the folder `root` unless that is None: its Descriptor, its size, and b"".

    The size of what is no regular file is -1. If the first `length` bytes of a regular file, or all that it has where
    that is None, are no more than `small`, they are read, the file is closed, and instead of its Descriptor there are
    None and these bytes. OSError with EXDEV: as `open_below`.
    """
    # One call in place of os.open, fstat, pread and close: around a small file these cost as much as what they do.
    cdef bytes raw = _path(path), raw_root = None if root is None else _path(root)
    cdef const char *name = PyBytes_AS_STRING(raw)
    cdef const char *at = NULL if root is None else PyBytes_AS_STRING(raw_root)
    cdef agsf_status status
    cdef int fd = -1, os_error = 0
    cdef uint64_t nbytes = 0
    cdef uint64_t wanted = 0 if length is None or length > small else length
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> wanted)
    cdef uint8_t *data = <uint8_t *> PyBytes_AS_STRING(out)
    PySys_Audit("open", "OOi", <PyObject *> path, <PyObject *> None, 0)
    while True:
        with nogil:
            status = agsf_open_file(at, name, data, <size_t> wanted, &fd, &nbytes, &os_error)
        if status != AGSF_IO or os_error != EINTR:
            break
        PyErr_CheckSignals()
    if status == AGSF_IO:
        raise OSError(os_error, _os.strerror(os_error), path)
    if status != AGSF_OK:
        _raise_for(status, None)
    if fd < 0:
        return None, nbytes, out
    if nbytes > <uint64_t> INT64_MAX:
        return Descriptor(fd), -1, b""
    if nbytes > small or length is not None:
        return Descriptor(fd), nbytes, b""
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> nbytes)
    data = <uint8_t *> PyBytes_AS_STRING(out)
    with nogil:
        status = agsf_read_and_close(fd, data, <size_t> nbytes, &os_error)
    if status != AGSF_OK:
        _raise_for(status, None, os_error)
    return None, nbytes, out


def read_whole(root, path, uint64_t nbytes, mtime_ns):
    """All of a regular file of `nbytes`, below the folder `root` unless that is None, in one call.

    None, for whatever reason, leaves it to who does it step by step. mtime_ns, unless it is None: and that was changed
    last at this time (ns since the epoch), also after it was read.
    """
    cdef bytes raw = _path(path), raw_root = None if root is None else _path(root)
    cdef const char *name = PyBytes_AS_STRING(raw)
    cdef const char *at = NULL if root is None else PyBytes_AS_STRING(raw_root)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> nbytes)
    cdef uint8_t *data = <uint8_t *> PyBytes_AS_STRING(out)
    cdef uint64_t expected = 0 if mtime_ns is None else mtime_ns
    cdef const uint64_t *mtime = NULL if mtime_ns is None else &expected
    cdef bint whole
    PySys_Audit("open", "OOi", <PyObject *> path, <PyObject *> None, 0)
    with nogil:
        whole = agsf_read_whole(at, name, data, <size_t> nbytes, mtime)
    return out if whole else None


def write_whole(root, folder, name, bytes data not None, bint sync):
    """Make a file in `folder`, below the folder `root` ("." is that), in one call, if there is no such file.

    Until it is complete, with `sync` on the disk, it has no name: whatever dies leaves nothing. False, for whatever
    reason, leaves it to who does it step by step; then nothing was done.
    """
    cdef bytes raw_root = _path(root), raw_folder = _path(folder), raw_name = _path(name)
    cdef const char *top = PyBytes_AS_STRING(raw_root)
    cdef const char *at = PyBytes_AS_STRING(raw_folder)
    cdef const char *to = PyBytes_AS_STRING(raw_name)
    cdef const uint8_t *begin = <const uint8_t *> PyBytes_AS_STRING(data)
    cdef size_t nbytes = <size_t> PyBytes_GET_SIZE(data)
    cdef bint whole
    PySys_Audit("open", "OOi", <PyObject *> name, <PyObject *> None, 1)
    with nogil:
        whole = agsf_write_whole(top, at, to, begin, nbytes, sync)
    return whole


@cython.final
@cython.auto_pickle(False)
cdef class Span:
    """Opened bytes of a plaintext, and where in it they begin."""

    cdef readonly Py_ssize_t offset
    cdef readonly bytes data

    def __cinit__(self, Py_ssize_t offset, bytes data not None):
        self.offset = offset
        self.data = data

    cpdef bytes get(self, offset, size):
        """The `size` bytes from `offset`, or None if not all of them are here."""
        cdef Py_ssize_t begin = PyNumber_AsSsize_t(offset, NULL), nbytes = PyNumber_AsSsize_t(size, NULL)
        cdef Py_ssize_t held = PyBytes_GET_SIZE(self.data)
        if begin < 0 or nbytes < 0 or begin < self.offset or begin - self.offset > held:
            return None
        if nbytes > held - (begin - self.offset):
            return None
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self.data) + (begin - self.offset), nbytes)


def read_at(self, offset, size):
    """`size` bytes of plaintext from `offset`; like a slice, it ends where the plaintext ends."""
    # AgsReader's method. In Python, the call alone would cost more than a hundred cached bytes are worth.
    data = (<Span?> self._hot).get(offset, size)
    return self._read(offset, size, False) if data is None else data


# ---- Thrift and Parquet

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


cdef int _thrift_checked(agsf_status status) except -1:
    if status == AGSF_BAD_FORMAT:
        raise FormatError("these bytes are not Thrift's compact protocol: the file is damaged, or not what it says")
    if status != AGSF_OK:
        _raise_for(status, None)
    return 0


def thrift_fields(data, size_t offset=0):
    """The fields of the struct at `offset`: {id: (type, begin, end)} of their values, and where the struct ends.

    A bool has no bytes: its type says it (1 or 2). Raises FormatError for anything that is not the compact protocol.
    """
    cdef memoryview view = _hold(data, False)
    cdef agsf_thrift_value value
    memset(&value, 0, sizeof(value))
    if offset > _nbytes(view):
        raise ValueError(f"there are {_nbytes(view)} bytes, none at {offset}")
    value.end = offset
    fields = {}
    while True:
        _thrift_checked(agsf_thrift_next(_data(view), _nbytes(view), False, &value))
        if value.type == AGSF_THRIFT_STOP:
            return fields, value.end
        fields[value.id] = (value.type, value.begin, value.end)


def thrift_list(data, size_t offset):
    """The elements of the list at `offset`: their type, [(begin, end)], and where the list ends."""
    cdef memoryview view = _hold(data, False)
    cdef agsf_thrift_value value
    cdef size_t count = 0
    memset(&value, 0, sizeof(value))
    if offset > _nbytes(view):
        raise ValueError(f"there are {_nbytes(view)} bytes, none at {offset}")
    value.begin = offset
    _thrift_checked(agsf_thrift_list_head(_data(view), _nbytes(view), &value, &count))
    elements = []
    for _ in range(count):
        _thrift_checked(agsf_thrift_next(_data(view), _nbytes(view), True, &value))
        elements.append((value.begin, value.end))
    return value.type, elements, value.end


def thrift_splice(data, size_t offset, list edits not None):
    """A copy of the struct at `offset` with edits [(id, type, value bytes or None to remove)], sorted by id.

    What is not edited is copied byte by byte, fields of any id among it.
    """
    cdef memoryview view = _hold(data, False)
    cdef Py_ssize_t n = len(edits), i
    cdef int last = 0
    cdef size_t left, room, nbytes = 0, end = 0
    cdef list values = []  # which keeps them
    cdef agsf_thrift_value struct
    cdef agsf_thrift_edit *raw
    cdef bytes value
    if offset > _nbytes(view):
        raise ValueError(f"there are {_nbytes(view)} bytes, none at {offset}")
    raw = <agsf_thrift_edit *> calloc(n + 1, sizeof(agsf_thrift_edit))
    if raw == NULL:
        raise MemoryError
    try:
        for i, (number, kind, edit) in enumerate(list(edits)[:n]):
            raw[i].id = number
            if raw[i].id <= last:
                raise ValueError("the field ids of edits must ascend from 1")
            last = raw[i].id
            if edit is not None:
                value = edit
                values.append(value)
                if not AGSF_THRIFT_STOP < kind <= AGSF_THRIFT_UUID:
                    raise ValueError(f"there is no type {kind} in Thrift's compact protocol")
                raw[i].type = kind
                raw[i].value = <const uint8_t *> PyBytes_AS_STRING(value)
                raw[i].nbytes = <size_t> PyBytes_GET_SIZE(value)
        memset(&struct, 0, sizeof(struct))
        struct.end = offset
        while True:
            _thrift_checked(agsf_thrift_next(_data(view), _nbytes(view), False, &struct))
            if struct.type == AGSF_THRIFT_STOP:
                break
        left = struct.end - offset
        room = agsf_thrift_splice_nbytes(left, raw, n)
        if room == 0:
            raise MemoryError
        out = bytearray(room)
        _thrift_checked(agsf_thrift_splice(_data(view) + offset, left, raw, n, <uint8_t *> PyByteArray_AS_STRING(out),
                                           &nbytes, &end))
        return PyBytes_FromStringAndSize(PyByteArray_AS_STRING(out), <Py_ssize_t> nbytes)
    finally:
        free(raw)


@cython.final
@cython.auto_pickle(False)
cdef class ColumnMetadata:
    """The numbers of a ColumnMetaData, in bytes or as offsets into the file; -1 where it has none.

    `path`, `encodings` and `encoding_stats` are where these values begin, or 0.
    """

    cdef readonly size_t begin, end, path, encodings, encoding_stats
    cdef readonly int64_t codec, num_values, uncompressed_nbytes, compressed_nbytes
    cdef readonly int64_t data_page, index_page, dictionary_page, bloom_filter, bloom_filter_nbytes

    def __cinit__(self, data, size_t begin=0):
        cdef memoryview view = _hold(data, False)
        cdef agsf_column_metadata raw
        if begin > _nbytes(view):
            raise ValueError(f"there are {_nbytes(view)} bytes, none at {begin}")
        _thrift_checked(agsf_column_metadata_read(_data(view), _nbytes(view), begin, &raw))
        self.begin, self.end, self.path = raw.begin, raw.end, raw.path
        self.encodings, self.encoding_stats = raw.encodings, raw.encoding_stats
        self.codec, self.num_values = raw.codec, raw.num_values
        self.uncompressed_nbytes, self.compressed_nbytes = raw.uncompressed_nbytes, raw.compressed_nbytes
        self.data_page, self.index_page, self.dictionary_page = raw.data_page, raw.index_page, raw.dictionary_page
        self.bloom_filter, self.bloom_filter_nbytes = raw.bloom_filter, raw.bloom_filter_nbytes


@cython.final
@cython.auto_pickle(False)
cdef class ColumnChunk:
    """A ColumnChunk of a footer: where its parts begin (0: it has none), and where its indexes are in the file (-1)."""

    cdef readonly size_t begin, end, metadata, crypto, sealed_metadata, sealed_metadata_nbytes
    cdef readonly bint file_path
    cdef readonly int64_t offset_index, offset_index_nbytes, column_index, column_index_nbytes

    cdef int _read(self, memoryview view, size_t begin) except -1:
        cdef agsf_chunk raw
        _thrift_checked(agsf_chunk_read(_data(view), _nbytes(view), begin, &raw))
        self.begin, self.end, self.metadata, self.crypto = raw.begin, raw.end, raw.metadata, raw.crypto
        self.sealed_metadata, self.sealed_metadata_nbytes = raw.sealed_metadata, raw.sealed_metadata_nbytes
        self.file_path = raw.file_path
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
        if status == AGSF_ORDINAL:
            raise FormatError("more than 32768 row groups or columns: Parquet encryption cannot number them")
        _thrift_checked(status)

    def __dealloc__(self):
        agsf_footer_clear(&self._raw)

    @property
    def end(self):
        """Where the struct ends. Encrypted footers may have padding behind it."""
        return self._raw.end

    @property
    def chunks(self):
        """How many column chunks there are."""
        return self._raw.nchunks

    def groups(self):
        """[(begin, end, first chunk, chunks)] of the row groups."""
        return [(g.begin, g.end, g.first, g.count) for g in self._raw.groups[:self._raw.ngroups]]

    def leaves(self):
        """The paths of the leaf columns, in order, as tuples of names; FormatError if the schema is no tree."""
        cdef size_t i
        cdef uint32_t children
        cdef list left = [1], names = [], paths = []  # children still to come, and names, of the open groups
        for i in range(self._raw.nschema):
            element = self._raw.schema[i]
            while left and left[-1] == 0:
                left.pop()
                if names:
                    names.pop()
            if not left:
                raise FormatError("the footer's schema is no tree: it has elements that belong to none")
            left[-1] -= 1
            name = bytes((<const char *> _data(self._view))[element.name:element.name + element.name_nbytes])
            children = element.children
            if children:
                if len(left) > 64:
                    raise FormatError("the footer's schema is nested more than 64 levels deep")
                left.append(children)
                if i > 0:
                    names.append(name.decode("utf-8", "surrogateescape"))
            elif i > 0:
                if len(paths) > AGSF_ORDINAL_MAX:
                    raise FormatError("more than 32768 columns: Parquet encryption cannot number them")
                paths.append((*names, name.decode("utf-8", "surrogateescape")))
        if any(left):
            raise FormatError("the footer's schema is no tree: a group lacks children")
        return paths

    def chunk(self, size_t number):
        cdef ColumnChunk chunk = ColumnChunk.__new__(ColumnChunk)
        if number >= self._raw.nchunks:
            raise IndexError(number)
        chunk._read(self._view, self._raw.chunks[number].begin)
        return chunk

    def encrypted(self):
        """The numbers of the chunks that have crypto_metadata."""
        cdef size_t i
        return [i for i in range(self._raw.nchunks) if self._raw.chunks[i].crypto != 0]

    def plain(self, dict opened not None):
        """The footer without what encryption put there; `opened` is {chunk number: its ColumnMetaData}."""
        cdef const uint8_t **metas = <const uint8_t **> calloc(self._raw.nchunks + 1, sizeof(uint8_t *))
        cdef size_t *sizes = <size_t *> calloc(self._raw.nchunks + 1, sizeof(size_t))
        cdef size_t room = self._raw.end + 8 * self._raw.nchunks, nbytes = 0
        cdef agsf_status status
        cdef const uint8_t *raw
        cdef uint8_t *target
        cdef bytes meta
        try:
            if metas == NULL or sizes == NULL:
                raise MemoryError
            opened = dict(opened)  # which nobody else changes meanwhile
            for number, meta in opened.items():
                if meta is None:
                    raise TypeError("a ColumnMetaData is bytes, not None")
                if not 0 <= number < <Py_ssize_t> self._raw.nchunks:
                    raise IndexError(number)
                metas[<size_t> number] = <const uint8_t *> PyBytes_AS_STRING(meta)
                sizes[<size_t> number] = <size_t> PyBytes_GET_SIZE(meta)
                room += <size_t> PyBytes_GET_SIZE(meta)
            out = bytearray()
            PyByteArray_Resize(out, <Py_ssize_t> room)
            raw, target = _data(self._view), <uint8_t *> PyByteArray_AS_STRING(out)
            with nogil:
                status = agsf_footer_plain(raw, &self._raw, metas, sizes, target, &nbytes)
            _thrift_checked(status)
            PyByteArray_Resize(out, <Py_ssize_t> nbytes)
            return out
        finally:
            free(metas)
            free(sizes)


@cython.final
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

    cdef object _failed(self, agsf_status status, unsigned module, page):
        return _module_error(status, module, self.row_group, self.label, page)

    cdef int _known(self, unsigned module) except -1:
        if module >= <unsigned> len(MODULES):
            raise ValueError(f"there is no module type {module}")
        return 0

    def seal(self, unsigned module, data):
        """One module that is not a page, framed: length, nonce, ciphertext, tag."""
        cdef memoryview view = _hold(data, False)
        cdef const uint8_t *plain = _data(view)
        cdef size_t nbytes = _nbytes(view)
        cdef agsf_status status
        self._known(module)
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (nbytes + AGSF_FRAME_NBYTES))
        cdef uint8_t *raw = <uint8_t *> PyBytes_AS_STRING(out)
        with nogil:
            status = agsf_module_seal(&self._raw, module, plain, nbytes, raw)
        if status != AGSF_OK:
            raise self._failed(status, module, None)
        return out

    def open(self, unsigned module, data):
        """The module framed at the start of `data`, and how many bytes its frame has."""
        cdef memoryview view = _hold(data, False)
        cdef agsf_status status
        cdef const uint8_t *sealed = _data(view)
        cdef size_t nbytes = 0, frame = 0
        cdef uint8_t *raw
        self._known(module)
        if _nbytes(view) < AGSF_FRAME_NBYTES:
            raise self._failed(AGSF_BAD_FORMAT, module, None)
        frame = <size_t> (sealed[0] | sealed[1] << 8 | sealed[2] << 16 | <uint32_t> sealed[3] << 24) + 4
        if frame > _nbytes(view) or frame < AGSF_FRAME_NBYTES:
            raise self._failed(AGSF_BAD_FORMAT, module, None)
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (frame - AGSF_FRAME_NBYTES))
        raw = <uint8_t *> PyBytes_AS_STRING(out)
        with nogil:
            status = agsf_module_open(&self._raw, module, sealed, frame, raw, &nbytes, &frame)
        if status != AGSF_OK:
            raise self._failed(status, module, None)
        return out, frame


def _module_error(agsf_status status, unsigned module, row_group, column, page):
    name = MODULES[module]
    where = name if page is None else f"{name} {page}"
    if column is not None:
        where += f" of column {column!r}, row group {row_group}"
    place = {"module": name, "row_group": row_group, "column": column, "page": page}
    if status == AGSF_BAD_TAG:
        return IntegrityError(
            f"{where} does not authenticate: its bytes were changed or moved, or the key or the AAD prefix is another "
            "(AES-GCM does not tell which)", **place,
        )
    if status == AGSF_CHECKSUM:
        return IntegrityError(f"{where} has a CRC that is not its bytes': they were changed", **place)
    if status == AGSF_LEVELS:
        return IntegrityError(
            f"{where} has its levels outside of its module, where no tag covers them (parquet-java's V2 layout), and "
            "allow_unauthenticated_levels is False: where values are null could have been changed", **place,
        )
    if status == AGSF_BAD_FORMAT:
        return FormatError(f"{where} is not what Parquet has there: the file is damaged, or not what it says")
    if status == AGSF_ORDINAL:
        return FormatError(
            f"column {column!r}, row group {row_group} has more than 32768 data pages, which Parquet encryption cannot "
            "number: write it with larger pages"
        )
    if status == AGSF_BAD_ARGUMENT:
        return FormatError(f"{where} is too large to be sealed: a module has less than 2**31 bytes")
    try:
        _raise_for(status, None)
    except Exception as error:
        return error


@cython.final
@cython.auto_pickle(False)
cdef class PageRun:
    """The pages of one column chunk, from one side to another: each plain (None) or sealed by its Modules.

    `mode` is COPY, SAME_SIZE, VIEW, CHECK or LIST (csrc/agsf_parquet.h says what they do); `nbytes` and `values` the chunk's
    total_compressed_size and num_values on the side it comes from. Give it bytes with `feed`, run it with `run_pages`,
    look at `stop`: DONE, or MORE_INPUT or MORE_OUTPUT, of which at least `wanted` bytes are needed, counted from what
    is `consumed` and `produced`. `dictionary` says that the first page should be one, for the error if it is unreadable;
    `label` and `row_group` name a plain chunk in errors.
    """

    cdef readonly Modules source, target
    cdef agsf_pages _raw
    cdef memoryview _in, _out
    cdef readonly size_t consumed, produced  # of what was fed
    cdef bint _running
    cdef object _label, _row_group

    def __cinit__(self, Modules source, Modules target, int mode, uint64_t nbytes, uint64_t values, *, int v2_layout=0,
                  bint short_sizes=False, bint keep_checksum=True, bint refuse_levels=False, bint table=False,
                  uint32_t page=0, bint began=False, bint dictionary=False, label=None, row_group=None):
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
        self._raw.v2_layout = v2_layout
        self._raw.short_sizes = short_sizes
        self._raw.keep_checksum = keep_checksum
        self._raw.refuse_levels = refuse_levels
        self._raw.page = page
        self._raw.began = began
        self._raw.dictionary = dictionary
        self._label, self._row_group = label, row_group
        if table:
            self._grow_table()

    def __dealloc__(self):
        if self._raw.header != NULL:
            agsf_wipe(self._raw.header, self._raw.header_nbytes)
            free(self._raw.header)
        free(self._raw.table)

    cdef int _grow_table(self) except -1:
        cdef size_t room = 64 if self._raw.table_room == 0 else self._raw.table_room * 2
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
        if self._raw.header != NULL:
            agsf_wipe(self._raw.header, self._raw.header_nbytes)
            free(self._raw.header)
        self._raw.header, self._raw.header_nbytes = bigger, room
        return 0

    def feed(self, data, bint is_all, out=None):
        """The input from where it stands, whether that is all there is, and room for output."""
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

    cdef bint _again(self) except -1:
        """After a run: whether it stopped for what the caller need not know of. Then it may go on."""
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
    def stop(self):
        return <int> self._raw.stop

    @property
    def wanted(self):
        return self._raw.wanted

    @property
    def in_total(self):
        return self._raw.in_total

    @property
    def out_total(self):
        return self._raw.out_total

    @property
    def uncompressed(self):
        """total_uncompressed_size of the chunk as it is put out."""
        return self._raw.uncompressed

    @property
    def values(self):
        return self._raw.values

    @property
    def pages(self):
        """Data pages so far, or, with a first ordinal given, the next one's."""
        return self._raw.page

    @property
    def first_data_page(self):
        """Where it was put, from the chunk's first byte; None if there is none. Needs the table."""
        return self._raw.table[0].out_offset if self._raw.table_count else None

    @property
    def outside_levels(self):
        """V2 pages so far whose levels were outside of their modules, where no tag covers them."""
        return self._raw.outside_levels

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
        """[(page type, encoding, pages)], as ColumnMetaData.encoding_stats has them."""
        cdef int kind, encoding
        return [
            (kind, encoding, self._raw.encodings[kind][encoding])
            for kind in range(AGSF_PAGE_TYPES)
            for encoding in range(AGSF_ENCODINGS)
            if self._raw.encodings[kind][encoding]
        ]

    def table(self):
        """[(in offset, in bytes, out offset, out bytes)] of the data pages, from the chunk's first byte on each side."""
        cdef agsf_page page
        return [
            (page.in_offset, page.in_nbytes, page.out_offset, page.out_nbytes)
            for page in self._raw.table[:self._raw.table_count]
        ]

    def offset_index(self, data, int64_t in_chunk, int64_t out_chunk):
        """The OffsetIndex `data` with the locations that its pages have now. Needs the table."""
        return _offset_index(data, self._raw.table, self._raw.table_count, in_chunk, out_chunk)


cdef bytes _offset_index(data, const agsf_page *table, size_t npages, int64_t in_chunk, int64_t out_chunk):
    cdef memoryview view = _hold(data, False)
    cdef size_t listed = 0, nbytes = 0
    cdef bytearray out
    _thrift_checked(agsf_offset_index_pages(_data(view), _nbytes(view), &listed))
    out = bytearray()
    PyByteArray_Resize(out, <Py_ssize_t> (_nbytes(view) + 16 * listed))
    if agsf_offset_index(_data(view), _nbytes(view), table, npages, in_chunk, out_chunk,
                         <uint8_t *> PyByteArray_AS_STRING(out), &nbytes) != AGSF_OK:
        raise FormatError("an offset index names a page that is not in its column chunk: the file is damaged")
    return PyBytes_FromStringAndSize(PyByteArray_AS_STRING(out), <Py_ssize_t> nbytes)


def offset_index(data, int64_t in_chunk, int64_t out_chunk):
    """The OffsetIndex `data` of a chunk that was moved as it is."""
    return _offset_index(data, NULL, 0, in_chunk, out_chunk)


def run_pages(list runs not None, unsigned threads):
    """Runs what was fed, chunks in parallel. Raises the first one's error; then the output of all of them is zeros."""
    cdef list held = list(runs), running = []
    cdef Py_ssize_t n = len(held), i
    cdef agsf_pages **raw = <agsf_pages **> malloc((n + 1) * sizeof(agsf_pages *))
    cdef agsf_status status
    cdef PageRun run
    cdef bint again = True
    if raw == NULL:
        raise MemoryError
    try:
        for i in range(n):
            run = held[i]
            if run is None or run._running:
                raise ValueError("each PageRun is run once at a time")
            run._running = True
            running.append(run)
            raw[i] = &run._raw
        while again:
            with nogil:
                status = agsf_pages_run(raw, n, threads)
            if status not in (AGSF_OK, AGSF_PAUSED):
                _raise_for(status, None)
            again = status == AGSF_PAUSED
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
            run._running = False
        free(raw)


def openssl_version():
    """The version text of the libcrypto in use, such as 'OpenSSL 3.5.4 30 Sep 2025'."""
    return agsf_libcrypto_version().decode()


def libcrypto_cpu():
    """libcrypto's own text for the CPU features it uses, or None."""
    cdef const char *text = agsf_libcrypto_cpu()
    return None if text == NULL else text.decode()


libcrypto_bundled = bool(AGSF_LIBCRYPTO_BUNDLED)

if agsf_library_init() != AGSF_OK:
    raise ImportError(f"libcrypto cannot be used: it lacks AES-GCM, SHA-256 or random numbers ({openssl_version()})")


def _end_idle_threads():
    """Before a fork: Python 3.12 and newer warn if the process has more than one thread, and helpers linger for seconds."""
    with nogil:
        agsf_end_idle_threads()


if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(before=_end_idle_threads)
