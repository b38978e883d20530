# cython: language_level=3, binding=True, autotestdict=False, freethreading_compatible=True
"""The binding: holds buffers, checks sizes, makes one call without the GIL, turns one status into one exception.

Formats and streams are above the binding, cryptography and threads below. csrc counts messages and keeps threads once
in a process, so there is one extension module; the half for Parquet is the text of _core_parquet.pxi
and _core_chunks.pxi.

Objects that threads share are changed in critical sections. These are nothing where there is a GIL, which is held then.
"""

cimport cython
from cpython.buffer cimport Py_buffer, PyBUF_WRITE
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.errno cimport EINTR, errno
from libc.stdint cimport INT64_MAX, INT64_MIN, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove, memset

from ags_fast._agsf cimport *

import os as _os
import warnings as _warnings
from _thread import RLock as _RLock
from collections import namedtuple as _namedtuple

from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError, KeyLimitError

cdef extern from "Python.h":
    int PyUnicode_FSConverter(object path, PyObject **bytes_ret) except 0
    int PySys_Audit(const char *event, const char *format, ...) except -1
    Py_buffer *PyMemoryView_GET_BUFFER(object view)
    object PyMemoryView_FromMemory(char *mem, Py_ssize_t nbytes, int flags)
    Py_ssize_t PyNumber_AsSsize_t(object number, void *overflow_is_clipped) except? -1
    bint PyBuffer_IsContiguous(Py_buffer *buffer, char order)

cdef extern from "unistd.h" nogil:
    int _close "close"(int fd)

NONCE_NBYTES = AGSF_NONCE_NBYTES
TAG_NBYTES = AGSF_TAG_NBYTES
OVERHEAD_NBYTES = AGSF_OVERHEAD_NBYTES
MAX_THREADS = AGSF_MAX_THREADS

# Below this, handing the GIL to another thread and waiting to have it back costs more than the work.
cdef enum: KEEP_GIL_NBYTES = 4096

cdef enum: AGS1_HEADER_NBYTES = 8


# What a status means. {} is the place: a block, a row, a module.
cdef dict _ERRORS = {
    <int> AGSF_BAD_TAG: (IntegrityError, "{} does not authenticate: its bytes were changed or moved, or the key or the "
                         "AAD prefix is another (AES-GCM does not tell which)"),
    <int> AGSF_SHORT: (IntegrityError, "the source ends inside {}: it was cut after its length was known"),
    <int> AGSF_CHECKSUM: (IntegrityError, "{} has a CRC that is not its bytes': they were changed"),
    <int> AGSF_LEVELS: (IntegrityError, "{} has its levels outside of its module, where no tag covers them "
                        "(parquet-java's V2 layout), and allow_unauthenticated_levels is False: where values are null "
                        "could have been changed"),
    <int> AGSF_BAD_FORMAT: (FormatError, "{} cannot be read: the file is damaged, or is not what it says"),
    <int> AGSF_ORDINAL: (FormatError, "{}: there are more than 32768 row groups, or more than 32768 columns, which Parquet "
                         "encryption cannot number: write larger row groups, or fewer columns"),
    <int> AGSF_BAD_ARGUMENT: (ValueError, "no AGS1 stream can have these sizes"),
    <int> AGSF_LIMIT: (KeyLimitError, "this would seal more than 2**32 messages with one key value: use a new key"),
    <int> AGSF_NO_MEMORY: (MemoryError, ""),
    <int> AGSF_NO_RANDOM: (AgsError, "the operating system gives no random bytes (getrandom, getentropy): nothing can "
                           "be sealed"),
    <int> AGSF_CRYPTO: (AgsError, f"libcrypto failed ({agsf_libcrypto_version().decode()})"),
}
# Of a Parquet module, two statuses mean something else.
cdef dict _MODULE_ERRORS = {**_ERRORS,
    <int> AGSF_ORDINAL: (FormatError, "{}: there are more than 32768 data pages, which Parquet encryption cannot "
                         "number: write larger pages"),
    <int> AGSF_BAD_ARGUMENT: (FormatError, "{} is too large to be sealed: a module has less than 2**31 bytes"),
}


cdef object _error_of(agsf_status status, str where, dict place, int os_error=0):
    """The exception for a status: the only place that makes one. `place` is what IntegrityError keeps of `where`."""
    if status == AGSF_IO:
        return OSError(os_error, _os.strerror(os_error))
    kind, text = (_MODULE_ERRORS if "module" in place else _ERRORS)[<int> status]
    return kind(text.format(where), **(place if kind is IntegrityError else {}))


cdef int _check(agsf_status status, str where, int os_error=0) except -1:
    if status != AGSF_OK:
        raise _error_of(status, where, {}, os_error)
    return 0


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
    """Never NULL, unlike an empty buffer's pointer: C forbids even adding 0 to NULL, or copying 0 bytes from it."""
    cdef uint8_t *data = <uint8_t *> PyMemoryView_GET_BUFFER(view).buf
    return data if data != NULL else _nothing


cdef inline size_t _nbytes(memoryview view):
    return <size_t> PyMemoryView_GET_BUFFER(view).len


cdef inline memoryview _input(object buffer, const uint8_t **data, size_t *nbytes):
    """Find the bytes of `buffer`, and return what keeps them beside `buffer`. Bytes are spared the cost of a view."""
    cdef memoryview view = None
    if type(buffer) is bytes:
        data[0], nbytes[0] = <const uint8_t *> PyBytes_AS_STRING(buffer), <size_t> PyBytes_GET_SIZE(buffer)
    else:
        view = _hold(buffer, False)
        data[0], nbytes[0] = _data(view), _nbytes(view)
    return view


cdef int _refuse_overlap(const uint8_t *a, size_t a_nbytes, const uint8_t *b, size_t b_nbytes) except -1:
    if a_nbytes > 0 and b_nbytes > 0 and a < b + b_nbytes and b < a + a_nbytes:
        raise BufferError("input and output overlap: pass two separate buffers")
    return 0


@cython.final
@cython.auto_pickle(False)
cdef class Descriptor:
    """The number of an open file, which stays the number of this file while a call uses it.

    The system gives a closed number to the next file that is opened. So `close` only marks the file while other
    threads read or write: no further call begins (ValueError), and the last call in flight closes the file. `close`
    never waits. A `with` block counts as a call in flight. It gives the number, which must not be kept.
    """

    # Changed in critical sections, and never across a call that could let go of one, or of the GIL.
    cdef int _fd, _calls
    cdef bint _closed

    def __cinit__(self, int fd):
        self._fd = fd

    def __dealloc__(self):
        if self._fd >= 0:  # collected without `close`, or forked while a call of the parent was in flight
            _close(self._fd)

    def __repr__(self):
        return f"<ags_fast descriptor{', closed' if self._closed else ''}>"

    @cython.critical_section
    cdef int _take(self) except -1:
        if self._closed:
            raise ValueError("I/O operation on closed file")
        self._calls += 1
        return self._fd

    cdef int _give_back(self, int calls=1) except -1:
        """End calls. Closes the file if it was to be closed after them."""
        cdef int fd = -1, os_error
        with cython.critical_section(self):
            self._calls -= calls
            if self._closed and self._calls == 0:
                fd = self._fd
                self._fd = -1
        if fd < 0:
            return 0
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
        """Let no further call begin, and close the file once no call is in flight. Returns whether it is closed now."""
        self._closed = True
        self._give_back(0)
        return self._fd < 0


cdef int _go(agsf_run *run, bint seal, object held) except -1:
    """Run to the end. `held` keeps the run's sealed side; a Descriptor is taken for this call."""
    cdef Descriptor file = None
    cdef agsf_status status
    if type(held) is Descriptor:
        file = held
        run.fd = file._take()
    try:
        while True:  # comes back to Python between two calls of the engine, so that an interrupt is answered
            if run.sealed != NULL and run.plain_nbytes < KEEP_GIL_NBYTES:
                status = agsf_seal_run(run) if seal else agsf_open_run(run)
            else:
                with nogil:
                    status = agsf_seal_run(run) if seal else agsf_open_run(run)
            if status == AGSF_OK:
                return 0
            if status != AGSF_PAUSED:
                block = run.first_block + run.bad_block
                raise _error_of(status, f"block {block}", {"block_index": block}, run.os_error)
            try:
                PyErr_CheckSignals()
                if file is not None and file._closed:  # the result of this call is no longer wanted
                    raise ValueError("I/O operation on closed file")
            except BaseException:
                if not seal:  # a failed call hands out nothing, not even blocks whose tags have passed
                    memset(run.plain, 0, run.plain_nbytes)
                raise
    finally:
        if file is not None:
            file._give_back()


cdef object _source(agsf_run *run, object source, uint64_t offset):
    """Let the run read its sealed side in `source` from `offset`. Keep `source`. Returns what `_go` takes."""
    cdef memoryview view
    cdef const uint8_t *data = NULL
    cdef size_t nbytes = 0
    cdef uint64_t sealed
    if type(source) is Descriptor:
        run.fd_offset = offset
        return source
    view = _input(source, &data, &nbytes)
    sealed = agsf_sealed_nbytes(run.plain_nbytes, run.block_nbytes)
    if offset > nbytes or sealed > nbytes - offset:
        raise ValueError(f"the run needs {offset + sealed} bytes of input, there are {nbytes}")
    run.sealed = <uint8_t *> data + offset
    _refuse_overlap(run.plain, run.plain_nbytes, run.sealed, <size_t> sealed)
    return view



@cython.final
cdef class Key:
    """An AES key of 16, 24 or 32 bytes, and runs of AGS1 blocks under this key. Threads may share a Key.

    Offsets and sizes are in bytes; `block_size` and `nbytes` count plaintext. A run is consecutive blocks from
    `first_block`; its last block may be short, and a run of 0 bytes is one empty block.
    """

    cdef agsf_key *_key

    def __cinit__(self, key):
        cdef const uint8_t *data = NULL
        cdef size_t nbytes = 0
        cdef memoryview view
        cdef agsf_status status
        try:
            view = _input(key, &data, &nbytes)
        except TypeError:
            raise TypeError(f"an AES key is 16, 24 or 32 bytes, not {type(key).__name__!r}") from None
        status = agsf_key_new(data, nbytes, &self._key)
        if status == AGSF_BAD_ARGUMENT:
            raise ValueError(f"an AES key has 16, 24 or 32 bytes, this one has {nbytes}")
        _check(status, "the key")

    def __dealloc__(self):
        agsf_key_free(self._key)

    def __repr__(self):
        return "<ags_fast key>"

    def __reduce__(self):
        raise TypeError("a key is never pickled: send a reference to it, and load it where it is used")

    @property
    def sealed(self):
        """Messages sealed in this process with this key's value, by any object."""
        return agsf_key_sealed(self._key)

    def carry(self, uint64_t sealed_before):
        """Count messages that other processes have sealed with this key's value against its limit."""
        _check(agsf_key_carry(self._key, sealed_before), "the key")

    def extract(self, salt):
        """Return 32 bytes that make keys for other uses: HKDF-Extract of RFC 5869, by SHA-256, of the key's value."""
        cdef memoryview view = _hold(salt, False)
        out = PyBytes_FromStringAndSize(NULL, AGSF_EXTRACT_NBYTES)
        _check(agsf_key_extract(self._key, _data(view), _nbytes(view), <uint8_t *> PyBytes_AS_STRING(out)), "the salt")
        return out

    cdef bytes _message(self, bint seal, nonce, data, aad):
        cdef memoryview nonce_view = _hold(nonce, False), view = _hold(data, False), aad_view = _hold(aad, False)
        cdef size_t nbytes = _nbytes(view)
        if _nbytes(nonce_view) != AGSF_NONCE_NBYTES:
            raise ValueError(f"a nonce has {AGSF_NONCE_NBYTES} bytes, this one has {_nbytes(nonce_view)}")
        if not seal and nbytes < AGSF_TAG_NBYTES:
            raise IntegrityError("the message is shorter than its tag")
        nbytes += AGSF_TAG_NBYTES if seal else -AGSF_TAG_NBYTES
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> nbytes)
        _check((agsf_seal if seal else agsf_open)(
            self._key, _data(nonce_view), _data(aad_view), _nbytes(aad_view), _data(view),
            _nbytes(view) if seal else nbytes, <uint8_t *> PyBytes_AS_STRING(out)), "message")
        return out

    def seal(self, nonce, data, aad):
        """Seal one message under a nonce of 12 bytes, which must never be used twice. Returns ciphertext and tag."""
        return self._message(True, nonce, data, aad)

    def open(self, nonce, data, aad):
        """Open a message that `seal` returned."""
        return self._message(False, nonce, data, aad)

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
        """Seal `plain` to `target` from `offset`: a writable buffer or a Descriptor. Returns the bytes written.

        Raises KeyLimitError, or the file's OSError.
        """
        cdef memoryview view = _hold(plain, False), out
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        cdef uint64_t sealed = agsf_sealed_nbytes(_nbytes(view), block_size)
        run.plain = _data(view)
        run.plain_nbytes = _nbytes(view)
        if type(target) is Descriptor:
            run.fd_offset = offset
        else:
            out = _hold(target, True)
            if offset > _nbytes(out) or sealed > _nbytes(out) - offset:
                raise ValueError(f"the output needs {offset + sealed} bytes, it has {_nbytes(out)}")
            run.sealed = _data(out) + offset
            _refuse_overlap(run.plain, run.plain_nbytes, _data(out), offset + sealed)
        _go(&run, True, target)
        return sealed

    def open_run(self, bytes aad_prefix not None, size_t block_size, uint64_t first_block, source, uint64_t offset,
                 size_t nbytes, out, unsigned threads):
        """Open `nbytes` of plaintext, sealed in `source` (a buffer or a Descriptor) from `offset`.

        The plaintext goes to the start of the writable buffer `out`. Raises IntegrityError, or the file's OSError; then
        all `nbytes` of `out` are zero.
        """
        cdef memoryview out_view = _hold(out, True)
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        if nbytes > _nbytes(out_view):
            raise ValueError(f"the output needs {nbytes} bytes, it has {_nbytes(out_view)}")
        run.plain = _data(out_view)
        run.plain_nbytes = nbytes
        held = _source(&run, source, offset)
        _go(&run, False, held)

    def open_bytes(self, bytes aad_prefix not None, size_t block_size, uint64_t first_block, source, uint64_t offset,
                   Py_ssize_t nbytes, unsigned threads):
        """Like `open_run`, but returns the plaintext, as new bytes."""
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        out = _new_bytes(nbytes)
        run.plain = <uint8_t *> PyBytes_AS_STRING(out)
        run.plain_nbytes = <size_t> nbytes
        held = _source(&run, source, offset)
        _go(&run, False, held)
        return out

    def seal_bytes(self, bytes aad_prefix not None, size_t block_size, bytes header not None, bytes plain not None):
        """Return `header` followed by all of a stream's blocks, sealed by this thread."""
        cdef agsf_run run = self._run(aad_prefix, block_size, 0, 1)
        cdef Py_ssize_t begin = PyBytes_GET_SIZE(header)
        cdef uint64_t sealed = agsf_sealed_nbytes(<uint64_t> PyBytes_GET_SIZE(plain), block_size)
        if sealed == 0:
            raise _error_of(AGSF_BAD_ARGUMENT, "stream", {})
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
    """How many rows an Arrow array with these int32 offsets has. An empty array may have no offsets."""
    if _nbytes(offsets) % sizeof(int32_t):
        raise ValueError(f"offsets are int32: these have {_nbytes(offsets)} bytes")
    return _nbytes(offsets) // sizeof(int32_t) - 1 if _nbytes(offsets) else 0


cdef tuple _row_span(const uint8_t *offsets, size_t row):
    cdef int32_t span[2]
    memcpy(span, offsets + row * sizeof(int32_t), sizeof(span))
    return span[0], span[1]


cdef object _impossible_row(const agsf_rewrap *run):
    name, key = _row_span(run.name_offsets, run.bad_row), _row_span(run.offsets, run.bad_row)
    return ValueError(
        f"row {run.bad_row} is impossible: its name goes from {name[0]} to {name[1]} of {run.names_nbytes} bytes, its "
        f"wrapped key, of {AGSF_OVERHEAD_NBYTES + 1} to {AGSF_OVERHEAD_NBYTES + AGSF_DEK_MAX_NBYTES} bytes, from "
        f"{key[0]} to {key[1]} of {run.in_nbytes} bytes, and {run.out_nbytes} of output"
    )


def rewrap(Key old not None, Key new not None, prefix, name_offsets, names, offsets, wrapped, out, *, int threads=1):
    """Wrap a column of data keys under `new` that are wrapped under `old`: same keys and names, new nonces.

    Row i of `wrapped` is a nonce, a key of 1 to 64 bytes sealed under `old`, and a tag. The row authenticates `prefix`
    followed by row i of `names`, and goes to the same place in `out`; bytes of `out` outside of the rows stay. Both
    columns are buffers of Arrow binary arrays: N + 1 offsets (native int32, the first need not be 0) and data. Part of
    the offsets makes a slice.

    Raises:
        ValueError: A row is impossible; the message names the first. Nothing was done.
        KeyLimitError: `new` may not seal N more messages. Nothing was done.
        IntegrityError: A tag is wrong: `block_index` is the lowest such row. All rows in `out` are zeros.
        BufferError: `out` overlaps an input. A failure would leave neither the old keys nor the new ones.
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
    if status == AGSF_BAD_ARGUMENT:
        raise _impossible_row(&run)
    if status != AGSF_OK:
        raise _error_of(status, f"row {run.bad_row}: a wrapped key", {"block_index": run.bad_row})


def new_bytes(Py_ssize_t nbytes):
    """Return an unwritten bytes object and a writable view of that object: a result without a copy.

    Write all of the view before anybody else sees the bytes, and keep the bytes as long as the view.
    """
    out = _new_bytes(nbytes)
    return out, PyMemoryView_FromMemory(PyBytes_AS_STRING(out), nbytes, PyBUF_WRITE)


def grow(bytearray buffer not None, Py_ssize_t nbytes):
    """Make a buffer longer. The new bytes are arbitrary: write them before they are read."""
    # Python would make zeros and copy them, and so touch that memory twice before it is used.
    if nbytes > PyByteArray_GET_SIZE(buffer):
        PyByteArray_Resize(buffer, nbytes)


@cython.final
@cython.auto_pickle(False)
cdef class Pending:
    """Plaintext that a writer has taken and not yet sealed, and the turn to work on it. One thread has the turn.

    A `with` block waits for the turn. Inside of its own block a thread cannot get the turn again (RuntimeError): only
    a signal handler would ask. `add` needs no turn, because it ends before another thread can take the turn.
    """

    cdef public bytearray buffer  # its first `filled` bytes are pending
    cdef public Py_ssize_t filled
    cdef readonly bint busy  # a thread has the turn
    cdef bint _over
    cdef object _turn

    def __cinit__(self):
        self.buffer = bytearray()
        self._turn = _RLock()  # not a Lock, for which a handler would wait for ever

    def add(self, data):
        """Append all of `data`, unless that would fill the buffer or a thread has the turn.

        Returns the size of `data` in bytes, or -1 if nothing was done.
        """
        return self._add(_hold(data, False))

    @cython.critical_section
    cdef Py_ssize_t _add(self, memoryview view) except -2:
        if self.busy or self._over or <Py_ssize_t> _nbytes(view) >= PyByteArray_GET_SIZE(self.buffer) - self.filled:
            return -1
        memcpy(PyByteArray_AS_STRING(self.buffer) + self.filled, _data(view), _nbytes(view))
        self.filled += _nbytes(view)
        return <Py_ssize_t> _nbytes(view)

    @cython.critical_section
    cdef int _begin(self) except -1:
        """Have the turn. From here on no `add` is under way."""
        self.busy = True
        return 0

    def end(self):
        """Make every further `add` return -1."""
        self._over = True

    def try_turn(self):
        """Take the turn if it is free, and return whether it was. Give it back with `__exit__`."""
        if self.busy or not self._turn.acquire(False):
            return False
        self._begin()
        return True

    def __enter__(self):
        self._turn.acquire()
        if self.busy:
            self._turn.release()
            raise RuntimeError("reentrant call: a signal handler cannot write or close what it has interrupted")
        self._begin()

    def __exit__(self, *error):
        self.busy = False
        self._turn.release()


cdef bytes _path(object path):
    """A path as the system takes it."""
    cdef PyObject *encoded = NULL
    PyUnicode_FSConverter(path, &encoded)
    raw = <bytes> encoded
    Py_DECREF(raw)  # the converter's reference
    return raw


def open_below(root, path, int flags, unsigned mode):
    """Open a path below the folder `root` ("." is that folder), and return its descriptor.

    OSError with EXDEV: a link leads out of `root`, or only a walk step by step can tell whether one does.
    """
    cdef bytes raw_root = _path(root), raw = _path(path)
    cdef const char *at = PyBytes_AS_STRING(raw_root)
    cdef const char *name = PyBytes_AS_STRING(raw)
    cdef int fd = -1, os_error = EINTR
    PySys_Audit("open", "OOi", <PyObject *> path, <PyObject *> None, flags)
    while fd < 0:
        if os_error != EINTR:
            raise OSError(os_error, _os.strerror(os_error), f"{_os.fsdecode(root)}/{_os.fsdecode(path)}")
        PyErr_CheckSignals()
        with nogil:
            fd = agsf_open_below(at, name, flags, mode, &os_error)
    return fd


def open_file(path, length, uint64_t small, root=None):
    """Open a file for reading, below the folder `root` unless `root` is None. Returns (Descriptor, size in bytes, b"").

    The size is -1 if the file is not a regular one. If `length` bytes (None: all bytes) of a regular file are at most
    `small`, they are read and the file is closed: returns (None, size, the bytes). OSError with EXDEV: as `open_below`.
    """
    # One call in place of os.open, fstat, pread and close: for a small file, Python's part costs as much as theirs.
    cdef bytes raw = _path(path), raw_root = None if root is None else _path(root)
    cdef const char *name = PyBytes_AS_STRING(raw)
    cdef const char *at = NULL if root is None else PyBytes_AS_STRING(raw_root)
    cdef agsf_status status = AGSF_IO
    cdef int fd = -1, os_error = EINTR
    cdef uint64_t nbytes = 0, wanted = 0 if length is None or length > small else length
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> wanted)
    cdef uint8_t *data = <uint8_t *> PyBytes_AS_STRING(out)
    PySys_Audit("open", "OOi", <PyObject *> path, <PyObject *> None, 0)
    while status == AGSF_IO:
        if os_error != EINTR:
            raise OSError(os_error, _os.strerror(os_error), path)
        PyErr_CheckSignals()
        with nogil:
            status = agsf_open_file(at, name, data, <size_t> wanted, &fd, &nbytes, &os_error)
    _check(status, "the file")
    if fd < 0:
        return None, nbytes, out
    if nbytes > small or length is not None:
        return Descriptor(fd), -1 if nbytes > <uint64_t> INT64_MAX else nbytes, b""
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> nbytes)
    data = <uint8_t *> PyBytes_AS_STRING(out)
    with nogil:
        status = agsf_read_and_close(fd, data, <size_t> nbytes, &os_error)
    _check(status, "the file", os_error)
    return None, nbytes, out


def read_whole(root, path, uint64_t nbytes, mtime_ns):
    """Read all of a regular file of `nbytes`, below the folder `root` unless `root` is None, in one call.

    Returns None if anything is unusual: then read the file step by step. With mtime_ns, the file must have been
    modified last at that time (nanoseconds since the epoch), also after it was read.
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


def write_whole(root, folder, name, bytes data not None, bint sync, mode=None, mtime_ns=None):
    """Create a file in `folder`, below the folder `root` ("." is that folder), in one call. The file must not exist.

    The file has no name until it is complete and, with `sync`, on the disk: a process that dies leaves nothing. By then
    it has the permission bits `mode`, unless that is None, and the time of its last change `mtime_ns`, in nanoseconds
    since the epoch, unless that is None. Returns False if anything is unusual: then nothing was done, and the caller
    creates the file step by step.
    """
    cdef bytes raw_root = _path(root), raw_folder = _path(folder), raw_name = _path(name)
    cdef const char *top = PyBytes_AS_STRING(raw_root)
    cdef const char *at = PyBytes_AS_STRING(raw_folder)
    cdef const char *to = PyBytes_AS_STRING(raw_name)
    cdef const uint8_t *begin = <const uint8_t *> PyBytes_AS_STRING(data)
    cdef size_t nbytes = <size_t> PyBytes_GET_SIZE(data)
    cdef int bits = -1 if mode is None else mode & 0o777
    cdef int64_t changed = 0 if mtime_ns is None else mtime_ns
    cdef const int64_t *time = NULL if mtime_ns is None else &changed
    cdef bint whole
    PySys_Audit("open", "OOi", <PyObject *> name, <PyObject *> None, 1)
    with nogil:
        whole = agsf_write_whole(top, at, to, begin, nbytes, bits, time, sync)
    return whole


@cython.final
@cython.auto_pickle(False)
cdef class Span:
    """Opened bytes of a plaintext, and the offset where they begin."""

    cdef readonly Py_ssize_t offset
    cdef readonly bytes data

    def __cinit__(self, Py_ssize_t offset, bytes data not None):
        self.offset = offset
        self.data = data

    cpdef bytes get(self, offset, size):
        """Return the `size` bytes from `offset`, or None if not all of them are here."""
        cdef Py_ssize_t begin = PyNumber_AsSsize_t(offset, NULL), nbytes = PyNumber_AsSsize_t(size, NULL)
        cdef Py_ssize_t held = PyBytes_GET_SIZE(self.data)
        if begin < 0 or nbytes < 0 or begin < self.offset or begin - self.offset > held:
            return None
        if nbytes > held - (begin - self.offset):
            return None
        if nbytes == held:
            return self.data
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self.data) + (begin - self.offset), nbytes)

    def copy_to(self, offset, memoryview out not None):
        """Write the bytes from `offset` to the start of `out`, as many as are here. Returns how many: 0 if none are."""
        cdef Py_ssize_t begin = PyNumber_AsSsize_t(offset, NULL), held = PyBytes_GET_SIZE(self.data), nbytes
        if begin < 0 or begin < self.offset or begin - self.offset >= held:
            return 0
        begin -= self.offset
        nbytes = min(held - begin, <Py_ssize_t> _nbytes(out))
        memcpy(_data(out), PyBytes_AS_STRING(self.data) + begin, <size_t> nbytes)
        return nbytes


NOTHING = _NOTHING = Span(-1, b"")  # no opened bytes: every read misses them


@cython.final
@cython.no_gc_clear  # what a helper thread uses must outlive the wait for it
@cython.auto_pickle(False)
cdef class _Run:
    """A run that a helper thread opens or seals. Of a Descriptor, it counts as a call in flight."""

    cdef agsf_ahead *_run  # NULL: not begun, or finished
    cdef Key _key
    cdef bytes _prefix, _plain
    cdef object _file, _held  # its sealed side
    cdef Py_ssize_t _offset  # of the plaintext in the stream

    cdef int begin(self, Key key, bytes prefix, bytes plain, agsf_run *run, object file, bint seal) except -1:
        cdef agsf_status status
        run.plain, run.plain_nbytes = <uint8_t *> PyBytes_AS_STRING(plain), <size_t> PyBytes_GET_SIZE(plain)
        self._held = file if seal else _source(run, file, run.fd_offset)
        self._key, self._prefix, self._plain, self._file = key, prefix, plain, file
        self._offset = <Py_ssize_t> (run.first_block * run.block_nbytes)
        if type(file) is Descriptor:
            run.fd = (<Descriptor> file)._take()
        status = agsf_seal_ahead(run, &self._run) if seal else agsf_open_ahead(run, &self._run)
        if status != AGSF_OK and type(file) is Descriptor:
            (<Descriptor> file)._give_back()
        return _check(status, "the run")

    @cython.critical_section
    cdef bint done(self) except -1:
        return self._run == NULL or agsf_ahead_done(self._run)

    @cython.critical_section
    cdef agsf_ahead *_taken(self):
        """The run, for one of the threads that finish it, and NULL for the others."""
        cdef agsf_ahead *run = self._run
        self._run = NULL
        return run

    cdef agsf_ahead_end finish(self, bint wanted, uint8_t *into) except *:
        cdef agsf_ahead *run = self._taken()
        cdef agsf_ahead_end end
        if run == NULL:
            return AGSF_AHEAD_FAILED
        with nogil:
            end = agsf_ahead_finish(run, wanted, into)
        if type(self._file) is Descriptor:
            (<Descriptor> self._file)._give_back()
        return end

    def __dealloc__(self):
        self.finish(False, NULL)


@cython.final
@cython.auto_pickle(False)
cdef class Ahead:
    """What is opened of a stream before it is wanted, because a cursor moves steadily.

    Where there are helper threads for it (`helped`), they open runs of blocks, one behind the other. A run that fails is
    forgotten: whoever comes to its blocks opens them again, and gets the error.
    """

    cdef Key _key
    cdef bytes _prefix
    cdef size_t _block_size
    cdef Py_ssize_t _length, _count, _most, _unit
    cdef unsigned _threads
    cdef bint _helped
    cdef list _runs
    cdef readonly Py_ssize_t end  # the block where it ends

    def __cinit__(self, Key key not None, bytes aad_prefix not None, size_t block_size, Py_ssize_t length,
                  unsigned threads, Py_ssize_t most, bint helped):
        """most: blocks that are opened at once, by all threads. Helpers are ahead by up to twice as many."""
        self._key, self._prefix, self._block_size, self._length = key, aad_prefix, block_size, length
        self._threads, self._helped, self._runs = threads, helped, []
        self._unit, self._most, self._count = most // threads, 2 * most if helped else most, 1

    @cython.critical_section
    def plan(self, Py_ssize_t lo, Py_ssize_t hi, bint in_part):
        """Return the block to stop at instead of `hi`: farther each time that a cursor goes on where it stopped."""
        cdef Py_ssize_t blocks = -(-self._length // <Py_ssize_t> self._block_size)
        self._count = min(2 * self._count, self._most) if lo == self.end else 1
        if in_part:
            hi = min(max(hi, lo + (min(self._count, self._unit) if self._helped else self._count)), blocks)
        self.end = hi
        return hi

    cdef int _start(self, object reader, Py_ssize_t wanted) except -1:
        """Let helpers begin further runs for a cursor that reads `wanted` bytes at a time."""
        if not self._helped or self._count <= self._unit:
            return 0
        if 2 * wanted >= self._most * <Py_ssize_t> self._block_size:  # a read that gives all threads work by itself
            return 0
        return self._open_from(reader._file.fetch(0, 0)[0])

    @cython.critical_section
    cdef int _open_from(self, object source) except -1:
        cdef Py_ssize_t first, begin, nbytes
        cdef agsf_run run
        cdef _Run begun
        while (len(self._runs) + 1) * self._unit <= self._count:
            first, begin = self.end, self.end * <Py_ssize_t> self._block_size
            if begin >= self._length:
                break
            nbytes = min(self._length - begin, self._unit * <Py_ssize_t> self._block_size)
            run = self._key._run(self._prefix, self._block_size, first, self._threads)
            run.fd_offset = AGS1_HEADER_NBYTES + first * (self._block_size + AGSF_OVERHEAD_NBYTES)
            begun = _Run()
            begun.begin(self._key, self._prefix, _new_bytes(nbytes), &run, source, False)
            self._runs.append(begun)
            self.end = first + self._unit
        return 0

    @cython.critical_section
    cdef _Run take(self, Py_ssize_t offset):
        """The first run, if it begins at `offset`; otherwise the cursor is elsewhere, and all are dropped."""
        cdef list runs = self._runs
        if runs and (<_Run> runs[0])._offset == offset:
            self._count = min(2 * self._count, self._most)
            return runs.pop(0)
        self._runs = []
        return None

    @cython.critical_section
    def drop(self):
        """Wait for the threads that open something, and release all of it."""
        self._runs = []


@cython.final
@cython.auto_pickle(False)
cdef class Behind:
    """Blocks of a writer that helper threads, up to `helpers`, seal to its file while it takes the next ones.

    What is up to `most` bytes is for a helper, if one has no work yet; anything else the caller seals, by `threads`.
    """

    cdef Key _key
    cdef bytes _prefix
    cdef size_t _block_size
    cdef Py_ssize_t _most, _helpers
    cdef unsigned _threads
    cdef list _runs  # each with the other arguments of the `Key.seal_run` that would do the same

    def __cinit__(self, Key key not None, bytes aad_prefix not None, size_t block_size, Py_ssize_t most,
                  unsigned threads, Py_ssize_t helpers):
        self._key, self._prefix, self._block_size, self._most = key, aad_prefix, block_size, most
        self._threads, self._helpers, self._runs = threads, helpers, []

    def seal(self, uint64_t first_block, plain, Descriptor file not None, uint64_t offset):
        """Seal `plain` to the file from `offset`. Raises what `Key.seal_run` raises, also for blocks of earlier calls."""
        cdef Py_ssize_t nbytes = memoryview(plain).nbytes
        cdef agsf_run run
        cdef _Run begun
        self._end(False)
        if not 0 < nbytes <= self._most or len(self._runs) >= self._helpers:
            self._key.seal_run(self._prefix, self._block_size, first_block, plain, file, offset, self._threads)
            return
        run = self._key._run(self._prefix, self._block_size, first_block, self._threads)
        run.fd_offset = offset
        begun = _Run()
        begun.begin(self._key, self._prefix, bytes(plain), &run, file, True)
        self._runs.append((begun, first_block, offset))

    cdef int _end(self, bint wait) except -1:
        """End what is done or, with `wait`, everything."""
        cdef _Run run
        cdef list runs = self._runs
        while runs and (wait or (<_Run> (<tuple> runs[0])[0]).done()):
            run, first_block, offset = runs.pop(0)
            if run.finish(True, NULL) == AGSF_AHEAD_FAILED:
                self._key.seal_run(self._prefix, self._block_size, first_block, run._plain, run._file, offset,
                                   self._threads)
        return 0

    def finish(self):
        """Wait until everything is in the file. Raises what `Key.seal_run` raises."""
        self._end(True)

    def drop(self):
        """Wait for the threads that seal something, and forget the rest."""
        self._runs = []


def open_ahead(self, Py_ssize_t wanted):
    """Let helpers open what a steady cursor that reads `wanted` bytes at a time wants next. Their errors wait for it."""
    # AgsReader's method, as read_at.
    try:
        (<Ahead?> self._later)._start(self, wanted)
    except (ValueError, MemoryError):  # another thread has closed the reader, or there is no room
        pass
    if self._over:
        self._let_go()


def go_on(self, offset, memoryview out):
    """Take up what was opened ahead, if that begins at `offset`, and let more be opened.

    Returns how many bytes were opened right to `out`: 0 if all are hot, -1 if there are none.
    """
    # AgsReader's method, as read_at.
    cdef Ahead ahead = <Ahead?> self._later
    cdef _Run run = ahead.take(PyNumber_AsSsize_t(offset, NULL))
    cdef agsf_ahead_end end
    cdef Py_ssize_t room = 0 if out is None else <Py_ssize_t> _nbytes(out)
    if run is None:
        return -1
    self._hot = _NOTHING  # release the old bytes before there are new ones
    open_ahead(self, room)
    end = run.finish(True, _data(out) if room >= PyBytes_GET_SIZE(run._plain) else NULL)
    if end == AGSF_AHEAD_INTO:
        return PyBytes_GET_SIZE(run._plain)
    if end == AGSF_AHEAD_FAILED:
        ahead.drop()
        return -1
    self._hot = Span(run._offset, run._plain)
    if self._over:
        self._let_go()
    return 0


def read_at(self, offset, size):
    """Return `size` bytes of plaintext from `offset`; like a slice, the result ends where the plaintext ends."""
    # AgsReader's method. In Python, the call alone would cost more than reading a hundred cached bytes.
    data = (<Span?> self._hot).get(offset, size)
    return self._read(offset, size, False) if data is None else data


def readline(self, size=-1, /):
    """Read a line, or with `size` at most that many bytes of it. Its end is the byte "\\n", which is part of it."""
    # Cursor's method. IOBase's reads byte by byte.
    if size is None or size == -1:
        return _line_of(self)
    return self._readline(size)


cdef object _line_of(file):
    cdef Span lines = <Span?> file._lines
    cdef Py_ssize_t held = PyBytes_GET_SIZE(lines.data), begin, nbytes
    cdef const char *line
    cdef const char *end
    if held > 0:
        begin = <Py_ssize_t> file._position - lines.offset
        if 0 <= begin < held:
            line = PyBytes_AS_STRING(lines.data) + begin
            end = <const char *> memchr(line, 10, <size_t> (held - begin))
            if end != NULL:
                nbytes = end - line + 1
                file._position = lines.offset + begin + nbytes
                return PyBytes_FromStringAndSize(line, nbytes)
    return file._readline(-1)


@cython.final
@cython.auto_pickle(False)
cdef class Lines:
    """An iterator over the lines of a Cursor from where its cursor is. IOBase's own takes a third longer."""

    cdef object _file

    def __cinit__(self, file):
        self._file = file

    def __iter__(self):
        return self

    def __next__(self):
        line = _line_of(self._file)
        if not line:
            raise StopIteration
        return line


include "_core_parquet.pxi"
include "_core_chunks.pxi"
include "_core_avro.pxi"


def openssl_version():
    """Return the version text of the libcrypto in use, such as 'OpenSSL 3.5.4 30 Sep 2025'."""
    return agsf_libcrypto_version().decode()


def libcrypto_cpu():
    """Return libcrypto's own text for the CPU features it uses, or None."""
    cdef const char *text = agsf_libcrypto_cpu()
    return None if text == NULL else text.decode()


libcrypto_bundled = bool(AGSF_LIBCRYPTO_BUNDLED)

Crypto = _namedtuple("Crypto", "library version kernel fips", module=__name__)
Crypto.__doc__ = "What does the cryptography in this process. See `crypto`."


def crypto():
    """Return what does the cryptography in this process.

    `library` and `version` are libcrypto's, such as "OpenSSL" and "3.5.4". `kernel` does AES-GCM: "openssl" for
    libcrypto's own code, or "vaes128", "vaes256" or "vaes512" for the code of this package, by the width of its vectors in
    bits; short messages only, where libcrypto is faster with long ones. `fips` is whether libcrypto is configured for
    FIPS algorithms only. The environment variable AGS_FAST_AES chooses the kernel: auto, openssl or vaes.
    """
    library, version = openssl_version().split()[:2]
    return Crypto(library, version, agsf_aes_kernel().decode(), bool(agsf_fips()))


cdef agsf_status _began = agsf_library_init()
if _began == AGSF_BAD_ARGUMENT:
    raise ImportError("the environment variable AGS_FAST_AES must be auto, openssl or vaes")
if _began != AGSF_OK:
    raise ImportError(f"libcrypto cannot be used: it lacks AES-GCM, SHA-256 or random numbers ({openssl_version()})")
if agsf_aes_complaint() != NULL:
    _warnings.warn_explicit(agsf_aes_complaint().decode(), RuntimeWarning, __file__, 0, __name__)


def _end_idle_threads():
    """Run before a fork: Python 3.12 and newer warn of a process with several threads, and helpers linger."""
    with nogil:
        agsf_end_idle_threads()


if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(before=_end_idle_threads)
