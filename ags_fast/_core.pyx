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
from libc.errno cimport EINTR
from libc.stdint cimport INT64_MAX, uint8_t, uint64_t
from libc.string cimport memcpy, memset

import os as _os

from ags_fast.errors import AgsError, IntegrityError, KeyLimitError

cdef extern from "Python.h":
    int PyUnicode_FSConverter(object path, PyObject **bytes_ret) except 0
    int PySys_Audit(const char *event, const char *format, ...) except -1
    Py_buffer *PyMemoryView_GET_BUFFER(object view)
    object PyMemoryView_FromMemory(char *mem, Py_ssize_t nbytes, int flags)
    Py_ssize_t PyNumber_AsSsize_t(object number, void *overflow_is_clipped) except? -1
    bint PyBuffer_IsContiguous(Py_buffer *buffer, char order)

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
    agsf_status agsf_open_file(const char *path, uint8_t *out, size_t nbytes, int *fd_ret, uint64_t *nbytes_ret,
                               int *os_error_ret)
    agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret)
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
    if status == AGSF_CRYPTO:
        raise AgsError(f"libcrypto failed ({libcrypto_version()})")
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


cdef inline uint8_t *_data(memoryview view):
    return <uint8_t *> PyMemoryView_GET_BUFFER(view).buf


cdef inline size_t _nbytes(memoryview view):
    return <size_t> PyMemoryView_GET_BUFFER(view).len


cdef int _refuse_overlap(const uint8_t *a, size_t a_nbytes, const uint8_t *b, size_t b_nbytes) except -1:
    if a_nbytes > 0 and b_nbytes > 0 and a < b + b_nbytes and b < a + a_nbytes:
        raise BufferError("input and output overlap: pass two separate buffers")
    return 0


cdef int _go(agsf_run *run, bint seal) except -1:
    """Runs until the end. Comes back in between, so that an interrupt is answered."""
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
        except BaseException:
            if not seal:  # what is open by now has passed its tags, but a failed call hands out nothing
                memset(run.plain, 0, run.plain_nbytes)
            raise


cdef object _source(agsf_run *run, object source, uint64_t offset):
    """Let the run read what is sealed in `source` from `offset`. Keep `source`, and what this returns, for as long."""
    cdef memoryview view
    cdef const uint8_t *data
    cdef uint64_t sealed, nbytes
    if isinstance(source, int):
        run.fd = source
        run.fd_offset = offset
        return None
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
        """Seals `plain` to `target` from `offset`: a writable buffer, or the number of a file descriptor.

        Returns the sealed bytes written. Raises KeyLimitError, or the file's OSError.
        """
        cdef memoryview view = _hold(plain, False), out
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        cdef uint64_t sealed = agsf_sealed_nbytes(_nbytes(view), block_size)
        run.plain = _data(view)
        run.plain_nbytes = _nbytes(view)
        if isinstance(target, int):
            run.fd = target
            run.fd_offset = offset
        else:
            out = _hold(target, True)
            if offset > _nbytes(out) or sealed > _nbytes(out) - offset:
                raise ValueError(f"the output needs {offset + sealed} bytes, it has {_nbytes(out)}")
            run.sealed = _data(out) + offset
            _refuse_overlap(run.plain, run.plain_nbytes, _data(out), offset + sealed)
        _go(&run, True)
        return sealed

    def open_run(self, bytes aad_prefix not None, size_t block_size, uint64_t first_block, source, uint64_t offset,
                 size_t nbytes, out, unsigned threads):
        """Opens `nbytes` of plaintext from `source`, sealed there from `offset`: a buffer, or a descriptor's number.

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
        _go(&run, False)

    def open_bytes(self, bytes aad_prefix not None, size_t block_size, uint64_t first_block, source, uint64_t offset,
                   Py_ssize_t nbytes, unsigned threads):
        """Like `open_run`, but returns the plaintext, as new bytes."""
        cdef agsf_run run = self._run(aad_prefix, block_size, first_block, threads)
        out = _new_bytes(nbytes)
        run.plain = <uint8_t *> PyBytes_AS_STRING(out)
        run.plain_nbytes = <size_t> nbytes
        view = _source(&run, source, offset)
        _go(&run, False)
        return out


cdef bytes _new_bytes(Py_ssize_t nbytes):
    if nbytes < 0:
        raise ValueError(f"a size cannot be negative: {nbytes}")
    out = PyBytes_FromStringAndSize(NULL, nbytes)
    agsf_expect_fill(<uint8_t *> PyBytes_AS_STRING(out), <size_t> nbytes)
    return out


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


def append(bytearray buffer not None, Py_ssize_t filled, data):
    """Copy all of `data` behind the first `filled` bytes of `buffer`, if that does not fill it up.

    Returns how many bytes that is, or -1 if nothing was done.
    """
    cdef memoryview view = _hold(data, False)
    if filled < 0 or <Py_ssize_t> _nbytes(view) >= PyByteArray_GET_SIZE(buffer) - filled:
        return -1
    memcpy(PyByteArray_AS_STRING(buffer) + filled, _data(view), _nbytes(view))
    return _nbytes(view)


def open_file(path, length, uint64_t small):
    """Open a file to read: its descriptor, its size, and b"". The size of what is no regular file is -1.

    If the first `length` bytes of a regular file, or all that it has where that is None, are no more than `small`, they
    are read, the file is closed, and instead of its descriptor there are -1 and these bytes.
    """
    # One call in place of os.open, fstat, pread and close: around a small file these cost as much as what they do.
    cdef PyObject *encoded = NULL
    cdef const char *name
    cdef agsf_status status
    cdef int fd = -1, os_error = 0
    cdef uint64_t nbytes = 0
    cdef uint64_t wanted = 0 if length is None or length > small else length
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> wanted)
    cdef uint8_t *data = <uint8_t *> PyBytes_AS_STRING(out)
    PyUnicode_FSConverter(path, &encoded)
    raw = <bytes> encoded
    Py_DECREF(raw)  # the converter's reference
    PySys_Audit("open", "OOi", <PyObject *> path, <PyObject *> None, 0)
    name = PyBytes_AS_STRING(raw)
    while True:
        with nogil:
            status = agsf_open_file(name, data, <size_t> wanted, &fd, &nbytes, &os_error)
        if status != AGSF_IO or os_error != EINTR:
            break
        PyErr_CheckSignals()
    if status == AGSF_IO:
        raise OSError(os_error, _os.strerror(os_error), path)
    if status != AGSF_OK:
        _raise_for(status, None)
    if fd < 0:
        return -1, nbytes, out
    if nbytes > <uint64_t> INT64_MAX:
        return fd, -1, b""
    if nbytes > small or length is not None:
        return fd, nbytes, b""
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> nbytes)
    data = <uint8_t *> PyBytes_AS_STRING(out)
    with nogil:
        status = agsf_read_and_close(fd, data, <size_t> nbytes, &os_error)
    if status != AGSF_OK:
        _raise_for(status, None, os_error)
    return -1, nbytes, out


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


def libcrypto_version():
    """The version text of the libcrypto in use, such as 'OpenSSL 3.5.4 30 Sep 2025'."""
    return agsf_libcrypto_version().decode()


def libcrypto_cpu():
    """libcrypto's own text for the CPU features it uses, or None."""
    cdef const char *text = agsf_libcrypto_cpu()
    return None if text == NULL else text.decode()


libcrypto_bundled = bool(AGSF_LIBCRYPTO_BUNDLED)

if agsf_library_init() != AGSF_OK:
    raise ImportError(f"libcrypto cannot be used: it lacks AES-GCM, SHA-256 or random numbers ({libcrypto_version()})")
