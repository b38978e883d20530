"""What one client demands of the seals of tables, and what it has seen of them.

``encryption.metadata-seal`` is the client's setting: ``write`` (the default) seals each new state of a table whose
state before was sealed; ``require`` reads and changes sealed states only; ``off`` looks at no seal and makes none. A
pin of a sealed state makes its table ``require``.
"""

from __future__ import annotations

import hmac
import threading
import warnings
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.errors import IntegrityError, PolicyError
from ags_fast.keys.iceberg import read_encryption_keys, rotate_keks, sealing_secret, write_encryption_keys
from ags_fast.seals.pins import OpenPin, SealedPin, parse
from ags_fast.seals.seal import Seal, SealKey, make, seal_of
from ags_fast.seals.state import PROPERTY, digest, uuid_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from uuid import UUID

    from ags_fast.keys.kms import KmsClient

__all__ = ["CHANGED", "DO", "FOREIGN", "SEALED", "SETTING", "UNSEALED", "WHY", "Guard", "Sealed"]
__all__ += ["registering", "sealing"]

SETTING, SETTINGS = "encryption.metadata-seal", ("require", "write", "off")
VERDICTS, TABLES = 16, 1000  # that are kept
KEY_ID, KEY_LENGTH = "encryption.key-id", "encryption.data-key-length"
SEALED, CHANGED, FOREIGN, UNSEALED = "sealed", "changed", "foreign", "unsealed"
DO = "If its owner did that, look at what `ags-fast iceberg seal TABLE --dry-run` shows, and then seal the table"
WHY = {
    CHANGED: "was changed after it was sealed, by Java or by somebody else, or moved from where it was written",
    FOREIGN: "has the seal of another table, or one by a key that the table does not have",
    UNSEALED: "has no seal",
}

named: ContextVar[str | None] = ContextVar("named", default=None)  # the identifier that this thread loads or changes
adopting: ContextVar[str] = ContextVar("adopting", default="")  # see `sealing`


class Sealed(NamedTuple):
    """What the metadata of a table are: the verdict, and the seal and its key, if the seal is authentic."""

    verdict: str
    seal: Seal | None = None
    key: SealKey | None = None


held: ContextVar[tuple[Any, str]] = ContextVar("held", default=(None, ""))  # see `Guard.loading`
memory: ContextVar[dict[UUID, SealedPin]] = ContextVar("memory", default={})  # see `Guard.loading`  # noqa: B039
naming: ContextVar[bool] = ContextVar("naming", default=False)  # see `registering`
moving: ContextVar[KmsClient | None] = ContextVar("moving", default=None)  # where its commit moves the KEKs to
begun: ContextVar[Sealed | None] = ContextVar("begun", default=None)  # on what the commit of this thread begins


class Guard:
    """What a client demands. Threads may share it.

    Args:
        setting: ``require``, ``write`` or ``off``.
        pins: By the identifiers of tables: pins, as text.
        kms: Gives the client of the KMS.
        allowed: Gives the patterns of master keys that the client's own configuration names.

    Raises:
        ValueError: The setting or a pin is malformed, or ``require`` has nothing to tell the owner's keys by.
    """

    def __init__(
        self,
        setting: str,
        pins: Mapping[str, str],
        kms: Callable[[], KmsClient],
        allowed: Callable[[], Collection[str]],
    ) -> None:
        if setting not in SETTINGS:
            raise ValueError(f"{SETTING} must be one of {', '.join(SETTINGS)}, not {setting!r}")
        self.setting = setting
        self.pins: dict[str, SealedPin | OpenPin] = {name: parse(text) for name, text in pins.items()}
        sealed = any(isinstance(one, SealedPin) for one in self.pins.values())
        if setting == "require" and not allowed() and not sealed:
            raise ValueError(
                f"{SETTING}=require needs encryption.allowed-key-ids, or pins of sealed tables: without them whoever "
                "has any key of the KMS can seal"
            )
        if setting == "off" and sealed:
            raise ValueError(f"{SETTING}=off looks at no seal, and a pin needs one: use write or require")
        self.served = False  # whether a REST server makes the metadata, and names their files
        self._kms, self._allowed = kms, allowed
        self._seen: dict[UUID, SealedPin] = {}  # the newest sealed state of each table
        self._lock = threading.Lock()
        self._verdicts: dict[str, tuple[Any, Sealed]] = {}  # by location: metadata, and what they are

    def look(self, raw: Mapping[str, Any], location: str, *, keep: bool = True) -> Sealed:
        """Return what metadata are. keep: they may be looked at again.

        Raises:
            IntegrityError: The seal is forged or malformed.
            PolicyError: It is of a later scheme.
            KeyAccessError: The KMS refuses its KEK.
        """
        known, found = self._verdicts.get(location, (None, Sealed(UNSEALED)))
        if known is not raw or naming.get():  # a file that was read again may be another
            found = self._looked(raw, location)
            if keep and not naming.get():
                _keep(self._verdicts, location, (raw, found), VERDICTS)
        return found

    def _looked(self, raw: Mapping[str, Any], location: str) -> Sealed:
        seal = seal_of(raw)
        if seal is None:
            return Sealed(UNSEALED)
        entry = next((one for one in raw.get("encryption-keys") or () if one.get("key-id") == seal.kek), None)
        if seal.table != uuid_of(raw) or entry is None:
            return Sealed(FOREIGN, seal)
        wrapping_key_id = str(entry.get("encrypted-by-id"))
        if self._allowed() and not self.allows(wrapping_key_id):
            raise IntegrityError(
                f"{location} is sealed under the master key {wrapping_key_id!r}, which you do not allow"
            )
        secret = sealing_secret(read_encryption_keys([entry]), seal.kek, self._kms(), seal.table.bytes)
        if not seal.is_by(key := SealKey(secret, seal.table)):
            raise IntegrityError(f"{location} was changed: its seal was forged")
        there = seal.file in (location.rpartition("/")[2], None if self.served or naming.get() else "")
        same = there and wrapping_key_id == raw["properties"].get(KEY_ID)
        if same and hmac.compare_digest(digest(raw), seal.state):
            return Sealed(SEALED, seal, key)
        return Sealed(CHANGED, seal, key)

    def allows(self, wrapping_key_id: str) -> bool:
        """Tell whether the client's own configuration names a master key in ``encryption.allowed-key-ids``."""
        return any(fnmatchcase(wrapping_key_id, one) for one in self._allowed())

    def requires(self) -> bool:
        """Tell whether the table that this thread loads or changes must be sealed."""
        return self.setting == "require" or isinstance(self.pins.get(named.get() or ""), SealedPin)

    def check_read(self, raw: Mapping[str, Any], location: str) -> None:
        """Refuse metadata that the client may not read. IntegrityError."""
        pin = self.pins.get(named.get() or "")
        if (self.setting != "require" and pin is None) or adopting.get():  # what is being sealed has no seal yet
            return
        if isinstance(pin, OpenPin):
            pin.check(raw)
            if self.setting != "require":
                return
        if not isinstance(pin, SealedPin) and not self._allowed():
            raise ValueError(f"{SETTING}=require needs encryption.allowed-key-ids, or a pin of {named.get()}")
        found = _required(self.look(raw, location), location)
        assert found.seal is not None and found.key is not None
        folders = (f"{raw['location'].rstrip('/')}/metadata", raw["properties"].get("write.metadata.path"))
        if not self.served and location.rpartition("/")[0] not in [one.rstrip("/") for one in folders if one]:
            raise IntegrityError(f"{location} was moved: its table keeps its metadata in {folders[0]}")
        if isinstance(pin, SealedPin):
            pin.check(found.seal, found.key)
        if (seen := memory.get().get(found.seal.table)) is not None:
            seen.check(found.seal, found.key)
        self._remember(found)

    def made(self, raw: Mapping[str, Any], location: str) -> None:
        """Remember a state that a commit has made."""
        if self.requires():
            self._remember(self.look(raw, location))

    def _remember(self, found: Sealed) -> None:
        if found.verdict == SEALED and found.seal is not None and found.key is not None:
            pin = SealedPin.of(found.seal, found.key)
            with self._lock:
                if (seen := self._seen.get(pin.table)) is None or seen.n <= pin.n:
                    _keep(self._seen, pin.table, pin, TABLES)

    @contextmanager
    def loading(self, identifier: str, handle: tuple[Any, str] = (None, "")) -> Iterator[None]:
        """Let this thread read a table's newest metadata. handle: those that its commit was made of, and where."""
        with _set(named, identifier), _set(memory, dict(self._seen)), _set(held, handle):
            yield

    def see_base(self, raw: Mapping[str, Any], location: str) -> Sealed:
        """Check in full what a commit begins on. IntegrityError if the client requires a seal, and there is none."""
        if self.setting == "off":
            return Sealed(UNSEALED)
        try:
            found = self.look(raw, location)
        except (IntegrityError, PolicyError) as error:  # forged, or of a later scheme
            if not adopting.get() and (self.requires() or isinstance(error, IntegrityError)):
                raise
            found = Sealed(CHANGED)
        handle, at = held.get()
        if handle is not None and handle is not raw:
            if at == location and handle != raw:
                raise IntegrityError(f"{location} was changed while the table was open: load the table again")
            if found.verdict == SEALED and self.look(handle, at).verdict != SEALED:
                location, found = at, Sealed(CHANGED)  # the commit was begun on something else
        if self.requires() and not adopting.get():
            _required(found, location)
        begun.set(found)
        return found

    def seals(self, base: Sealed, at: str) -> bool:
        """Tell whether a commit is sealed, by what `see_base` says of its base. A warning says why it no longer is."""
        if base.verdict == SEALED or adopting.get():
            return True
        if base.verdict != UNSEALED:
            warnings.warn(f"{at} {WHY[base.verdict]}: the commit is not sealed. {DO}", stacklevel=3)
        return False

    def wrapping(self, raw: Mapping[str, Any]) -> str | None:
        """Return the KEK that alone may wrap in metadata that a commit makes of a sealed state; None: no such state."""
        base = begun.get()
        if base is None or base.verdict != SEALED or base.seal is None or self.setting == "off":
            return None
        return base.seal.kek if raw["properties"].get(PROPERTY) == base.seal.text else None

    def seal(self, base: Mapping[str, Any] | None, at: str, raw: dict[str, Any], location: str | None) -> bool:
        """Seal the metadata of a commit, which are changed, if their base is sealed, or is none.

        Returns whether that took a new KEK, which is then among their keys.

        Args:
            base: What the commit begins on; None: a new table, or one that was in plaintext.
            at: Where that is.
            raw: The new metadata, complete but for the seal.
            location: Where they are to be; None: where a REST server puts them.
        """
        if self.setting == "off":
            return False
        found = Sealed(UNSEALED) if base is None else self.see_base(base, at)
        if base is not None and not self.seals(found, at):
            return False
        keys = read_encryption_keys(raw.get("encryption-keys") or ())
        if fresh := not any(one.is_kek for one in keys) or adopting.get() == "new":
            master, length = raw["properties"][KEY_ID], int(raw["properties"].get(KEY_LENGTH, "16"))
            keys = rotate_keks(keys, self._kms(), master, length=length)
            raw["encryption-keys"] = write_encryption_keys(keys)
        before = {one.get("key-id") for one in (base or {}).get("encryption-keys") or ()}
        made = [one.key_id for one in keys if one.is_kek and one.key_id not in before]
        parent = found.seal if found.key is not None else None  # else nobody knows who made it
        there = [one.key_id for one in keys if parent is not None and one.key_id == parent.kek]
        kek = (made or there or [""])[0]
        if not kek:
            raise IntegrityError(f"the commit takes away the KEK that sealed {at}, and makes no other")
        table, key = uuid_of(raw), found.key if parent is not None and parent.kek == kek else None
        if key is None:
            key = SealKey(sealing_secret(keys, kek, moving.get() or self._kms(), table.bytes), table)
        name, adopts = location and location.rpartition("/")[2], found.verdict != SEALED and parent is not None
        sealed = make(raw, kek, key, parent, found.key, file=name, adopts=adopts)
        raw["properties"] = {**raw["properties"], PROPERTY: sealed.text}
        if location is not None:
            _keep(self._verdicts, location, (raw, Sealed(SEALED, sealed, key)), VERDICTS)
        return fresh


def _keep(kept: dict[Any, Any], name: Any, value: Any, most: int) -> None:
    kept[name] = value
    if len(kept) > most:
        kept.pop(next(iter(kept)), None)


def _required(found: Sealed, location: str) -> Sealed:
    if found.verdict != SEALED:
        raise IntegrityError(f"{location} {WHY[found.verdict]}, and this client requires a seal. {DO}")
    return found


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def sealing(kek: str) -> AbstractContextManager[None]:
    """Let the commit of this thread seal what was not sealed, with the "same" KEK or a "new" one."""
    return _set(adopting, kek)


def registering() -> AbstractContextManager[None]:
    """Let what this thread reads be metadata that get a name, so that a seal need not name their file."""
    return _set(naming, True)
