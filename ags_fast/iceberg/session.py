"""What one catalog object knows: its KMS, what its owner allows, and of each of its tables the keys of files.

Nothing is shared between tables: metadata that name another table's files, with keys of their own choice, change
nothing for that table.

PyIceberg makes FileIO objects from properties, several for one table. They find their session by a token among these
properties.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from ags_fast.errors import IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.locations import normal
from ags_fast.keys.cache import clear_cache as clear_keks
from ags_fast.keys.iceberg import add_manifest_list_key, manifest_list_key, read_encryption_keys, write_encryption_keys
from ags_fast.keys.kms import Kms, as_kms, shared_client
from ags_fast.keys.kms.client import allowed_patterns
from ags_fast.keys.kms.names import CATALOG, GUARDS, TABLE, check_catalog_names, guards, merged
from ags_fast.metadata import javajson
from ags_fast.seals.guard import SETTING, Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.keys.iceberg import EncryptedKey
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.metadata import StandardKeyMetadata

    _Kms = Kms | None

__all__ = ["IO_IMPL", "KMS_PREFIXES", "OF_TABLE", "SESSION", "Base", "Session", "clear_cache", "client_session"]
__all__ += ["committing", "forget_encrypted", "kms_of", "received", "seen_again", "session_of", "shown", "signs"]

IO_IMPL = "ags_fast.iceberg.FileIO"
SESSION = "ags_fast.session"  # the property that names a session, of this process
OF_TABLE = "ags_fast.table"  # and the table, where no handle of ours tells a FileIO whose it is
KMS_PREFIXES = ("encryption.kms-", "kms.", "vault.", "azure.keyvault.")
# What clients of a KMS read beside. A mistyped name among these goes to them, too, so that they refuse it.
KMS_SHARED = ("encryption.", "client.", "gcs.impersonate.", "adls.token-credential-provider")
NOT_OF_KMS = {*CATALOG, *TABLE, "client.access-key-id", "client.secret-access-key", "client.session-token"}
KNOWN_PATHS = 1_000_000  # that a session remembers, about 500 bytes each; older ones are looked up again
KNOWN_METADATA = 16  # metadata files that a session remembers
KNOWN_TABLES = 1000  # that a session remembers, beside those of which a handle is there
READERS = 16  # sessions of FileIO objects that no catalog of this process made

_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
_readers: dict[Any, Session] = {}
_encrypted: dict[str, None] = {}  # the signs of tables that this process has seen encrypted, the earliest first
# What this process made, whichever catalog object did: KEKs as they are wrapped, by id, and master keys of tables.
_keks: dict[str, bytes] = {}
_masters: set[tuple[str, str, str]] = set()


class Base(NamedTuple):
    """What a commit in progress changes: raw metadata, or None for a new table, the FileIO, and their location."""

    raw: Raw | None
    io: Any
    location: str = ""


committing: ContextVar[Base | None] = ContextVar("committing", default=None)  # what the commit of this thread changes
# What this thread has read or written last: by which session, where, and the raw metadata.
shown: ContextVar[tuple[Session | None, str, Raw]] = ContextVar("shown", default=(None, "", {}))
seen_again: ContextVar[str] = ContextVar("seen_again", default="")  # the metadata on which its transaction began


def signs(uuid: Any, location: Any, metadata_location: str) -> set[str]:
    """Return by what a table is known again: its UUID, its location and that of its metadata, in one spelling."""
    try:
        uuid = UUID(str(uuid)).hex
    except ValueError:
        uuid = None
    places = (location.rstrip("/") if isinstance(location, str) else "", metadata_location)
    return {sign for sign in (uuid, *(normal(one) for one in places if "/" in one)) if sign}


def forget_encrypted(found: Iterable[str]) -> None:
    """Let what is known by these signs be a table in plaintext from now on: its owner says so."""
    for sign in found:
        _encrypted.pop(sign, None)


def keep(kept: dict[Any, Any], name: Any, value: Any, most: int = KNOWN_PATHS) -> None:
    """Keep a value, and forget the earliest of more than `most`."""
    kept[name] = value
    while len(kept) > most:
        kept.pop(next(iter(kept)), None)


def session_of(properties: Mapping[str, str]) -> Session:
    """Return the session that the properties of a FileIO name, or else one that only reads: one for each KMS.

    Such a FileIO was made by no catalog of ours. A table's properties are among its own, so they never allow files in
    plaintext. Metadata are read by a FileIO that has only the catalog's.
    """
    if (found := _sessions.get(properties.get(SESSION, ""))) is not None:
        return found
    kms = kms_of(properties)
    plaintext = policy.plaintext_setting(properties, encrypts=kms is not None)._replace(files="refuse")
    seals = str(properties.get(SETTING, "write"))
    name = plaintext, seals, frozenset(kms.items() if isinstance(kms, Mapping) else ())
    session = _readers.get(name) or Session(kms, writes=False, plaintext=plaintext, marks=True, seals=seals)
    keep(_readers, name, session, READERS)
    return session


def received(token: str, settings: dict[str, Any], name: tuple[str, str], *known: Any) -> TableState:
    """Return what is known of a table, of what `TableState.sent` returned in another process.

    What one session sends is of one session here, too, so that each manifest is read once.
    """
    session = _sessions.get(token)
    if session is None:
        session = _sessions[token] = Session(writes=False, **settings)
        keep(_readers, token, session, READERS)
    state = session.table(*name)
    state.receive(*known)
    return state


def client_session(
    kms: _Kms, properties: dict[str, Any], *, writes: bool = True, pins: Mapping[str, str] | None = None
) -> Session:
    """Return the session of a client with these settings, all of which are checked at once.

    `kms` is a client or its properties; None takes them from `properties`. Guards among `properties` hold for it, too.
    ``py-io-impl`` is taken out of `properties`. ValueError if a name is mistyped, a value is impossible, or a setting
    contradicts `kms`.
    """
    check_catalog_names(properties)
    chosen = properties.pop("py-io-impl", None)
    found = kms_of(properties, kms)
    plaintext = policy.plaintext_setting(properties, encrypts=found is not None)
    impl, seals = None if chosen == IO_IMPL else chosen, str(properties.get(SETTING, "write"))
    session = Session(found, writes=writes, io_impl=impl, plaintext=plaintext, seals=seals, pins=pins)
    if found is not None:
        _ = session.kms  # makes the client, which refuses what it does not know
    return session


def clear_cache() -> None:
    """Forget the keys of files and the unwrapped KEKs that this process holds. Tables look them up again."""
    for session in list(_sessions.values()):
        session.clear()
    clear_keks()


def kms_of(properties: Mapping[str, Any], kms: _Kms = None) -> _Kms:
    """Return the KMS of a client with these settings: `kms` under their guards, or the one that they name, or None."""
    read = (*KMS_PREFIXES, *KMS_SHARED)
    own = {name: str(one) for name, one in properties.items() if name.startswith(read) and name not in NOT_OF_KMS}
    names_one = not own.keys().isdisjoint(("encryption.kms-type", "encryption.kms-impl"))
    if kms is None:
        return own if names_one else None
    if names_one:  # `kms` takes the place of that one, and not of what guards every KMS
        own = guards(own)
    more = {name: one for name, one in own.items() if name in GUARDS or name.startswith(KMS_PREFIXES)}
    if isinstance(kms, Mapping):
        return merged(kms, more)
    if more:
        raise ValueError(f"{min(more)} beside a KMS client does nothing: give it to load_kms, which makes the client")
    return kms


class Session:
    """What one catalog object knows. Threads may share it. It is never pickled.

    Args:
        kms: A client or its properties. None: it is an error to open or to write an encrypted table.
        writes: Whether FileIO objects of the session write tables.
        io_impl: The class of the FileIO that opens files as they are stored; None is PyIceberg's choice by scheme.
        marks: Whether the facade of a table's metadata has the property `OF_TABLE`.
    """

    def __init__(
        self,
        kms: _Kms,
        *,
        writes: bool = True,
        io_impl: str | None = None,
        plaintext: policy.Plaintext,
        marks: bool = False,
        seals: str = "write",
        pins: Mapping[str, str] | None = None,
    ) -> None:
        self.token = secrets.token_hex(8)
        self.io_impl, self.plaintext, self.marks = io_impl, plaintext, marks
        self._writes = writes
        self._kms = kms if kms is None or isinstance(kms, Mapping) else as_kms(kms)
        self._lock = threading.Lock()
        self.files: dict[tuple[tuple[str, str], str], Known] = {}  # what tables know of paths
        self.masters: dict[tuple[str, str], set[str]] = {}  # and the master keys that they had
        self._tables: weakref.WeakValueDictionary[tuple[str, str], TableState] = weakref.WeakValueDictionary()
        self._recent: dict[tuple[str, str], TableState] = {}
        self._metadata: dict[str, tuple[Raw, bytes]] = {}
        self._hashes: dict[str, str | None] = {}
        self._edits: dict[str, Callable[[Raw], Raw]] = {}
        self.guard = Guard(seals, pins or {}, lambda: self.kms, lambda: [] if kms is None else self._allowed())
        _sessions[self.token] = self

    def __repr__(self) -> str:
        return f"<Session of {len(self._tables)} tables>"

    def __reduce__(self) -> str:
        raise TypeError("a catalog's session holds keys and is never pickled: load the catalog where it is used")

    def settings(self) -> dict[str, Any]:
        """Return the arguments of a session that reads as this one does. A client pickles as its properties."""
        return {"kms": None if self._kms is None else self.kms, "io_impl": self.io_impl, "plaintext": self.plaintext}

    @property
    def kms(self) -> KmsClient:
        """The client. KeyAccessError if the catalog was loaded without one."""
        if self._kms is None:
            raise KeyAccessError(
                "the table is encrypted, and no KMS was given: pass kms= to ags_fast.iceberg.load_catalog, or set "
                "encryption.kms-type and what it needs among the catalog's properties"
            )
        return shared_client(self._kms)

    def _allowed(self) -> list[str]:
        with suppress(TypeError):  # of a client that was made without properties
            return [one for one in allowed_patterns(self.kms.properties) if one.strip("*")]
        return []

    def check_writes(self) -> None:
        """Refuse to write from a FileIO that only reads."""
        if not self._writes:
            raise PolicyError(
                "this FileIO only reads encrypted tables: load the table from a catalog of ags_fast.iceberg to write it"
            )

    def check_plaintext_table(self, what: str) -> None:
        """Refuse to write a table in plaintext, unless the client's configuration allows that. PolicyError."""
        if self.plaintext.tables != "write":
            raise PolicyError(
                f"{what} is in plaintext, and this catalog writes no such table: name a master key in the table's "
                f"{policy.KEY_ID}, or give the catalog {policy.PLAINTEXT_TABLES}=write"
            )

    def check_plaintext(self, path: str) -> None:
        """Refuse to read a file of an encrypted table without a key, unless the client's configuration allows that."""
        if self.plaintext.files != "allow":
            raise PolicyError(
                f"{path} has no key, so it is in plaintext, in an encrypted table, or its key was lost. Whoever can "
                f"write to the storage can make such files. {policy.PLAINTEXT_FILES}=allow in your own configuration, "
                "as a property of load_catalog or open_table, lets them be read; a table's property does not"
            )

    def clear(self) -> None:
        """Forget the keys of files, and metadata."""
        self._metadata.clear()
        self.files.clear()
        for state in list(self._tables.values()):
            state.seen = {}

    # ------------------------------------------------------------------------------------------------------ tables

    def table(self, uuid: Any, location: str) -> TableState:
        """Return what is known of a table, by its UUID and its location."""
        name = str(uuid).lower(), location.rstrip("/")
        with self._lock:
            state = self._tables.get(name) or TableState(self, name)
            self._tables[name] = state
            keep(self._recent, name, state, KNOWN_TABLES)
            return state

    def table_of(self, raw: Raw) -> TableState:
        """Return what is known of the table of these metadata."""
        return self.table(raw.get("table-uuid"), str(raw.get("location")))

    def check_metadata(self, raw: Raw, location: str) -> None:
        """Refuse metadata that were read: see `policy.check_raw`. IntegrityError if the table was encrypted before."""
        self.guard.check_read(raw, location)
        base, found = committing.get(), signs(raw.get("table-uuid"), raw.get("location"), location)
        encrypted = policy.is_encrypted(raw)
        if not encrypted and ((base is not None and base.io.encrypted) or not found.isdisjoint(_encrypted)):
            raise IntegrityError(
                f"{location} was changed: it is in plaintext, and this process has seen the table encrypted. If the "
                "table's owner did that, drop the table first, or start anew"
            )
        policy.check_raw(raw, location, self.plaintext)
        for sign in found if encrypted else ():
            keep(_encrypted, sign, None)

    # ---------------------------------------------------------------------------------------------------- metadata

    def raw(self, location: str) -> Raw | None:
        """Return the raw metadata of a location that this session has read or written."""
        return self._metadata.get(location, (None, b""))[0]

    def stored(self, location: str) -> bytes:
        """Return the bytes of the metadata file that `raw` was read from or written to; none if a server sent it."""
        return self._metadata.get(location, (None, b""))[1]

    def expect(self, location: str, metadata_hash: str | None) -> None:
        """Set the hash that a catalog has of the metadata at a location; None: the catalog has none."""
        keep(self._hashes, location, metadata_hash)

    def remember(self, raw: Raw, location: str, data: bytes = b"", *, own: bool = False) -> None:
        """Keep the raw metadata of a location, for commits that begin there, and what they say of keys.

        IntegrityError if the catalog has the hash of others, or knows the table under another master key. data: the
        file. own: this process writes it.
        """
        expected = self._hashes.get(location)
        if expected and not javajson.matches(raw, expected):
            raise IntegrityError(
                f"{location} was changed: the catalog's {javajson.METADATA_HASH} is that of other metadata"
            )
        if policy.is_encrypted(raw):
            self.table_of(raw).remember(raw, location, own=own)
        keep(self._metadata, location, (raw, data), KNOWN_METADATA)

    def set_edit(self, mark: str, change: Callable[[Raw], Raw] | None) -> None:
        """Set, or with None forget, the edit that the commit with this mark makes."""
        if change is None:
            self._edits.pop(mark, None)
        else:
            self._edits[mark] = change

    def edit(self, mark: str) -> Callable[[Raw], Raw]:
        """Return the edit that the commit with this mark makes. PolicyError if there is none."""
        if mark not in self._edits:
            raise PolicyError("the commit carries the mark of another process's edit: load the table again")
        return self._edits[mark]


class ListKeys:
    """The keys of the manifest lists that metadata name, whose ``encryption-keys`` are given by id.

    A KEK that the KMS refuses is asked for once.
    """

    def __init__(self, entries: Mapping[Any, Any], kms: KmsClient) -> None:
        self._entries, self._kms = entries, kms
        self._refused: dict[str, str] = {}

    def __call__(self, snapshot: Raw) -> StandardKeyMetadata | None:
        """Return the key of a snapshot's list; None if it is in plaintext.

        KeyAccessError if the key or its KEK is lost, or the KMS refuses.
        """
        key_id = snapshot.get("key-id")
        if not key_id:
            return None
        key = self._entries.get(key_id)
        kek_id = str((key or {}).get("encrypted-by-id"))
        if kek_id in self._refused:
            raise KeyAccessError(self._refused[kek_id])
        kek = self._entries.get(kek_id)
        entries = [one for one in (key, kek) if one is not None]
        try:
            return manifest_list_key(read_encryption_keys(entries), key_id, self._kms)
        except KeyAccessError as error:
            if kek is not None:
                self._refused[kek_id] = str(error)
            raise


class TableState:
    """What a session knows of the table of this UUID and location. Threads may share it."""

    def __init__(self, session: Session, name: tuple[str, str]) -> None:
        self.session, self._name = session, name
        self.upgrading = False  # whether PyIceberg is shown the table, in plaintext of version 3, as one of version 2
        self._lists: dict[str, str | None] = {}  # the key-id of each manifest list
        self._entries: dict[str, Any] = {}  # of encryption-keys, by id
        self._first: Any = None  # the encryption-keys as the table was first loaded or written
        self._pending: dict[str, bytes] = {}
        self.seen: dict[str, object] = {}  # what lists said of the manifests that `find` has read

    def sent(self) -> tuple[Any, ...]:
        """Return what another process must know to read the table as this one does. It has no key, and no client."""
        settings, known = self.session.settings(), (dict(self._lists), dict(self._entries))
        return self.session.token, settings, self._name, *known, set(self.session.masters.get(self._name, ()))

    def receive(self, lists: dict[str, str | None], entries: dict[str, Any], masters: set[str]) -> None:
        """Take key-ids of lists, encryption-keys and master keys, as `sent` returned them in another process."""
        self._lists.update(lists)
        self._entries.update(entries)
        if masters:
            self.session.masters.setdefault(self._name, set()).update(masters)
            _encrypted.update(dict.fromkeys(signs(*self._name, "")))

    def remember(self, raw: Raw, location: str, *, own: bool = False) -> None:
        """Keep what metadata say of keys. IntegrityError for another master key, unless it is this process's `own`."""
        key_id = raw["properties"][policy.KEY_ID]
        if own:
            _masters.add((*self._name, key_id))
        known = self.session.masters.setdefault(self._name, {key_id})
        if not (key_id in known or (*self._name, key_id) in _masters or self.session.guard.allows(key_id)):
            raise IntegrityError(
                f"{location} was changed: its master key is {key_id!r}, and this catalog knows the table under "
                f"{', '.join(map(repr, sorted(known)))}. If the table's owner moved it to that key, load the "
                "catalog again, or name both keys in encryption.allowed-key-ids"
            )
        known.add(key_id)
        self._first = (raw.get("encryption-keys") or ()) if self._first is None else self._first
        for one in raw.get("encryption-keys") or ():
            keep(self._entries, one.get("key-id"), one)
        for one in raw.get("snapshots") or ():
            keep(self._lists, one.get("manifest-list"), one.get("key-id"))

    # ---------------------------------------------------------------------------------------------- manifest lists

    def hold_list(self, path: str, data: bytes) -> None:
        """Keep a manifest list as PyIceberg wrote it, until the metadata that name it are written."""
        self.session.check_writes()
        self._pending[path] = data

    def drop_written(self, raw: Raw) -> None:
        """Forget the manifest lists that metadata of the catalog name: their commit was made."""
        if self._pending:
            for snapshot in raw.get("snapshots") or ():
                self._pending.pop(snapshot.get("manifest-list"), None)

    def held_list(self, path: str) -> bytes | None:
        """Return a manifest list that is kept."""
        return self._pending.get(path)

    def names_list(self, path: str) -> bool:
        """Tell whether known metadata name a path as a manifest list."""
        return path in self._lists

    def lists(self) -> list[str]:
        """Return the paths of all known manifest lists that may be read, the newest first."""
        allows = self.session.plaintext.files == "allow"
        return [path for path, key_id in reversed(self._lists.items()) if path and (allows or key_id is not None)]

    def list_key(self, path: str) -> StandardKeyMetadata | None:
        """Return the key of a manifest list that known metadata name; None if it is in plaintext. See `ListKeys`."""
        return ListKeys(self._entries, self.session.kms)({"key-id": self._lists[path]})

    def wrap_list_key(self, raw: Raw, metadata: StandardKeyMetadata) -> tuple[Raw, str]:
        """Wrap the key of a new manifest list. Returns metadata with the key, and its id, for the snapshot.

        By a KEK that was made here: metadata may name one that somebody else can open, and no reader can tell.
        """
        properties, keys = raw["properties"], read_encryption_keys(raw.get("encryption-keys") or ())
        length, sealing, own = int(properties.get(policy.KEY_LENGTH, "16")), self.session.guard.wrapping(raw), _keks
        if sealing is not None:
            own = {one.key_id: one.encrypted_key_metadata for one in keys if one.key_id == sealing}
        made, key_id = add_manifest_list_key(
            keys, metadata, self.session.kms, properties[policy.KEY_ID], length=length, own=own
        )
        self.made(keys, made)
        return {**raw, "encryption-keys": write_encryption_keys(made)}, key_id

    def made(self, before: Iterable[EncryptedKey], after: Iterable[EncryptedKey]) -> None:
        """Let the KEKs wrap that this process makes: those that are new, and those of its own that it wraps again."""
        old = {key.key_id: key.encrypted_key_metadata for key in before}
        for key in after:
            if key.is_kek and _keks.get(key.key_id) == old.get(key.key_id):
                _keks[key.key_id] = key.encrypted_key_metadata

    def others_keks(self, raw: Raw) -> list[str]:
        """Return the KEKs that other processes added or wrapped again since this table was first loaded."""
        first, now = (
            {key.key_id: key.encrypted_key_metadata for key in read_encryption_keys(keys) if key.is_kek}
            for keys in (self._first or (), raw.get("encryption-keys") or ())
        )
        return sorted(one for one, wrapped in now.items() if wrapped not in (first.get(one), _keks.get(one)))

    # ------------------------------------------------------------------------------------------------------- files

    def known(self, path: str) -> Known | None:
        """Return what is known of a file or manifest."""
        return self.session.files.get((self._name, path))

    def note(self, known: Known) -> None:
        """Keep what is known of a file or manifest that was written here."""
        keep(self.session.files, (self._name, known.path), known)

    def learn(self, known: Known, *, trusted: bool = True) -> None:
        """Keep what a list or manifest says of a file or manifest. IntegrityError if it is known with another key.

        trusted: False for a list or manifest in plaintext: it does not replace what one with tags has said, and no key
        in it counts.
        """
        before = self.known(known.path)
        if not trusted and (before is not None or known.key_metadata is not None):
            return
        if before is not None:
            if before.key_metadata is not None and _key(before) != _key(known):
                raise IntegrityError(
                    f"{known.path} comes with another key than before: its list or manifest was changed"
                )
            known.split_offsets = known.split_offsets or before.split_offsets  # another attempt to commit needs them
        self.note(known)

    def forget(self, path: str) -> bool:
        """Forget a path that is deleted. Returns whether it was a manifest list that was never written."""
        known = self.session.files.pop((self._name, path), None)
        return self._pending.pop(path, None) is not None and known is None


def _key(known: Known) -> tuple[bytes, bytes | None] | None:
    key = known.key_metadata
    return None if key is None else (key.encryption_key, key.aad_prefix)
