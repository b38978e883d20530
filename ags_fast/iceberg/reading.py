"""What PyIceberg is shown of metadata files, manifest lists and manifests, and what a session learns from them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ags_fast.ags1 import AgsCodec, plaintext_length
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.iceberg import manifests, metadata, policy
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.manifests import Known

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Session

__all__ = [
    "find",
    "load_metadata",
    "open_whole",
    "read_list",
    "read_manifest",
    "show_list",
    "show_manifest",
    "show_metadata",
]


def show_metadata(session: Session, data: bytes, location: str) -> bytes:
    """Return the facade of a metadata file.

    Raises:
        PolicyError: The metadata would configure this client, or cannot be those of an encrypted table.
        FormatError: The file is malformed.
        IntegrityError: The catalog has the hash of other metadata, or has read the table as an encrypted one before,
            and it is in plaintext now.
    """
    raw = metadata.parse(data, location)
    session.check_metadata(raw, location)
    session.remember(raw, location)
    session.drop_written(raw)
    translated = policy.is_encrypted(raw) or session.is_upgrading(raw)
    return metadata.dump(metadata.facade(raw), location) if translated else data


def load_metadata(session: Session, location: str, inner: InnerIO) -> Raw:
    """Return the raw metadata at a location, read if the session has forgotten them.

    Raises:
        PolicyError, FormatError: As `show_metadata`.
        IntegrityError: The catalog has the hash of other metadata.
    """
    raw = session.raw(location)
    if raw is None:
        with inner.new_input(location).open() as file:
            raw = metadata.parse(file.read(), location)
        session.check_metadata(raw, location)
        session.remember(raw, location)
    return raw


def open_whole(known: Known, inner: InnerIO) -> bytes:
    """Return the plaintext of a manifest or list.

    Args:
        known: Its path, key, and bytes on storage (0 if only the key says how many).
        inner: Opens files as they are stored.

    Raises:
        IntegrityError: It was changed, or its entry and its key say two lengths.
    """
    with inner.new_input(known.path).open() as file:
        data = file.read()
    key = known.key_metadata
    if key is None:
        return bytes(data)
    check_length(known)
    try:
        codec = AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix)
        return codec.decrypt(data, length=_length(known, len(data)) if key.file_length is None else key.file_length)
    except (FormatError, IntegrityError) as error:
        raise type(error)(f"{known.path}: {error}") from None


def _length(known: Known, stored: int) -> int:
    """Return the length of a file whose key does not say it, since iceberg-rust wrote it. Its entry may not know it.

    Some versions of iceberg-rust write the length of a manifest's plaintext into its list.
    """
    with suppress(FormatError):
        if known.length == plaintext_length(stored):
            return stored
    return known.length or stored


def check_length(known: Known) -> None:
    """Refuse a file of which the entry and the key say two lengths. IntegrityError."""
    key = known.key_metadata
    if key is not None and key.file_length is not None and known.length not in (0, key.file_length):
        raise IntegrityError(
            f"{known.path} has two lengths: {known.length} bytes by its entry, {key.file_length} by its key"
        )


def show_list(session: Session, path: str, inner: InnerIO) -> bytes:
    """Return the facade of a manifest list."""
    return _list(session, path, inner)[0]


def read_list(session: Session, path: str, inner: InnerIO, *, plaintext: bool = False) -> list[Known]:
    """Return the manifests that a list names.

    Args:
        session: Has the key of the list, and learns those of its manifests.
        path: The list, which known metadata name.
        inner: Opens files as they are stored.
        plaintext: Whether to read a list in plaintext, also if the client's configuration does not allow that. For
            callers that only need the paths: the session learns nothing from it.

    Raises:
        KeyAccessError: The key of the list is lost, or the KMS refuses.
        PolicyError: The list is in plaintext.
        IntegrityError, FormatError: The list was changed.
    """
    return _list(session, path, inner, plaintext=plaintext)[1]


def _list(session: Session, path: str, inner: InnerIO, *, plaintext: bool = False) -> tuple[bytes, list[Known]]:
    key = session.list_key(path)
    if key is None and not plaintext:
        session.check_plaintext(path)
    container = read_container(open_whole(Known(path, 0, key), inner))
    if not manifests.is_list(container):
        raise FormatError(f"{path} is a manifest, where a manifest list belongs")
    found = manifests.manifests(container)
    if key is not None or not plaintext:
        for one in found:
            session.learn(one, trusted=key is not None)
    return manifests.facade(container), found


def show_manifest(session: Session, known: Known, inner: InnerIO) -> bytes:
    """Return the facade of a manifest."""
    return _manifest(session, known, inner)[0]


def read_manifest(session: Session, known: Known, inner: InnerIO, *, plaintext: bool = False) -> list[Known]:
    """Return the files that a manifest names, deleted ones too.

    Args:
        session: Learns the keys of the files.
        known: The manifest.
        inner: Opens files as they are stored.
        plaintext: As for `read_list`.

    Raises:
        PolicyError: The manifest is in plaintext.
        IntegrityError, FormatError: The manifest was changed.
    """
    return _manifest(session, known, inner, plaintext=plaintext)[1]


def _manifest(session: Session, known: Known, inner: InnerIO, *, plaintext: bool = False) -> tuple[bytes, list[Known]]:
    sealed = known.key_metadata is not None
    if not sealed and not plaintext:
        session.check_plaintext(known.path)
    container = read_container(open_whole(known, inner))
    if manifests.is_list(container):
        raise FormatError(f"{known.path} is a manifest list, where a manifest belongs")
    found = manifests.data_files(container, known)
    for one in found if sealed or not plaintext else ():
        # A deletion vector's file has several entries, and an entry of a deleted file says least of it.
        if one.status != manifests.DELETED or session.known(one.path) is None:
            session.learn(one, trusted=sealed)
    return manifests.facade(container), found


def find(session: Session, path: str, inner: InnerIO) -> Known | None:
    """Return what is known of a path, or else what known lists and their manifests say of it. Reads them if needed."""
    known = session.known(path)
    if known is not None:
        return known
    return next((one for one in _walk(session, inner) if one.path == path), None)


def _walk(session: Session, inner: InnerIO) -> Iterator[Known]:
    """Yield all manifests and files of known lists, the newest list first. Each manifest is read once."""
    seen: set[str] = set()
    for path in session.lists():
        try:
            found = [one for one in read_list(session, path, inner) if one.path not in seen]
            yield from found
            for manifest in found:
                seen.add(manifest.path)
                if manifest.key_metadata is not None or session.plaintext == "allow":
                    yield from read_manifest(session, manifest, inner)
        except FileNotFoundError:  # an expired snapshot's, or of a table that was dropped
            continue
