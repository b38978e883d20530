# Part of _core.pyx: fields of Avro records. csrc/agsf_avro.h explains them.

AVRO_NULL, AVRO_NUMBER, AVRO_BYTES, AVRO_FIXED = AGSF_AVRO_NULL, AGSF_AVRO_NUMBER, AGSF_AVRO_BYTES, AGSF_AVRO_FIXED
AVRO_ITEMS, AVRO_UNION, AVRO_RECORD = AGSF_AVRO_ITEMS, AGSF_AVRO_UNION, AGSF_AVRO_RECORD
AVRO_INT, AVRO_ENUM = AGSF_AVRO_INT, AGSF_AVRO_ENUM


def avro_pick(program, data, size_t records, size_t slots):
    """Return two int64 for each slot of each record in a block: see agsf_avro_pick. FormatError if it is malformed.

    `program` has int32. A block has no more records than bytes.
    """
    cdef agsf_status status
    cdef bytes values
    cdef int64_t *out
    cdef memoryview steps = _hold(program, False), view = _hold(data, False)
    if records > _nbytes(view):
        raise FormatError(f"a block of {_nbytes(view)} bytes has no {records} records")
    if slots > 64:
        raise ValueError(f"at most 64 slots, not {slots}")
    values = _new_bytes(<Py_ssize_t> (records * slots * 2 * sizeof(int64_t)))
    out = <int64_t *> PyBytes_AS_STRING(values)
    cdef const int32_t *numbers = <const int32_t *> _data(steps)
    cdef const uint8_t *block = _data(view)
    cdef size_t length = _nbytes(steps) // sizeof(int32_t), nbytes = _nbytes(view)
    with nogil:
        status = agsf_avro_pick(numbers, length, block, nbytes, records, slots, out)
    _check(status, "a record in Avro's encoding")
    return values
