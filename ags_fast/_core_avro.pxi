# Part of _core.pyx: fields of Avro records. csrc/agsf_avro.h explains them.

AVRO_NULL, AVRO_NUMBER, AVRO_BYTES, AVRO_FIXED = AGSF_AVRO_NULL, AGSF_AVRO_NUMBER, AGSF_AVRO_BYTES, AGSF_AVRO_FIXED
AVRO_ITEMS, AVRO_UNION, AVRO_RECORD = AGSF_AVRO_ITEMS, AGSF_AVRO_UNION, AGSF_AVRO_RECORD
AVRO_INT, AVRO_ENUM, AVRO_DECIMAL = AGSF_AVRO_INT, AGSF_AVRO_ENUM, AGSF_AVRO_DECIMAL


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


cdef list _column(agsf_avro_column *column, tuple field, size_t rows, size_t nbytes):
    """Make the buffers of a field, and tell the engine of them."""
    cdef bytes values, offsets = None, valid = None
    cdef size_t width
    column.kind, column.null_branch, column.size, column.bits = field[:4]
    if column.bits and (column.kind != AGSF_AVRO_FIXED or column.size != 1):
        raise ValueError("a boolean has one byte")
    if not field[4]:
        return None
    width = 8 if column.kind == AGSF_AVRO_NUMBER else column.size if column.kind == AGSF_AVRO_FIXED else 4
    values = _new_bytes(nbytes if column.kind == AGSF_AVRO_BYTES else (rows + 7) // 8 if column.bits else rows * width)
    column.values, column.room = <uint8_t *> PyBytes_AS_STRING(values), PyBytes_GET_SIZE(values)
    if column.kind == AGSF_AVRO_BYTES:
        offsets = _new_bytes((rows + 1) * sizeof(int32_t))
        column.offsets = <int32_t *> PyBytes_AS_STRING(offsets)
        column.offsets[0] = 0
    if column.null_branch >= 0:
        valid = _new_bytes((rows + 7) // 8)
        column.valid = <uint8_t *> PyBytes_AS_STRING(valid)
    return [valid, offsets, values]


def avro_columns(blocks, fields):
    """Decode blocks, each the number of its records and their bytes, to Arrow's buffers: see agsf_avro_columns.

    A field is (kind, which branch is null or -1, size, whether it is a boolean, whether its column is wanted). Returns
    for each that is wanted the bits of validity, the offsets and the values, or None where Arrow has no such buffer.

    Raises:
        FormatError: A block does not hold such records.
        ValueError: The blocks are too large for one column.
    """
    cdef agsf_status status
    cdef size_t count = len(fields), row = 0, rows = 0, room = 0, i, records, nbytes
    cdef bytearray table = bytearray(count * sizeof(agsf_avro_column))
    cdef agsf_avro_column *columns = <agsf_avro_column *> PyByteArray_AS_STRING(table)
    cdef const uint8_t *data
    cdef memoryview view
    held = [(number, _hold(body, False)) for number, body in blocks]
    for records, view in held:
        if records > _nbytes(view):
            raise FormatError(f"a block of {_nbytes(view)} bytes has no {records} records")
        rows += records
        room += _nbytes(view)
    made = [_column(&columns[i], fields[i], rows, room) for i in range(count)]
    for records, view in held:
        data, nbytes = _data(view), _nbytes(view)
        with nogil:
            status = agsf_avro_columns(data, nbytes, records, row, columns, count)
        _check(status, "a record in Avro's encoding")
        row += records
    for i in range(count):
        if made[i] is not None and columns[i].offsets != NULL:
            made[i][2] = memoryview(made[i][2])[: columns[i].offsets[rows]]
    return [buffers for buffers in made if buffers is not None]


cdef const uint8_t *_of_rows(list held, object buffer, size_t rows, size_t bits) except NULL:
    """The data of a buffer of Arrow that has as many bits for each row. It is held in place."""
    cdef memoryview view = _hold(b"" if buffer is None else buffer, False)
    if rows > (<size_t> 1 << 40) or _nbytes(view) < (rows * bits + 7) // 8:
        raise ValueError(f"a buffer of {_nbytes(view)} bytes has no {rows} rows of {bits} bits")
    held.append(view)
    return _data(view)


cdef int _array(agsf_avro_array *array, tuple given, list held) except -1:
    """Tell the engine of an array."""
    cdef size_t rows
    cdef int kind
    kind, array.optional, array.size, array.count, array.first, array.rows, buffers = given
    array.kind = <agsf_avro_kind> kind
    rows = array.first + array.rows
    if array.first > rows or array.size > 1 << 30:
        raise ValueError("an array has too many rows, or too large values")
    if buffers[0] is not None:
        array.valid = _of_rows(held, buffers[0], rows, 1)
    if kind == AGSF_AVRO_BYTES or kind == AGSF_AVRO_ITEMS:
        array.offsets = <const int32_t *> _of_rows(held, buffers[1], rows + 1 if array.rows else 0, 32)
    elif kind == AGSF_AVRO_INT and array.size not in (1, 2, 4):
        raise ValueError("an int has 1, 2 or 4 bytes")
    elif kind in (AGSF_AVRO_NUMBER, AGSF_AVRO_INT, AGSF_AVRO_FIXED, AGSF_AVRO_DECIMAL):
        width = {AGSF_AVRO_NUMBER: 8, AGSF_AVRO_DECIMAL: 16}.get(kind, array.size)
        array.values = _of_rows(held, buffers[1], rows, 8 * width or 1)
    if kind == AGSF_AVRO_BYTES:
        array.values = _of_rows(held, buffers[2], 0, 0)
        array.nbytes = _nbytes(held[-1])
    return 0


def avro_records(arrays, size_t row, size_t end, size_t limit):
    """Encode rows of Arrow's arrays as records, from `row` to `end`, until they have `limit` bytes: see agsf_avro_records.

    An array is (kind, whether it is a union with null, size, how many arrays it and those inside of it are, which row
    of the buffers is the first, how many rows there are, Arrow's buffers). Those inside of an array follow.

    Returns:
        How many rows, one at least, and their bytes.

    Raises:
        ValueError: A value is null, or a decimal too large, where its type in Avro does not have it; or the arrays are
            nested more than 32 deep, or are none.
    """
    cdef agsf_status status
    cdef size_t count = len(arrays), room = limit + 4096, rows = 0, nbytes = 0, i
    cdef bytearray table = bytearray(count * sizeof(agsf_avro_array))
    cdef agsf_avro_array *found = <agsf_avro_array *> PyByteArray_AS_STRING(table)
    cdef list held = []
    cdef bytes out
    cdef uint8_t *data
    for i in range(count):
        _array(&found[i], arrays[i], held)
    while True:
        out = _new_bytes(<Py_ssize_t> room)
        data = <uint8_t *> PyBytes_AS_STRING(out)
        with nogil:
            status = agsf_avro_records(found, count, row, end, limit, data, room, &rows, &nbytes)
        if status != AGSF_OK:
            raise ValueError("the rows cannot be written as Avro: a value is null, or a decimal has too many digits, where "
                             "the schema does not allow it, or columns are nested more than 32 deep")
        if rows or row >= end:
            return rows, memoryview(out)[:nbytes]
        room *= 2


cdef size_t _avro_number(const uint8_t *data, size_t nbytes, size_t at, int64_t *value) except? 0:
    """Read a long at `at`. Returns where it ends; 0 if the data end before."""
    cdef uint64_t found = 0
    cdef unsigned shift = 0
    while at < nbytes:
        if shift == 63 and data[at] > 1:
            raise FormatError("the plaintext is not an intact Avro file: a number has too many bytes")
        found |= <uint64_t> (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            value[0] = <int64_t> (found >> 1 ^ (0 - (found & 1)))
            return at
        shift += 7
    return 0


def avro_number(data, size_t at):
    """Return the long at `at`, and where it ends. IndexError: the data end before. FormatError: it has too many bytes."""
    cdef memoryview view = _hold(data, False)
    cdef int64_t value
    cdef size_t end = _avro_number(_data(view), _nbytes(view), at, &value)
    if not end:
        raise IndexError
    return value, end


def avro_blocks(data, bytes marker not None, size_t limit):
    """Find the whole blocks that begin before `limit`: (records, where the body begins, where it ends) of each.

    Returns:
        The blocks, the end of the last, and how many bytes the next one needs.

    Raises:
        FormatError: A length is negative, or a block does not end at the marker.
    """
    cdef memoryview view = _hold(data, False)
    cdef const uint8_t *bytes_ = _data(view)
    cdef size_t nbytes = _nbytes(view), size = <size_t> PyBytes_GET_SIZE(marker), at = 0, begin
    cdef int64_t records, body = 0
    blocks = []
    while at < nbytes and at < limit:
        begin = _avro_number(bytes_, nbytes, at, &records)
        begin = _avro_number(bytes_, nbytes, begin, &body) if begin else 0
        if not begin:
            return blocks, at, nbytes - at + 20
        if records < 0 or body < 0:
            raise FormatError("the plaintext is not an intact Avro file: a block has a negative length")
        if <uint64_t> body + size > nbytes - begin:
            return blocks, at, begin + <uint64_t> body + size - at
        at = begin + <size_t> body
        if memcmp(bytes_ + at, PyBytes_AS_STRING(marker), size) != 0:
            raise FormatError("the plaintext is not an intact Avro file: a block does not end at a sync marker")
        blocks.append((records, begin, at))
        at += size
    return blocks, at, 0
