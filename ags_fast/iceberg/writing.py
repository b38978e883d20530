"""What PyIceberg writes for the facade, as files of an encrypted table of version 3."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from ags_fast.ags1 import AgsCodec
from ags_fast.errors import PolicyError
from ags_fast.iceberg import manifests, metadata, policy, properties, rewriting
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.reading import load_metadata
from ags_fast.iceberg.session import shown as shown_last
from ags_fast.iceberg.walk import find
from ags_fast.keys.iceberg import read_encryption_keys
from ags_fast.keys.metadata import StandardKeyMetadata
from ags_fast.metadata.history import with_log
from ags_fast.metadata.javajson import in_java_order
from ags_fast.metadata.outcome import Attempt, attempted

if TYPE_CHECKING:
    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Session, TableState

__all__ = ["new_key", "seal_lists", "seal_manifest", "sealed_metadata", "write_sealed"]

PREFIX_NBYTES = 16  # of an AAD prefix, as Java and Rust make them


def new_key(nbytes: int) -> StandardKeyMetadata:
    """Return a new data key of `nbytes` bytes, and a new AAD prefix."""
    return StandardKeyMetadata(secrets.token_bytes(nbytes), os.urandom(PREFIX_NBYTES))


def write_sealed(path: str, data: bytes | memoryview, nbytes: int, inner: InnerIO) -> Known:
    """Write an AGS1 stream under a new key of `nbytes` bytes, and return what there is to know of it."""
    key = new_key(nbytes)
    sealed = AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix).encrypt(data)
    with inner.new_output(path).create(overwrite=True) as file:
        file.write(sealed)
    return Known(path, len(sealed), StandardKeyMetadata(key.encryption_key, key.aad_prefix, len(sealed)))


def seal_manifest(state: TableState, path: str, container: Container, nbytes: int, inner: InnerIO) -> Known:
    """Write a manifest that PyIceberg wrote for the facade, under a new key of `nbytes` bytes.

    `state` has the keys of the files that it names. PolicyError if one of them is in plaintext.
    """
    content = manifests.DELETES if container.meta.get("content") == b"deletes" else manifests.DATA
    entries = (manifests.sealed_entry(one, lambda name: find(state, name, inner)) for one in container.records())
    data = rewriting.manifest_bytes(container, entries, content, container.codec)
    known = write_sealed(path, data, nbytes, inner)
    known.content = content
    state.note(known)
    return known


def sealed_metadata(session: Session, data: bytes, location: str, inner: InnerIO) -> bytes:
    """Return the bytes of a metadata file, made of the facade `data`. Writes new manifest lists first.

    PolicyError if the change is refused.
    """
    shown = metadata.parse(data, location)
    written = shown.get("properties") or {}
    mark = written.pop(metadata.MARK, None)
    log = shown.get("metadata-log") or ()
    before = log[-1]["metadata-file"] if log else ""
    base = _base(session, before, inner) if log else None
    if not policy.is_encrypted(shown) and (base is None or not policy.is_encrypted(base)) and mark is None:
        session.check_plaintext_table(location)
        upgrading = session.table_of(shown).upgrading
        if base is not None and upgrading and shown["format-version"] < base["format-version"]:
            raise PolicyError("the table is being encrypted: write to it afterwards")  # else it would lose its row ids
        raw = {**shown, "properties": properties.restored((base or {}).get("properties"), written)}
        data = data if raw == shown else metadata.dump(raw, location)
        session.remember(raw, location, data)
        attempted.set(Attempt(base, raw, location))
        return data
    session.check_writes()
    if base is not None and policy.is_encrypted(base):
        session.guard.see_base(base, before)
    if mark is not None:
        # An edit of the raw metadata: PyIceberg's change only brings the time, and where the metadata before are.
        raw = dict(session.edit(mark)(base or {}))
        kept = {one["metadata-file"] for one in (*(raw.get("metadata-log") or ()), *log[-1:])}  # an edit may drop some
        raw["last-updated-ms"] = shown["last-updated-ms"]
        raw["metadata-log"] = [one for one in log if one["metadata-file"] in kept]
    else:
        policy.check_change(base, written, shown)
        state = session.table_of(shown)
        raw = metadata.merge(base, shown, lambda raw, new: seal_lists(state, raw, new, inner))
        if base is not None and session.guard.requires():
            raw = with_log(raw, base)
    if policy.is_encrypted(raw):
        raw, encrypted = in_java_order(raw), base if base and policy.is_encrypted(base) else None
        keys = raw.get("encryption-keys") or ()
        if session.guard.seal(encrypted, before, raw, location):
            session.table_of(raw).made(*map(read_encryption_keys, (keys, raw["encryption-keys"])))
            raw = in_java_order(raw)
    data = metadata.dump(raw, location)
    session.remember(raw, location, data, own=True)
    shown_last.set((session, location, raw))
    attempted.set(Attempt(base, raw, location))
    return data


def _base(session: Session, location: str, inner: InnerIO) -> Raw:
    """Return the metadata that a commit changes: those of which this thread was shown the facade."""
    by, at, raw = shown_last.get()
    return raw if (by, at) == (session, location) else load_metadata(session, location, inner)


def seal_lists(state: TableState, raw: Raw, new: list[Raw], inner: InnerIO) -> None:
    """Write the manifest lists of new snapshots, and give these snapshots their keys and row ids.

    `state` holds the lists as PyIceberg wrote them. `raw` names the snapshots, and gets their keys and the
    ``next-row-id``. `new` are the new ones among them, oldest first, and are changed.
    """
    assigned: dict[str, int | None] = {}
    nbytes = int(raw["properties"].get(policy.KEY_LENGTH, "16"))

    def look_up(path: str) -> Known | None:
        known = find(state, path, inner)
        return replace(known, first_row_id=assigned[path]) if known is not None and path in assigned else known

    for snapshot in new:
        path = snapshot["manifest-list"]
        data = state.held_list(path)
        if data is None:
            raise PolicyError(
                f"the manifest list {path} was not written through this catalog, so its files would be in plaintext"
            )
        container = read_container(data)
        records = list(container.records())
        for one in records:
            named = look_up(one["manifest_path"])
            if named is None or named.key_metadata is None:
                raise PolicyError(f"the manifest {one['manifest_path']} is in plaintext, in an encrypted table")
            one["key_metadata"], one["manifest_length"] = named.key_metadata.encode(), named.length
            one["first_row_id"] = named.first_row_id
        snapshot["first-row-id"] = raw["next-row-id"]
        plain, snapshot["added-rows"] = rewriting.list_bytes(container, records, snapshot, container.codec)
        known = write_sealed(path, plain, nbytes, inner)
        assert known.key_metadata is not None
        wrapped, snapshot["key-id"] = state.wrap_list_key(raw, known.key_metadata)
        raw.update(wrapped)
        assigned |= {one["manifest_path"]: one["first_row_id"] for one in records}
        state.note(known)
        raw["next-row-id"] += snapshot["added-rows"]
