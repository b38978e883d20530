"""Tables that other writers damaged: files in plaintext, lost keys, lists that are wrong."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from iceberg_tables import open_whole

from ags_fast.iceberg.commit import edit
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.rewriting import entries, list_bytes, list_record, manifest_bytes
from ags_fast.iceberg.snapshots import begin_snapshot, with_snapshot
from ags_fast.iceberg.writing import write_sealed

if TYPE_CHECKING:
    from collections.abc import Callable


def relisted(table: Any, change: Callable[[Any, Any], Any], *, every: bool = False) -> None:
    """Commit a snapshot whose list has what `change` makes of the record of its first manifest, or of each."""
    io, head = table.io, table.current_snapshot()
    inner = io.inner(head.manifest_list)
    plain = open_whole(Known(head.manifest_list, 0, io.table.list_key(head.manifest_list)), inner)
    records = list(read_container(plain).records())
    n = len(records) if every else 1
    made = [*(change(table, record) for record in records[:n]), *records[n:]]

    def commit(raw: dict[str, Any]) -> dict[str, Any]:
        snapshot = begin_snapshot(raw, "replace", {})
        data, added = list_bytes(read_container(plain), made, snapshot, "deflate")
        written = write_sealed(f"{table.location()}/metadata/snap-{uuid.uuid4()}.avro", data, 16, inner)
        return with_snapshot(raw, snapshot, written, added, io.table)

    edit(table, commit)


def plaintext_manifest(table: Any, record: Any) -> Any:
    """What Java 1.11's rewrite_manifests does: a manifest in plaintext."""
    io = table.io
    known = io.table.known(record["manifest_path"])
    with io.inner(known.path).new_output(f"{table.location()}/metadata/plain.avro").create() as file:
        file.write(open_whole(known, io.inner(known.path)))
        path = f"{table.location()}/metadata/plain.avro"
    length = len(io.inner(path).new_input(path))
    return {**record, "manifest_path": path, "manifest_length": length, "key_metadata": None}


def lost_key(table: Any, record: Any) -> Any:
    """What Java 1.11 does to deletion vectors: the entry of an encrypted file has no key."""
    io = table.io
    known = io.table.known(record["manifest_path"])
    inner = io.inner(known.path)
    container = read_container(open_whole(known, inner))
    kept = entries(container, known)
    for entry in kept:
        entry["data_file"]["key_metadata"] = None
    content = record["content"]
    written = write_sealed(
        f"{table.location()}/metadata/{uuid.uuid4()}.avro",
        manifest_bytes(container, kept, content, "deflate"),
        16,
        inner,
    )
    snapshot = {"snapshot-id": 1, "sequence-number": 2}
    written.content = content
    return list_record(written, kept, like=record, snapshot=snapshot)


def list_as_manifest(table: Any, record: Any) -> Any:
    """The list of the current snapshot, sealed anew, where a manifest belongs."""
    io, path = table.io, table.current_snapshot().manifest_list
    plain = open_whole(Known(path, 0, io.table.list_key(path)), io.inner(path))
    written = write_sealed(f"{table.location()}/metadata/{uuid.uuid4()}.avro", plain, 16, io.inner(path))
    assert written.key_metadata is not None
    more = {"manifest_length": written.length, "key_metadata": written.key_metadata.encode()}
    return {**record, "manifest_path": written.path, **more}


def manifest_as_list(table: Any) -> None:
    """Commit a snapshot whose list is a manifest, sealed anew."""
    io = table.io
    known = io.table.known(table.current_snapshot().manifests(io)[0].manifest_path)
    plain = open_whole(known, io.inner(known.path))

    def commit(raw: dict[str, Any]) -> dict[str, Any]:
        snapshot = begin_snapshot(raw, "replace", {})
        written = write_sealed(f"{table.location()}/metadata/snap-{uuid.uuid4()}.avro", plain, 16, io.inner(known.path))
        return with_snapshot(raw, snapshot, written, 0, io.table)

    edit(table, commit)


def avro_data(table: Any, record: Any) -> Any:
    """What Java does with ``write.format.default=avro``: a data file that is Avro in an AES GCM Stream."""
    io = table.io
    known = io.table.known(record["manifest_path"])
    inner = io.inner(known.path)
    container = read_container(open_whole(known, inner))
    (entry,) = entries(container, known)
    path = f"{table.location()}/data/{uuid.uuid4()}.avro"
    sealed = write_sealed(path, b"Obj\x01" + bytes(range(256)) * 9000, 16, inner)  # three blocks
    assert sealed.key_metadata is not None
    entry["data_file"] |= {
        "file_path": path,
        "file_format": "AVRO",
        "file_size_in_bytes": sealed.length,
        "key_metadata": sealed.key_metadata.encode(),
    }
    written = write_sealed(
        f"{table.location()}/metadata/{uuid.uuid4()}.avro", manifest_bytes(container, [entry], 0, "deflate"), 16, inner
    )
    snapshot = {"snapshot-id": 1, "sequence-number": 2}
    return list_record(written, [entry], like=record, snapshot=snapshot)


def plaintext_data(table: Any, record: Any) -> Any:
    """What Java 1.11's add_files does: a data file in plaintext."""
    io = table.io
    known = io.table.known(record["manifest_path"])
    inner = io.inner(known.path)
    container = read_container(open_whole(known, inner))
    (entry,) = entries(container, known)
    path = f"{table.location()}/data/plain.parquet"
    with table.io.new_input(entry["data_file"]["file_path"]).open() as source, inner.new_output(path).create() as file:
        file.write(source.read())
    entry["data_file"] |= {
        "file_path": path,
        "file_size_in_bytes": len(inner.new_input(path)),
        "key_metadata": None,
    }
    written = write_sealed(
        f"{table.location()}/metadata/{uuid.uuid4()}.avro", manifest_bytes(container, [entry], 0, "deflate"), 16, inner
    )
    snapshot = {"snapshot-id": 1, "sequence-number": 2}
    return list_record(written, [entry], like=record, snapshot=snapshot)
