"""Table metadata: the raw JSON of version 3, and the facade of version 2 that PyIceberg is shown.

The raw JSON is the truth. What PyIceberg writes is merged over it, so that fields which PyIceberg does not know stay:
keys, row ids, and what later writers add. Specification: Iceberg, "Table Metadata", version 3.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg import properties
from ags_fast.metadata.history import line
from ags_fast.metadata.javajson import TABLE, Raw
from ags_fast.metadata.shape import check_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from pyiceberg.io import InputFile

__all__ = ["GZIP_MAGIC", "MARK", "Raw", "dump", "facade", "merge", "parse", "read", "set_ref"]

MARK = "ags_fast.edit"  # a property of the facade only: the commit that carries it is an edit of the raw metadata
GZIP_MAGIC = b"\x1f\x8b"
MAX_NBYTES, PIECE_NBYTES = 64 << 20, 1 << 20  # of metadata, without their compression; of what is looked at at a time
# Values of JSON that metadata may have: each takes some 70 bytes of memory, and most of them 10 or more in the file.
MAX_VALUES, NBYTES_OF_VALUE = 100_000, 8
GZIP_SUFFIX = ".gz.metadata.json"
OWN_OF_TABLE = ("encryption-keys", "next-row-id")
OWN_OF_SNAPSHOT = ("key-id", "first-row-id", "added-rows")
RETENTION = ("max-ref-age-ms", "max-snapshot-age-ms", "min-snapshots-to-keep")
# What PyIceberg writes of version 2: a field of these that is gone was removed. It does not know others.
FACADE_FIELDS = frozenset(TABLE) - frozenset(OWN_OF_TABLE)
# Lists whose items have an id: an item of the base is carried over as it was.
NUMBERED = {
    "schemas": ("schema-id",),
    "partition-specs": ("spec-id",),
    "sort-orders": ("order-id",),
    "snapshots": ("snapshot-id",),
    "statistics": ("snapshot-id", "statistics-path"),
    "partition-statistics": ("snapshot-id", "statistics-path"),
}


def parse(data: bytes, location: str) -> Raw:
    """Return the metadata in a metadata file, which may be compressed. FormatError if they are malformed."""
    try:
        if data.startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                _check_size(iter(lambda: file.read(PIECE_NBYTES), b""), location)
            data = gzip.decompress(data)
        else:
            _check_size((data,), location)
        raw: Raw = json.loads(data, parse_constant=_refused)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        raise FormatError(f"{location} is not table metadata: it is not JSON, or nested too deeply") from None
    check_shape(raw, location)
    return raw


def _refused(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity are no JSON


def read(source: InputFile) -> bytes:
    """Return the bytes of a metadata file, as they are stored. FormatError if it is too long."""
    with source.open() as file:
        file.seek(0, os.SEEK_END)
        if file.tell() > MAX_NBYTES:
            raise _too_long(source.location)
        file.seek(0)
        return bytes(file.read())


def _too_long(location: str) -> FormatError:
    return FormatError(f"{location} has more than {MAX_NBYTES >> 20} MiB: expire snapshots where they are made")


def _check_size(pieces: Iterable[bytes], location: str) -> None:
    """Refuse JSON that would take much more memory than its file, which is seen before any memory is taken for it."""
    nbytes = values = 0
    for piece in pieces:
        nbytes += len(piece)
        values += piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        if nbytes > MAX_NBYTES:
            raise _too_long(location)
    if values > MAX_VALUES + nbytes // NBYTES_OF_VALUE:
        raise FormatError(f"{location} is not table metadata: it has {values} values in {nbytes} bytes")


def dump(raw: Mapping[str, Any], location: str) -> bytes:
    """Return the bytes of a metadata file, as Java writes them."""
    data = json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode()
    return gzip.compress(data) if location.endswith(GZIP_SUFFIX) else data


def facade(raw: Mapping[str, Any], *, sealed: bool = False) -> Raw:
    """Return what PyIceberg is shown of an encrypted table: version 2, without keys, row ids and most properties.

    sealed: whether the history is that of the branch main, since a seal does not cover the ``snapshot-log``.
    """
    shown = {name: value for name, value in raw.items() if name not in OWN_OF_TABLE}
    shown["format-version"] = 2
    shown["properties"] = properties.shown(raw.get("properties"), properties.TABLE)
    if "snapshots" in raw:
        shown["snapshots"] = [
            {name: value for name, value in snapshot.items() if name not in OWN_OF_SNAPSHOT}
            for snapshot in raw["snapshots"]
        ]
    if sealed:
        shown["snapshot-log"] = line(raw)
    return shown


def merge(base: Mapping[str, Any] | None, shown: Mapping[str, Any], seal: Callable[[Raw, list[Raw]], None]) -> Raw:
    """Return the raw metadata of a commit: `base`, or None for a new table, with the facade that PyIceberg writes.

    `seal` gives new snapshots their key and row ids: it is called with the raw metadata and those of their snapshots
    that are new, oldest first, and changes both. PolicyError if the facade is another table's.
    """
    if base is not None and base.get("table-uuid") != shown.get("table-uuid"):
        raise PolicyError("the commit is one of another table: the table-uuid of its metadata is another")
    old, now = ({one["snapshot-id"] for one in (raw or {}).get("snapshots") or ()} for raw in (base, shown))
    new = now - old
    raw: Raw = {**dict.fromkeys(base or ()), **shown}
    for name, value in (base or {}).items():
        if name not in FACADE_FIELDS:
            raw[name] = value  # of version 3, or of later writers
        elif name not in shown:
            del raw[name]
        elif name in NUMBERED:
            raw[name] = _carried_over(value, shown[name], NUMBERED[name])
        elif name == "refs":
            raw[name] = {ref: set_ref(ref, value.get(ref, {}), one, new) for ref, one in shown[name].items()}
    raw["format-version"] = 3
    raw["properties"] = properties.restored((base or {}).get("properties"), shown.get("properties"))
    raw.setdefault("next-row-id", 0)
    raw["snapshots"] = [dict(one) for one in raw.get("snapshots") or ()]
    fresh = [one for one in raw["snapshots"] if one["snapshot-id"] in new]
    seal(raw, sorted(fresh, key=lambda one: one.get("sequence-number") or 0))
    return raw


def set_ref(name: str, before: Mapping[str, Any], after: Mapping[str, Any], new: Collection[int]) -> Raw:
    """Return a branch or tag as a commit sets it.

    PyIceberg says nothing of its retention when a commit moves a branch, which then keeps it, and so does ``main``,
    which is rolled back but never made again. Any other that is set to a snapshot is made anew: with its old age
    `expire` would delete it, and the snapshot, though nobody asked for that. `before` is empty if there was none. `new`
    has the ids of the commit's own snapshots.
    """
    if before.get("type") != after["type"]:
        return dict(after)
    stays = name == "main" or after["snapshot-id"] in new
    return {**{key: value for key, value in before.items() if stays or key not in RETENTION}, **after}


def _carried_over(base: list[Raw] | None, shown: list[Raw], ids: tuple[str, ...]) -> list[Raw]:
    old = {tuple(one.get(name) for name in ids): one for one in base or ()}
    return [old.get(tuple(one.get(name) for name in ids), one) for one in shown]
