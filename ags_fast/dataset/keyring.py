"""The KEKs of one dataset: find, reserve and change them, and wrap data keys under those in use."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from ags_fast.dataset import decide
from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.keks import Uses, Want, clock_ms
from ags_fast.dataset.policy import Policy
from ags_fast.errors import ConcurrentChangeError
from ags_fast.keys.entry import KeyEntry, seals_documents
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.stores import DatasetKeyStore, Entries
from ags_fast.keys.uses import has_reserved, reserved_ahead, take_reserved, uses_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ags_fast.dataset.decide import Change
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores import KeyResolver

AHEAD_USES = 1 << 24  # a policy that allows a KEK fewer uses has none reserved ahead


class Keyring:
    """The key store of a dataset, opened with the caller's KMS. Holds no key: the keys stay in the process-wide cache.

    Attributes:
        keys: The key store.
        proven: The ids of keys in single wrap that this process has seen to open what they wrap (see `Envelope`).

    Args:
        keys: The key store.
        kms: The client of the KMS.
        where: Names the dataset in errors.
    """

    def __init__(self, keys: KeyResolver, kms: KmsClient, where: str) -> None:
        self.keys = keys
        self.proven: set[str] = set()
        self._kms = kms
        self._where = where

    def use_kms(self, kms: KmsClient) -> None:
        """Have this client wrap and unwrap keys from now on."""
        self._kms = kms
        if isinstance(self.keys, DatasetKeyStore):
            self.keys.use_kms(kms)

    @property
    def kms(self) -> KmsClient:
        """The client of the KMS, bound to the dataset if the client can be."""
        return self._kms.for_dataset(self.keys.dataset_id) if self._kms.binds_dataset else self._kms

    @property
    def entries(self) -> Mapping[str, KeyEntry]:
        """The keys by their ids. Each is looked up when it is asked for."""
        return Entries(self.keys)

    @property
    def envelope(self) -> Envelope:
        """What wraps and unwraps data keys under these keys."""
        return Envelope(self.kms, self.entries, self.proven)

    def main_key(self) -> KeyEntry:
        """Return the newest key that may seal documents. Raises PolicyError without such a key."""
        return self._sealer() or decide.main_key(self.keys.list("active"))

    def _sealer(self) -> KeyEntry | None:
        """Return the main key, of a store that tells it without a look at all keys."""
        found = self.keys.sealer() if isinstance(self.keys, DatasetKeyStore) else None
        return found if found is not None and seals_documents(found) else None

    def _candidates(self, wants: Mapping[Want, Uses], new_scopes: bool) -> list[KeyEntry]:
        """Return active keys, with the newest of each kind that is wanted. Of many keys, not all are looked at."""
        main = self._sealer()
        if main is not None and all(
            want == Want.of(main) or (new_scopes and want.scope and want._replace(scope=None) == Want.of(main))
            for want in wants
        ):
            return [main]
        return self.keys.list("active")

    def document_key(self) -> str:
        """Return the id of the key that seals documents and tables now.

        A job that wraps DEKs reserves SLACK_USES of that key for documents and tables.
        """
        return self.main_key().key_id

    def active(self, key_id: str) -> str:
        """Return the id of the key itself or, if it has retired, of its heir. Makes a KEK if no heir is left."""
        found = decide.heir(self.entries, self.keys.get(key_id))
        return found.key_id if isinstance(found, KeyEntry) else self.reserve({found: Uses()})[found].key_id

    def reserve(
        self, wants: Mapping[Want, Uses], policy: Policy | None = None, *, new_scopes: bool = False
    ) -> Mapping[Want, KeyEntry]:
        """Reserve uses of each kind on the newest active key, or on a new key (see `decide.reserve`).

        This is one change of the key store, after the calls of the KMS. A process that reserves often reserves ahead,
        and then needs no change.

        Args:
            wants: How often the caller may use a key of each kind.
            policy: How long and how often a KEK may serve; None: the default.
            new_scopes: Whether no key has one of these scopes yet.

        Returns:
            The key to use of each kind.

        Raises:
            PolicyError: One KEK may not be used that often, or the dataset has left a master key.
            KeyAccessError: The KMS refuses to make a KEK.
        """
        made: dict[Want, KeyEntry] = {}
        ahead: dict[Want, int] = {}
        policy = policy or Policy()
        if (ready := self._reserved_before(wants, policy)) is not None:
            return ready

        def reserved(version: int) -> Change:
            there = self._candidates(wants, new_scopes)
            ahead.clear()
            ahead.update(self._uses_ahead(there, wants, policy))
            more = {want: uses._replace(data_keys=uses.data_keys + ahead.get(want, 0)) for want, uses in wants.items()}
            return self.completed(lambda: decide.reserve(there, more, policy, made, clock_ms(), self._where), made)

        def swap(version: int, change: Change) -> Mapping[Want, KeyEntry]:
            self.swap(change.keys, version)
            for want, count in ahead.items():
                reserved_ahead(self.keys, change.chosen[want].key_id, count)
            return change.chosen

        return until_unchanged(lambda: self.keys.version, reserved, swap)

    def _reserved_before(self, wants: Mapping[Want, Uses], policy: Policy) -> Mapping[Want, KeyEntry] | None:
        """Return the newest active key of each kind, if this process has reserved all these uses before; else None."""
        if not has_reserved(self.keys.dataset_id):
            return None
        self.keys.refresh()
        newest = {Want.of(key): key for key in decide.active(self._candidates(wants, False))}
        if any(want not in newest or policy.outlived(newest[want].created_ms, clock_ms()) for want in wants):
            return None
        chosen = {want: newest[want] for want in wants}
        if all(take_reserved(self.keys, key.key_id, sum(wants[want])) for want, key in chosen.items()):
            return chosen
        return None  # what was taken is lost: the key store counts more uses than there are, never fewer

    def _uses_ahead(self, there: Sequence[KeyEntry], wants: Mapping[Want, Uses], policy: Policy) -> Mapping[Want, int]:
        """Return how many uses of each key to reserve ahead. Nothing if a key is new: the next job may want another."""
        newest = {Want.of(key): key for key in decide.active(there)}
        if policy.kek_uses < AHEAD_USES or any(want not in newest or not want.double_wrap for want in wants):
            return {}
        ahead = {}
        for want, uses in wants.items():
            count = uses_ahead(self.keys, newest[want].key_id, sum(uses))
            room = policy.has_room(newest[want].uses, uses.data_keys + count, uses.spare)
            ahead[want] = count if room else 0
        return ahead

    def completed(self, decide: Callable[[], Change], made: dict[Want, KeyEntry]) -> Change:
        """Have the KMS make the KEKs that a decision needs.

        Args:
            decide: Makes the decision, with the KEKs of `made`.
            made: The KEKs that the KMS has made, by kind. New ones are added.

        Returns:
            The decision with all its KEKs.
        """
        change = decide()
        while change.makes:
            made |= {want: want.new_kek(self.kms) for want in change.makes}
            change = decide()
        return change

    def swap(self, changes: Mapping[str, KeyEntry | None], version: int, operation: str = "change") -> None:
        """Change the key store.

        Args:
            changes: The entries to put in, by id; None takes an entry out.
            version: The version of the key store that the changes were decided on.
            operation: The reason, for people who look into the store.

        Raises:
            ConcurrentChangeError: The key store is at another version, which is read now.
        """
        try:
            if changes:
                self.keys.compare_and_swap(changes, version, operation=operation)
        except ConcurrentChangeError:
            self.keys.refresh()
            raise

    def change(self, changes: Callable[[], Mapping[str, KeyEntry | None]], operation: str) -> None:
        """Change the key store as `changes` says. `changes` is called again when somebody else was first."""
        until_unchanged(
            self.keys.refresh,
            lambda version: changes(),
            lambda version, made: self.swap(made, version, operation),
        )

    def add_uses(self, uses: Mapping[str, int]) -> None:
        """Add to the uses of keys. In single wrap nothing is counted."""

        def changes() -> dict[str, KeyEntry | None]:
            entries = [self.keys.get(key_id) for key_id in uses]
            return {e.key_id: e.replace(uses=e.uses + uses[e.key_id]) for e in entries if e.double_wrap}

        self.change(changes, "change")

    def rewrap(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the same files. DEKs that retired keys wrap are wrapped again, by the heirs of these keys."""
        counts = wrapped_by(entries)
        moves = {key_id: new for key_id in counts if (new := self.active(key_id)) != key_id}
        if not moves:
            return list(entries)
        self.add_uses({new: counts[old] for old, new in moves.items()})
        envelope = self.envelope
        wraps = [entry.wraps(self.keys.dataset_id) for entry in entries]
        todo: dict[str, list[tuple[bytes, bytes]]] = {key_id: [] for key_id in moves}
        for key_id, wrapped, bound in chain.from_iterable(wraps):
            if key_id in moves:
                todo[key_id].append((wrapped, bound))
        done = {old: iter(envelope.rewrap_many(old, moves[old], items)) for old, items in todo.items()}
        return [
            entry.with_wraps([(moves[k], next(done[k])) if k in moves else (k, wrapped) for k, wrapped, _ in those])
            for entry, those in zip(entries, wraps, strict=True)
        ]
