"""One version of a dataset's keys: the document ``_ags/keys/00000001.json``, opened, changed and sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.chain import Chain, sha256
from ags_fast.keys.document import KEYS_FORMAT, KIND_NBYTES, Document, seal_document, taken
from ags_fast.keys.entry import KeyEntry, for_columns, newest_active, seals_documents
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.stores.base import Change
from ags_fast.keys.stores.parts import entries_in, parts_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores.parts import Part

__all__ = ["MAX_NBYTES", "KeysVersion", "next_sealer", "sealer_of"]

MAX_NBYTES = KIND_NBYTES[KEYS_FORMAT]  # of a document: a bound for what a lie can allocate
OPTIONAL = ("keys", "sealer", "buckets", "earlier")  # fields that a document may lack


def sealer_of(entries: Iterable[KeyEntry]) -> KeyEntry | None:
    """Return the entry that seals a document. A dataset in single wrap has none that `seals_documents`."""
    entries = list(entries)
    return newest_active(e for e in entries if seals_documents(e)) or newest_active(
        e for e in entries if not for_columns(e)
    )


def next_sealer(before: KeyEntry, changes: Mapping[str, KeyEntry | None]) -> KeyEntry | None:
    """Return the sealer after `changes`; None if all entries must be looked at, since the old sealer lost its rank."""

    def rank(entry: KeyEntry) -> tuple[bool, int]:
        return seals_documents(entry), entry.created_ms

    after = {before.key_id: before, **changes}
    best = sealer_of(entry for entry in after.values() if entry is not None)
    return best if best is not None and rank(best) >= rank(before) else None


class KeysVersion(NamedTuple):
    """A version of a dataset's keys. `body` is the document's, with whatever fields it has."""

    dataset_id: str
    number: int
    entries: dict[str, KeyEntry]  # all entries; if there are buckets, only the sealer
    buckets: tuple[Part | None, ...]  # 2**k of them, or none; an empty bucket has no object
    history: list[Change]  # the last changes
    earlier: tuple[Part, ...]  # parts with the changes before
    body: dict[str, Any]
    chain: Chain  # the digests of the versions before
    sha256: str = ""  # hex, of the document as it is stored

    @classmethod
    def empty(cls, dataset_id: str) -> KeysVersion:
        """Return what comes before the first version."""
        return cls(dataset_id, 0, {}, (), [], (), {}, Chain(0))

    @classmethod
    def opened(cls, data: bytes, number: int, path: str, kms: KmsClient, dataset_id: str | None) -> KeysVersion:
        """Open a document.

        Args:
            data: Its bytes.
            number: The number that it is stored under.
            path: Where it is stored.
            kms: The client that unwraps its sealer.
            dataset_id: The dataset that it must be of; None accepts any.
        """
        document = Document(data, path)
        # The sealer's entry is only a claim here, and enough to ask the KMS for its key. Only the KMS can unwrap the
        # key, and the key shows whether all of the document is authentic.
        sealer = document.sealer and entries_in({"keys": [document.sealer]}, path).get(document.key_id)
        if sealer is None:
            raise FormatError(f"{path} is sealed with {document.key_id!r}, which is not among its keys")
        try:
            own = kms.for_dataset(dataset_id or document.dataset_id)
            body = document.authentic(Envelope(own, {sealer.key_id: sealer}), dataset_id)
        except (FormatError, KeyAccessError) as error:  # the KMS's, which does not know where its key comes from
            raise type(error)(f"{path}: {error}") from None
        return cls.parsed(body, number, path, sha256(data))

    @classmethod
    def parsed(cls, body: dict[str, Any], number: int, path: str, digest: str) -> KeysVersion:
        """Return the version that the body of an authentic document describes. FormatError if it is malformed."""
        buckets = parts_in(body, "buckets", path)
        if ("buckets" in body) != ("sealer" in body) or ("buckets" in body) == ("keys" in body):
            raise FormatError(f"{path} has no list of keys, or two")
        if "buckets" in body and (len(buckets) < 1 or len(buckets) & len(buckets) - 1):
            raise FormatError(f"{path} has {len(buckets)} buckets, which is not a power of 2")
        entries = entries_in({"keys": [body["sealer"]]} if buckets else body, path)
        if body.get("format") != KEYS_FORMAT or body.get("version") != number or type(body["version"]) is not int:
            raise IntegrityError(f"{path} holds {body.get('format')!r} version {body.get('version')!r}")
        changes = body.get("history")
        if not isinstance(changes, list):
            raise FormatError(f"{path} has no history")
        history = [Change.from_json(change, path) for change in changes]
        earlier = tuple(filter(None, parts_in(body, "earlier", path)))
        chain = Chain.from_json(body, number, path)
        return cls(body["dataset_id"], number, entries, buckets, history, earlier, body, chain, digest)

    def sealed(self, kms: KmsClient, path: str) -> tuple[KeysVersion, bytes]:
        """Return the version with its digest, and the bytes of its document."""
        sealer = sealer_of(self.entries.values())
        assert sealer is not None
        envelope = Envelope(kms.for_dataset(self.dataset_id), {sealer.key_id: sealer})
        data = taken(seal_document(envelope, sealer.key_id, self.dataset_id, path, self.body), KEYS_FORMAT, path)
        return self._replace(sha256=sha256(data)), data

    def following(
        self,
        number: int,
        operation: str,
        change: Change,
        *,
        entries: dict[str, KeyEntry],
        buckets: tuple[Part | None, ...],
        history: list[Change],
        earlier: tuple[Part, ...],
        chain: Chain,
    ) -> KeysVersion:
        """Return a later version, which keeps fields of the body that a newer ags_fast wrote.

        Args:
            number: Its number.
            operation: What made it.
            change: Its last change.
            entries: All entries; if there are buckets, only the sealer.
            buckets: The buckets, if there are any.
            history: The changes that its document holds.
            earlier: The parts with the changes before.
            chain: The digests of the versions before it.
        """
        body = {
            **self.body,
            "format": KEYS_FORMAT,
            "dataset_id": self.dataset_id,
            "version": number,
            "time_ms": change.time_ms,
            "parent": number - 1,
            "operation": operation,
            "keys": None if buckets else [entry.to_json() for entry in entries.values()],
            "sealer": next(iter(entries.values())).to_json() if buckets else None,
            "buckets": [part and part._asdict() for part in buckets] if buckets else None,
            "history": [one.to_json() for one in history],
            "earlier": [part._asdict() for part in earlier] or None,
            **chain.to_json(),
        }
        body = {name: value for name, value in body.items() if value is not None or name not in OPTIONAL}
        return KeysVersion(self.dataset_id, number, entries, buckets, history, earlier, body, chain)

    def next_chain(self) -> tuple[Chain, dict[str, bytes]]:
        """Return the chain of the version after this one, and the chain objects that it needs beside what is there."""
        return self.chain.next(self.sha256) if self.number else (Chain(1), {})

    def parts(self) -> list[Part]:
        """Return the parts that the version consists of, beside its document."""
        return [part for part in (*self.buckets, *self.earlier) if part]
