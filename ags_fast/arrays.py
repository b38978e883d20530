"""Arrow arrays of Python values, without an import of pandas or pyarrow.compute.

`pyarrow.array` and `pyarrow.scalar` import pandas, if pandas is installed, to ask whether a list is one of its objects.
That takes longer than a small job, and 40 MiB.
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["arrow_array", "arrow_scalar", "empty_batch", "ends"]


def arrow_array(values: Sequence[Any], kind: Any) -> Any:
    """Return an Arrow array of some values, each of which may be None.

    Args:
        values: Numbers, texts, bytes, dicts or sequences of these, as `kind` has it.
        kind: The type: int64, string, binary, a struct or a list.

    Raises:
        OverflowError: A number is not in 64 bits, or the values have more than 2 GiB.
        TypeError: A value is not of the type.
    """
    import pyarrow as pa

    count = len(values)
    present = count - values.count(None)
    if not present:
        return pa.nulls(count, kind)
    if count > 1 and not pa.types.is_nested(kind) and values.count(values[0]) == count:  # most columns of an entry
        return pa.repeat(arrow_scalar(values[0], kind), count)
    valid = None if present == count else _bits(value is not None for value in values)
    if pa.types.is_struct(kind):
        children = [arrow_array([value and value[field.name] for value in values], field.type) for field in kind]
        return pa.Array.from_buffers(kind, count, [valid], count - present, children=children)
    if pa.types.is_list(kind):
        lists = [value or () for value in values]
        inner = arrow_array([one for value in lists for one in value], kind.value_type)
        return pa.Array.from_buffers(kind, count, [valid, _offsets(lists)], count - present, children=[inner])
    if pa.types.is_int64(kind):
        numbers = array("q", values if valid is None else [value or 0 for value in values])
        return pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(numbers)], count - present)
    if pa.types.is_string(kind):
        values = [value if value is None else value.encode() for value in values]
    elif not pa.types.is_binary(kind):
        raise TypeError(f"arrays of {kind} are not made here")
    parts = values if valid is None else [value or b"" for value in values]
    buffers = [valid, _offsets(parts), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(kind, count, buffers, count - present)


def arrow_scalar(value: Any, kind: Any) -> Any:
    """Return an Arrow scalar. The arguments are those of `arrow_array`."""
    return arrow_array([value], kind)[0]


def ends(numbers: Any) -> tuple[int, ...]:
    """Return the least and the largest number of an Arrow array of int64; of no number nothing.

    Not by pyarrow.compute, whose import takes longer than a lookup in a dataset.
    """
    if numbers.null_count:
        found = set(numbers.to_pylist()) - {None}
        return (min(found), max(found)) if found else ()
    begin, end = numbers.offset, numbers.offset + len(numbers)
    values = memoryview(numbers.buffers()[1])[8 * begin : 8 * end].cast("q")
    return (min(values), max(values)) if values else ()


def empty_batch(schema: Any) -> Any:
    """Return a record batch without rows."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _bits(flags: Iterable[bool]) -> Any:
    import pyarrow as pa

    text = "".join("1" if flag else "0" for flag in flags)
    return pa.py_buffer(int(text[::-1], 2).to_bytes(-(-len(text) // 8), "little"))


def _offsets(values: Sequence[Any]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(array("i", accumulate(map(len, values), initial=0)))
