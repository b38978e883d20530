"""Metadata, lists and manifests in which something has another type: a typed error, never one of Python's."""

from __future__ import annotations

import copy
import gzip
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import fastavro
from iceberg_tables import new_table, rows, sql_catalog

from ags_fast.errors import AgsError, FormatError
from ags_fast.iceberg import delete, files, manifests, open_table, verify
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.expiry import expired
from ags_fast.iceberg.metadata import parse
from ags_fast.iceberg.walk import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ODD: list[Any] = ["text", 7, -1, 1 << 70, 1.5, True, [], {}, [[]], [7], ["a"], [{}], {"a": 1}, {"a": {}}]


def full(catalog: Any, **properties: str) -> Any:
    """A table whose metadata have a value in each field."""
    table = new_table(catalog, **properties)
    table.append(rows(0, 5))
    table.append(rows(5, 10))
    delete(table, "id = 3")
    first = table.metadata.snapshots[0].snapshot_id
    with table.manage_snapshots() as manage:
        manage.create_tag(first, "one").create_branch(first, "dev", max_ref_age_ms=10**12)
    one = {"snapshot-id": first, "statistics-path": f"{table.location()}/s", "file-size-in-bytes": 1}
    more = {"file-footer-size-in-bytes": 1, "blob-metadata": []}
    edit(table, lambda raw: {**raw, "statistics": [{**one, **more}], "partition-statistics": [one]})
    return table


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values of parsed JSON; of a list those of its last item."""
    if at:
        yield at
    pairs = value.items() if isinstance(value, dict) else list(enumerate(value))[-1:] if isinstance(value, list) else ()
    for name, one in pairs:
        yield from places(one, (*at, name))


def replaced(raw: Any, at: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(raw)
    there = made
    for name in at[:-1]:
        there = there[name]
    there[at[-1]] = value
    return made


def tried(raw: Any, location: str, kms: Any) -> Exception | None:
    """The error of reading such metadata, if there is one."""
    path = location.removeprefix("file://")
    with open(path, "w") as file:
        json.dump(raw, file)
    try:
        table = open_table(location, kms=kms, **{"encryption.plaintext-files": "allow"})
        table.scan().to_arrow()
        list(files(table))
        expired(raw_metadata(table))
        verify(table)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("odd", [ODD[:2], *(pytest.param(ODD[i::3], marks=pytest.mark.more) for i in (2, 3, 4))])
def test_each_field_of_metadata(tmp_path: Path, kms: dict[str, str], odd: list[Any]) -> None:
    table = full(sql_catalog(tmp_path, kms))
    raw = json.loads(json.dumps(raw_metadata(table)))
    location = f"file://{tmp_path}/wh/odd.metadata.json"
    assert tried(raw, location, kms) is None or isinstance(tried(raw, location, kms), AgsError)
    wrong, refused = {}, set()
    for at in places(raw):
        for value in odd:
            error = tried(replaced(raw, at, value), location, kms)
            own = isinstance(error, (AgsError, OSError)) or type(error).__module__ == "pyiceberg.exceptions"
            if error is not None and not own:
                wrong[at, str(value)[:20]] = f"{type(error).__name__}: {str(error)[:100]}"
            elif isinstance(error, FormatError):
                refused.add(at)
    assert wrong == {}
    assert refused >= {at for at in places(raw) if len(at) == 1 and not isinstance(raw[at[0]], str)}


KINDS = ("dense", "nested", "large")
# Programs for a process of their own: each prints by how many KiB its memory has grown.
PROGRAM = """
import gzip, resource, sys
from pathlib import Path
from pyiceberg.io.pyarrow import PyArrowFileIO
from ags_fast.errors import FormatError
from ags_fast.iceberg import metadata
def bomb():
    return gzip.compress(b" " * (16 << 20), 1) * 192  # 3 GiB
def dense():
    one = gzip.compress(b"[]," * (1 << 20), 1)
    return gzip.compress(b'{"format-version":3,"a":[') + one * 20 + gzip.compress(b"[]]}")
def nested():
    return b'{"a":[' * 1_000_000
def large():
    path = Path(sys.argv[2])
    with path.open("wb") as file:
        file.truncate(3 << 30)
    return metadata.read(PyArrowFileIO().new_input(str(path)))
made = globals()[sys.argv[1]]
data = b"" if made is large else made()
Path("/proc/self/clear_refs").write_text("5")  # forget the largest size until now
def peak():
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1])
before = peak()
try:
    metadata.parse(data, "x") if data else made()
except FormatError as error:
    print(peak() - before, error)
"""


@pytest.mark.parametrize("kind", ["bomb", *(pytest.param(one, marks=pytest.mark.more) for one in KINDS)])
def test_metadata_that_take_much_memory(tmp_path: Path, kind: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert run.stdout, "not refused"
    grown, message = run.stdout.split(" ", 1)
    assert int(grown) < 64 << 10
    assert "x " in message


def test_metadata_of_many_small_values_are_read() -> None:
    """The densest that are right: many schemas of many columns, and a long log."""
    fields = [{"id": i, "name": f"c{i}", "required": False, "type": "int"} for i in range(1000)]
    raw = {"format-version": 2, "location": "x", "last-updated-ms": 1, "last-column-id": 1}
    raw["schemas"] = [{"type": "struct", "schema-id": i, "fields": fields} for i in range(100)]
    data = json.dumps(raw, separators=(",", ":")).encode()
    assert parse(data, "x") == parse(gzip.compress(data), "x") == raw


# ------------------------------------------------------------------------------------------------- lists and manifests

# Types of Avro, and a value of each.
TYPES: list[tuple[Any, Any]] = [
    ("null", None),
    ("boolean", True),
    ("long", -(1 << 62)),
    ("double", 1e300),
    ("string", "text"),
    ("bytes", b"\xff\x00"),
    ({"type": "array", "items": "long"}, [1, 2]),
    ({"type": "map", "values": "string"}, {"a": "b"}),
    ({"type": "record", "name": "odd", "fields": [{"name": "a", "type": "int"}]}, {"a": 1}),
    ({"type": "fixed", "name": "odd_fixed", "size": 3}, b"abc"),
    (["null", "string"], None),
    (["null", "string", "long"], 7),
]


def records_in(schema: Any, values: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """A record's schema and its values, then those inside it."""
    yield schema, values
    for one in schema["fields"]:
        kinds = one["type"] if isinstance(one["type"], list) else [one["type"]]
        for kind in kinds:
            if isinstance(kind, dict) and kind["type"] == "record":
                yield from records_in(kind, [value[one["name"]] for value in values if value[one["name"]]])


def odd_files(plain: bytes) -> Iterator[tuple[str, bytes]]:
    """A list or manifest with a field of another type, or without it, for each field and type."""
    names = [
        (at, one["name"]) for at, (schema, _) in enumerate(records_in(*decoded(plain)[:2])) for one in schema["fields"]
    ]
    for at, name in names:
        for kind, value in [*TYPES, (None, None)]:
            schema, values, meta = decoded(plain)
            record, there = list(records_in(schema, values))[at]
            if kind is None:
                record["fields"] = [one for one in record["fields"] if one["name"] != name]
            else:
                (field,) = [one for one in record["fields"] if one["name"] == name]
                field["type"] = kind
                field.pop("default", None)
                for one in there:
                    one[name] = value
            yield f"{name} {kind}", encoded(schema, values, meta)


def decoded(plain: bytes) -> tuple[Any, list[Any], dict[str, Any]]:
    reader: Any = fastavro.reader(io.BytesIO(plain))
    values = list(reader)
    meta = {name: one for name, one in reader.metadata.items() if not name.startswith("avro.")}
    return json.loads(reader.metadata["avro.schema"]), values, meta


def encoded(schema: Any, values: list[Any], meta: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.writer(out, schema, values, metadata=meta)
    return out.getvalue()


@pytest.mark.more
def test_each_field_of_lists_and_manifests(tmp_path: Path, kms: dict[str, str]) -> None:
    table = full(sql_catalog(tmp_path, kms))
    raw = raw_metadata(table)
    of = table.io
    nodes = list(Tree.of(of.session, of.inner, raw).walk(raw["snapshots"][-1:]))
    assert {one.kind for one in nodes} == {"manifest", "manifest-list"}
    tried = 0
    wrong = {}
    for node in nodes[:1] + nodes[-2:]:
        for name, plain in odd_files(node.plain):
            tried += 1
            try:
                container = read_container(plain)
                if manifests.is_list(container):
                    manifests.manifests(container, counts=True)
                else:
                    manifests.data_files(container, node.known)
                manifests.facade(container)
            except AgsError:
                continue
            except Exception as error:
                wrong[node.kind, name] = f"{type(error).__name__}: {error}"
    assert tried > 300
    assert wrong == {}
