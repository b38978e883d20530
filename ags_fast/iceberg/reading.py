"""Open one metadata file, manifest list or manifest: what it names, and what PyIceberg is shown of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ags_fast.ags1 import AgsCodec, plaintext_length
from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError
from ags_fast.iceberg import manifests, metadata, policy, properties
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.locations import ENCRYPTED
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.session import OF_TABLE
from ags_fast.iceberg.session import shown as shown_last

if TYPE_CHECKING:
    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Session, TableState

__all__ = ["LIST", "LOST", "MANIFEST", "Node", "check_length", "error_of", "learn", "load_metadata", "open_node"]
__all__ += ["read_node", "refuse", "show_metadata", "show_node"]

LIST, MANIFEST = "manifest-list", "manifest"
LOST = "it is encrypted, but its entry has no key: the writer lost the key, and nothing can open the file. "


@dataclass(slots=True, repr=False)
class Node:
    """A manifest list or a manifest.

    Attributes:
        known: What is said of it. A list has no length there, and no path if its snapshot names manifests itself.
        snapshot: The snapshot that names it. Of a manifest: the first whose list does.
        plain: Its plaintext, with keys.
        length: Its bytes on storage, as the key or the entry says; those that are there if neither says it.
        nbytes: Its bytes on storage.
        named: The manifests or files that it names, deleted ones too.
        record: What the list says of a manifest, by the names of Iceberg's fields, if that was decoded.
        seconds: How long it took to read; None: it was not read yet.
    """

    known: Known
    snapshot: Raw = field(default_factory=dict)
    kind: str = MANIFEST
    plain: bytes = b""
    length: int = 0
    nbytes: int = 0
    named: list[Known] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    seconds: float | None = None

    @classmethod
    def of_list(cls, snapshot: Raw) -> Node:
        """Return the list of a snapshot."""
        return cls(Known(snapshot.get("manifest-list") or "", 0, None), snapshot, LIST)

    @property
    def path(self) -> str:
        """Its location, or else which snapshot it belongs to."""
        return self.known.path or f"snapshot {self.snapshot['snapshot-id']}"

    def container(self) -> Container:
        """Return its container. Each call returns one whose keys are still there."""
        return read_container(self.plain)

    def files(self) -> list[Known]:
        """Return the live files of a manifest. One with several deletion vectors is there several times."""
        return [one for one in self.named if one.status != manifests.DELETED]


def show_metadata(session: Session, data: bytes, location: str) -> bytes:
    """Return the facade of a metadata file. Raises what `metadata.parse` and the session's checks do."""
    known = session.raw(location) if data and data == session.stored(location) else None
    raw = known or metadata.parse(data, location)
    session.check_metadata(raw, location)
    session.remember(raw, location, data)
    shown_last.set((session, location, raw))
    state = session.table_of(raw)
    state.drop_written(raw)
    if policy.is_encrypted(raw) or state.upgrading:
        shown = metadata.facade(raw, sealed=session.guard.requires())
        if session.marks:
            shown["properties"][OF_TABLE] = f"{raw.get('table-uuid')} {raw.get('location')}"
        return metadata.dump(shown, location)
    seen = properties.shown(raw.get("properties"), properties.TABLE)
    if seen == (raw.get("properties") or {}) and not data.startswith(metadata.GZIP_MAGIC):
        return data
    return metadata.dump({**raw, "properties": seen}, location)


def load_metadata(session: Session, location: str, inner: InnerIO) -> Raw:
    """Return the raw metadata at a location, read if the session has forgotten them. Errors: as `show_metadata`."""
    raw = session.raw(location)
    if raw is None:
        data = metadata.read(inner.new_input(location))
        raw = metadata.parse(data, location)
        session.check_metadata(raw, location)
        session.remember(raw, location, data)
    return raw


def open_node(node: Node, inner: InnerIO) -> None:
    """Give a node its plaintext. IntegrityError if it was changed, KeyAccessError if nothing has its key."""
    known, key = node.known, node.known.key_metadata
    with inner.new_input(known.path).open() as file:
        data = file.read()
    node.nbytes = node.length = len(data)
    if key is None:
        if data[:4] in ENCRYPTED:
            raise KeyAccessError(f"{known.path}: {LOST}Roll the table back to a snapshot that does not need it")
        node.plain = bytes(data)
        return
    check_length(known)
    node.length = _length(known, len(data)) if key.file_length is None else key.file_length
    node.plain = AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix).decrypt(data, length=node.length)


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


def read_node(node: Node, inner: InnerIO, session: Session | None = None, *, counts: bool = False) -> Container:
    """Read a list or manifest, of which the node then says what it names. Returns its container, without the keys.

    session: whose client's configuration decides whether one in plaintext is read; None: it is. counts: as for
    `manifests.manifests`. KeyAccessError if it is encrypted, and nothing has its key.
    """
    if node.known.key_metadata is None and session is not None:
        session.check_plaintext(node.known.path)
    open_node(node, inner)
    container = node.container()
    if manifests.is_list(container):
        if node.kind != LIST:
            raise FormatError("it is a manifest list, where a manifest belongs")
        node.named = manifests.manifests(container, counts=counts)
    elif node.kind != MANIFEST:
        raise FormatError("it is a manifest, where a manifest list belongs")
    else:
        node.named = manifests.data_files(container, node.known)
    return container


def learn(state: TableState, node: Node) -> None:
    """Keep what a list or manifest says of what it names."""
    for one in node.named:
        # A deletion vector's file has several entries, and an entry of a deleted file says least of it.
        if one.status != manifests.DELETED or state.known(one.path) is None:
            state.learn(one, trusted=node.known.key_metadata is not None)


def error_of(node: Node, error: Exception) -> Exception:
    """Return the error of a list or manifest, in whose text its path is."""
    if isinstance(error, FormatError | IntegrityError) and node.path not in str(error):
        return type(error)(f"{node.path}: {error}")
    return error


def refuse(node: Node) -> NoReturn:
    """Raise the error of a node that could not be read."""
    assert node.error is not None
    raise error_of(node, node.error)


def show_node(state: TableState, node: Node, inner: InnerIO) -> bytes:
    """Return the facade of a manifest list or manifest."""
    try:
        container = read_node(node, inner, state.session)
    except AgsError as error:
        raise error_of(node, error) from None
    learn(state, node)
    return manifests.facade(container)
