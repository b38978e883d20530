"""What one catalog knows: its KMS, the keys of files by path, manifest lists that are not yet written.

PyIceberg makes FileIO objects from properties, several for one table. They find their session by a token among these
properties. Paths and keys arrive in the order of dependency: metadata name lists, lists manifests, manifests files.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast.errors import IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import javajson, policy
from ags_fast.keys.cache import clear_cache as clear_keks
from ags_fast.keys.iceberg import manifest_list_key, read_encryption_keys
from ags_fast.keys.kms import as_kms, shared_client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.metadata import StandardKeyMetadata

__all__ = ["KMS_PREFIXES", "SESSION", "Session", "clear_cache", "kms_properties", "reading_session", "session_of"]

SESSION = "ags_fast.session"  # the property that names a session, of this process
KMS_PREFIXES = ("encryption.kms-", "kms.", "vault.", "azure.keyvault.")
# What clients of a KMS read beside. A mistyped name among these goes to them, too, so that they refuse it.
KMS_SHARED = ("encryption.", "client.", "gcs.impersonate.", "adls.token-credential-provider")
NOT_OF_KMS = (
    policy.KEY_ID,
    policy.KEY_LENGTH,
    policy.PLAINTEXT_FILES,
    "client.access-key-id",
    "client.secret-access-key",
    "client.session-token",
)
KNOWN_PATHS = 1_000_000  # that a session remembers, about 500 bytes each; older ones are looked up again
KNOWN_METADATA = 16  # metadata files that a session remembers
READERS = 16  # sessions of FileIO objects that no catalog made

_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
_readers: OrderedDict[frozenset[tuple[str, str]], Session] = OrderedDict()


def session_of(properties: Mapping[str, str]) -> Session | None:
    """Return the session that the properties of a FileIO name, or None."""
    return _sessions.get(properties.get(SESSION, ""))


def reading_session(properties: Mapping[str, str]) -> Session:
    """Return the session of FileIO objects that no catalog of ours made: one for each KMS. It only reads."""
    kms = kms_properties(properties)
    name = frozenset((kms or {}).items())
    session = _readers.get(name)
    if session is None:
        session = _readers[name] = Session(kms, writes=False)
        while len(_readers) > READERS:
            _readers.popitem(last=False)
    return session


def clear_cache() -> None:
    """Forget the keys of files and the unwrapped KEKs that this process holds. Tables look them up again."""
    for session in list(_sessions.values()):
        session.clear()
    clear_keks()


def kms_properties(properties: Mapping[str, Any]) -> dict[str, str] | None:
    """Return those of a catalog's properties that name a KMS; None if they name none."""
    chosen = {
        name: str(value)
        for name, value in properties.items()
        if name.startswith((*KMS_PREFIXES, *KMS_SHARED)) and name not in NOT_OF_KMS
    }
    return chosen if "encryption.kms-type" in chosen or "encryption.kms-impl" in chosen else None


class Session:
    """What one catalog object knows. Threads may share it. It is never pickled.

    Args:
        kms: A client or its properties. None: it is an error to open or to write an encrypted table.
        writes: Whether FileIO objects of the session write tables.
        io_impl: The class of the FileIO that opens files as they are stored; None is PyIceberg's choice by scheme.
        plaintext: What the client's own configuration says of plaintext: see `policy.plaintext_setting`.
    """

    def __init__(
        self,
        kms: KmsClient | Mapping[str, str] | None,
        *,
        writes: bool = True,
        io_impl: str | None = None,
        plaintext: str | None = None,
    ) -> None:
        self.token = secrets.token_hex(8)
        self.io_impl, self.plaintext = io_impl, plaintext
        self._writes = writes
        self._kms = kms
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._raw: OrderedDict[str, Raw] = OrderedDict()
        self._hashes: OrderedDict[str, str] = OrderedDict()
        self._lists: OrderedDict[str, tuple[str | None, list[Any]]] = OrderedDict()
        self._pending: dict[str, bytes] = {}
        self._upgraded: set[str] = set()
        self._encrypted: set[str] = set()  # the uuids of tables that were read as encrypted ones
        self._edits: dict[str, Callable[[Raw], Raw]] = {}
        self._written: dict[str, str] = {}
        _sessions[self.token] = self

    def __repr__(self) -> str:
        return f"<Session of {len(self._known)} files>"

    def __reduce__(self) -> str:
        raise TypeError("a catalog's session holds keys and is never pickled: load the catalog where it is used")

    @property
    def kms(self) -> KmsClient:
        """The client. KeyAccessError if the catalog was loaded without one."""
        if self._kms is None:
            raise KeyAccessError(
                "the table is encrypted, and no KMS was given: pass kms= to ags_fast.iceberg.load_catalog, or set "
                "encryption.kms-type and what it needs among the catalog's properties"
            )
        return shared_client(self._kms) if isinstance(self._kms, Mapping) else as_kms(self._kms)

    def check_writes(self) -> None:
        """Refuse to write from a FileIO that only reads."""
        if not self._writes:
            raise PolicyError(
                "this FileIO only reads encrypted tables: load the table from a catalog of ags_fast.iceberg to write it"
            )

    def check_plaintext(self, path: str) -> None:
        """Refuse to read a file of an encrypted table without a key, unless the client's configuration allows that."""
        if self.plaintext != "allow":
            raise PolicyError(
                f"{path} has no key, so it is in plaintext, in an encrypted table, or its key was lost. Whoever can "
                f"write to the storage can make such files. {policy.PLAINTEXT_FILES}=allow in your own configuration, "
                "as a property of load_catalog or open_table, lets them be read; a table's property does not"
            )

    def check_metadata(self, raw: Raw, location: str) -> None:
        """Refuse metadata that were read: see `policy.check_raw`.

        Raises:
            PolicyError: As there.
            IntegrityError: They are in plaintext, and the table was read as an encrypted one before.
        """
        policy.check_raw(raw, location, self.plaintext)
        table = str(raw.get("table-uuid"))
        if policy.is_encrypted(raw):
            self._encrypted.add(table)
        elif table in self._encrypted:
            raise IntegrityError(
                f"{location} was changed: it is in plaintext, and the same table was encrypted when this catalog read "
                "it last. If the table's owner did that, load the catalog again"
            )

    def clear(self) -> None:
        """Forget the keys of files. Manifest lists that wait for their commit stay."""
        with self._lock:
            self._known.clear()
            self._raw.clear()

    # ---------------------------------------------------------------------------------------------------- metadata

    def raw(self, location: str) -> Raw | None:
        """Return the raw metadata of a location that this session has read or written."""
        return self._raw.get(location)

    def expect(self, location: str, metadata_hash: str | None) -> None:
        """Set the hash that a catalog has of the metadata at a location; None: the catalog has none."""
        with self._lock:
            self._hashes.pop(location, None)
            if metadata_hash:
                self._hashes[location] = metadata_hash
                while len(self._hashes) > KNOWN_PATHS:
                    self._hashes.popitem(last=False)

    def remember(self, raw: Raw, location: str) -> None:
        """Keep the raw metadata of a location, for commits that begin there, and the keys of its manifest lists.

        Raises:
            IntegrityError: The catalog has the hash of other metadata.
        """
        expected = self._hashes.get(location)
        if expected is not None and not javajson.matches(raw, expected):
            raise IntegrityError(
                f"{location} was changed: the catalog's {javajson.METADATA_HASH} is that of other metadata"
            )
        with self._lock:
            self._raw[location] = raw
            self._raw.move_to_end(location)
            while len(self._raw) > KNOWN_METADATA:
                self._raw.popitem(last=False)
            if policy.is_encrypted(raw):
                self._remember_lists(raw)

    def _remember_lists(self, raw: Raw) -> None:
        entries = {one.get("key-id"): one for one in raw.get("encryption-keys") or () if isinstance(one, dict)}
        for snapshot in raw.get("snapshots") or ():
            path, key_id = snapshot.get("manifest-list"), snapshot.get("key-id")
            if path is not None:
                key = entries.get(key_id)
                kek = None if key is None else entries.get(key.get("encrypted-by-id"))
                self._lists[path] = key_id, [one for one in (key, kek) if one is not None]
        while len(self._lists) > KNOWN_PATHS:
            self._lists.popitem(last=False)

    def set_edit(self, mark: str, change: Callable[[Raw], Raw] | None) -> None:
        """Set, or with None forget, the edit that the commit with this mark makes."""
        if change is None:
            self._edits.pop(mark, None)
            self._written.pop(mark, None)
        else:
            self._edits[mark] = change

    def note_written(self, mark: str, location: str) -> None:
        """Keep where the metadata of the edit with this mark are written."""
        self._written[mark] = location

    def written(self, mark: str) -> str | None:
        """Return where the metadata of the edit with this mark were written; None if they were not, or by a server."""
        return self._written.get(mark)

    def edit(self, mark: str) -> Callable[[Raw], Raw]:
        """Return the edit that the commit with this mark makes. PolicyError if there is none."""
        if mark not in self._edits:
            raise PolicyError("the commit carries the mark of another process's edit: load the table again")
        return self._edits[mark]

    @contextmanager
    def upgrading(self, table_uuid: str) -> Iterator[None]:
        """Show PyIceberg a table in plaintext of version 3 as one of version 2, so that an edit can be committed."""
        self._upgraded.add(table_uuid)
        try:
            yield
        finally:
            self._upgraded.discard(table_uuid)

    def is_upgrading(self, raw: Raw) -> bool:
        """Tell whether `upgrading` is at work on the table of these metadata."""
        return raw.get("table-uuid") in self._upgraded

    # ---------------------------------------------------------------------------------------------- manifest lists

    def hold_list(self, path: str, data: bytes) -> None:
        """Keep a manifest list as PyIceberg wrote it, until the metadata that name it are written."""
        self.check_writes()
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
        allows = self.plaintext == "allow"
        return [path for path, (key_id, _) in reversed(self._lists.items()) if allows or key_id is not None]

    def list_key(self, path: str) -> StandardKeyMetadata | None:
        """Return the key of a manifest list that known metadata name; None if it is in plaintext.

        Raises:
            KeyAccessError: The key is lost, or the KMS refuses.
            IntegrityError: The key was changed.
        """
        key_id, entries = self._lists[path]
        return None if key_id is None else manifest_list_key(read_encryption_keys(entries), key_id, self.kms)

    # ------------------------------------------------------------------------------------------------------- files

    def known(self, path: str) -> Known | None:
        """Return what this session knows of a file or manifest."""
        return self._known.get(path)

    def learn(self, known: Known, *, trusted: bool = True) -> None:
        """Keep what is known of a file or manifest.

        Args:
            known: What a list or manifest says of it.
            trusted: False: that list or manifest is in plaintext, so it does not replace what one with tags has said.
        """
        if not trusted and known.path in self._known:
            return
        self._known[known.path] = known
        if len(self._known) > KNOWN_PATHS:
            with self._lock:
                while len(self._known) > KNOWN_PATHS:
                    self._known.popitem(last=False)

    def forget(self, path: str) -> bool:
        """Forget a path that is deleted. Returns whether it was a manifest list that was never written."""
        known = self._known.pop(path, None)
        return self._pending.pop(path, None) is not None and known is None
