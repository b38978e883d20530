"""What PyIceberg writes for the facade, as files of an encrypted table of version 3."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from ags_fast.ags1 import AgsCodec
from ags_fast.errors import PolicyError
from ags_fast.iceberg import manifests, metadata, policy
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.javajson import in_java_order
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.reading import find, load_metadata
from ags_fast.keys.iceberg import add_manifest_list_key, read_encryption_keys, write_encryption_keys
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Session

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


def seal_manifest(session: Session, path: str, container: Container, nbytes: int, inner: InnerIO) -> Known:
    """Write a manifest that PyIceberg wrote for the facade.

    Args:
        session: Has the keys of the files that it names.
        path: Where to.
        container: What PyIceberg wrote.
        nbytes: Of the new key.
        inner: Writes it.

    Raises:
        PolicyError: A file in it is in plaintext.
    """
    known = write_sealed(path, manifests.manifest_of(container, lambda name: find(session, name, inner)), nbytes, inner)
    known.content = manifests.DELETES if container.meta.get("content") == b"deletes" else manifests.DATA
    session.learn(known)
    return known


def sealed_metadata(session: Session, data: bytes, location: str, inner: InnerIO) -> bytes:
    """Return the bytes of a metadata file, made of those that PyIceberg writes. Writes new manifest lists first.

    Args:
        session: Of the catalog that commits.
        data: The facade.
        location: Where the metadata are written.
        inner: Opens and writes files as they are stored.

    Raises:
        PolicyError: The change is refused.
    """
    shown = metadata.parse(data, location)
    properties = shown.get("properties") or {}
    mark = properties.pop(metadata.MARK, None)
    log = shown.get("metadata-log") or ()
    base = load_metadata(session, log[-1]["metadata-file"], inner) if log else None
    if not policy.is_encrypted(shown) and (base is None or not policy.is_encrypted(base)) and mark is None:
        if base is not None and session.is_upgrading(base) and shown["format-version"] < base["format-version"]:
            raise PolicyError("the table is being encrypted: write to it afterwards")  # else it would lose its row ids
        return data
    session.check_writes()
    if mark is not None:
        # An edit of the raw metadata: PyIceberg's change only brings the time, and where the metadata before are.
        raw = dict(session.edit(mark)(base or {}))
        kept = {one["metadata-file"] for one in (*(raw.get("metadata-log") or ()), *log[-1:])}  # an edit may drop some
        raw["last-updated-ms"] = shown["last-updated-ms"]
        raw["metadata-log"] = [one for one in log if one["metadata-file"] in kept]
        session.note_written(mark, location)
    else:
        policy.check_change(base, properties, shown)
        raw = metadata.merge(base, shown, lambda raw, new: seal_lists(session, raw, new, inner))
    if policy.is_encrypted(raw):
        raw = in_java_order(raw)
    session.remember(raw, location)
    return metadata.dump(raw, location)


def seal_lists(session: Session, raw: Raw, new: list[Raw], inner: InnerIO) -> None:
    """Write the manifest lists of new snapshots, and give these snapshots their keys and row ids.

    Args:
        session: Holds the lists as PyIceberg wrote them.
        raw: The metadata that name the snapshots; keys and ``next-row-id`` are changed.
        new: The new snapshots among them, oldest first; changed.
        inner: Writes the lists.
    """
    assigned: dict[str, int] = {}
    keys = read_encryption_keys(raw.get("encryption-keys") or ())
    properties = raw["properties"]
    nbytes = int(properties.get(policy.KEY_LENGTH, "16"))

    def look_up(path: str) -> Known | None:
        known = find(session, path, inner)
        return replace(known, first_row_id=assigned[path]) if known is not None and path in assigned else known

    for snapshot in new:
        path = snapshot["manifest-list"]
        data = session.held_list(path)
        if data is None:
            raise PolicyError(
                f"the manifest list {path} was not written through this catalog, so its files would be in plaintext"
            )
        made = manifests.sealed_list(read_container(data), look_up, raw["next-row-id"])
        known = write_sealed(path, made.data, nbytes, inner)
        assert known.key_metadata is not None
        keys, key_id = add_manifest_list_key(
            keys, known.key_metadata, session.kms, properties[policy.KEY_ID], length=nbytes
        )
        assigned.update(made.assigned)
        session.learn(known)
        snapshot.update({"key-id": key_id, "first-row-id": made.first_row_id, "added-rows": made.added_rows})
        raw["next-row-id"] += made.added_rows
    if new:
        raw["encryption-keys"] = write_encryption_keys(keys)
