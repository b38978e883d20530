"""An encrypted dataset: its keys, its versions, and the manifests that list the files of each version.

The layout and every byte of it are in docs/dataset-format.md. Nothing is ever changed in place: a new version is a new
numbered object, created exclusively, and that creation is the commit.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.commit import Commits
from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.keks import GRACE_MS, SCOPE, SLACK_USES, SUCCESSOR, Uses, Want, master_now, moved, retired
from ags_fast.dataset.names import HIDDEN, PLANS
from ags_fast.dataset.policy import Policy
from ags_fast.errors import ConcurrentChangeError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import Store
from ags_fast.keys.resolver import DatasetKeyStore, for_columns, open_key_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.keys.envelope import KeyEntry
    from ags_fast.keys.kms import KmsClient


class Ledger(Commits):
    """An encrypted dataset, opened with the caller's KMS. Holds no key: the keys stay in the process-wide cache."""

    @classmethod
    def open(
        cls,
        url: Any,
        kms: KmsClient,
        storage_options: Mapping[str, Any] | None = None,
        key_store: Any = None,
        *,
        pin: str | None = None,
        min_version: int | None = None,
    ) -> Ledger:
        """FileNotFoundError if there is no dataset at `url`. key_store: where its keys are, if not in the dataset.

        pin: the newest version must be the pinned one or descend from it, now (IntegrityError), and whenever it is
        read again. min_version: its number must be at least this (PolicyError).
        """
        store = url if isinstance(url, Store) else Store(url, storage_options)
        keys = open_key_store(key_store, kms, store=store, storage_options=storage_options)
        opened = cls(store, kms, keys, pin, min_version)
        if not opened._has_keys():
            raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no {HIDDEN}keys")
        if pin is not None or min_version:
            opened.current()
        return opened

    @classmethod
    def open_or_create(cls, store: Store, kms: KmsClient, wrapping_key_id: str, key_store: Any = None) -> Ledger:
        while True:
            opened = cls(store, kms, open_key_store(key_store, kms, store=store))
            if opened._has_keys():
                if key_store is not None and opened._is_new() and any(key.uses for key in opened.keys.list()):
                    raise PolicyError(
                        f"{opened.keys!r} has keys of the dataset {opened.id} already, and {store.url} has none: two "
                        "datasets must not share keys. Name another key store, or the folder of that dataset"
                    )
                return opened
            entry = Want(wrapping_key_id).new_kek(opened.kms)
            try:
                opened.keys.compare_and_swap({entry.key_id: entry}, 0)
            except ConcurrentChangeError:
                continue  # somebody else has just created it
            return opened

    def _is_new(self) -> bool:
        """Whether neither a version nor a plan is there."""
        return not self.version_numbers() and not any(self.store.list(PLANS))

    def _has_keys(self) -> bool:
        if self.keys.version == 0 and self.version_numbers() and self.keys.refresh() == 0:
            raise IntegrityError(
                f"{self.store.url} has versions, but {self.keys!r} has no {HIDDEN}keys: name the key_store that it was "
                "written with, if they are elsewhere; otherwise somebody took them away"
            )
        return self.keys.version > 0

    def use_kms(self, kms: KmsClient) -> None:
        """From now on, this client wraps and unwraps keys."""
        self._kms = kms
        if isinstance(self.keys, DatasetKeyStore):
            self.keys.use_kms(kms)

    # ---- keys

    def reserve(self, wants: Mapping[Want, Uses], policy: Policy | None = None) -> dict[Want, KeyEntry]:
        """For each kind, reserve these uses on the newest active key, or on a new one.

        One whose uses or lifetime are over, as `policy` has it, retires in favour of the new one. All of it is one
        change of the key store; calls of the KMS come before it.
        """
        policy = policy or Policy()
        made: dict[Want, KeyEntry] = {}
        while True:
            version = self.keys.version
            newest: dict[Want, KeyEntry] = {}
            for entry in sorted(self.keys.list("active"), key=lambda entry: (entry.created_ms, entry.key_id)):
                newest[Want.of(entry)] = entry
            chosen: dict[Want, KeyEntry] = {}
            changes: dict[str, KeyEntry | None] = {}
            for want, uses in wants.items():
                held = newest.get(want)
                if held is not None and not want.double_wrap:
                    chosen[want] = held  # the KMS counts its own
                    continue
                if held is None or policy.outlived(held.created_ms) or not policy.has_room(held.uses, *uses):
                    if not policy.has_room(0, *uses):
                        raise PolicyError(
                            f"one KEK would wrap {uses.data_keys} data keys, and the dataset's policy allows "
                            f"{policy.kek_uses}: share it among fewer files by the policy's kek_scope"
                        )
                    if want not in made:
                        self._check_not_left(want.wrapping_key_id, newest.values())
                        made[want] = want.new_kek(self.kms)
                        if held is not None:
                            made[want] = moved(made[want], held)
                    if held is not None:
                        changes[held.key_id] = retired(held, made[want].key_id, GRACE_MS)
                    held = made[want]
                chosen[want] = held.replace(uses=policy.reserved(held.uses, *uses)) if want.double_wrap else held
                changes[held.key_id] = chosen[want]
            try:
                if changes:
                    self.keys.compare_and_swap(changes, version)
            except ConcurrentChangeError:
                self.keys.refresh()
                continue
            return chosen

    def _check_not_left(self, wrapping_key_id: str, active: Iterable[KeyEntry]) -> None:
        """PolicyError if the dataset has left this master key: there may be a reason, of which not every job knows."""
        now = master_now(wrapping_key_id, active)
        if now != wrapping_key_id:
            raise PolicyError(
                f"the keys of {self.store.url} were rotated from the master key {wrapping_key_id!r} to {now!r}: "
                f"pass wrapping_key_id={now!r}, or rotate them back"
            )

    def main_key(self) -> KeyEntry:
        """The newest key that may seal documents; where there is none, that wraps data keys. PolicyError without."""
        active = [entry for entry in self.keys.list("active") if not for_columns(entry)]
        ours = [entry for entry in active if SCOPE not in entry.properties]
        documents = [entry for entry in ours if entry.double_wrap]
        if not active:
            raise PolicyError("the dataset has no active key: name a wrapping_key_id")
        return max(documents or ours or active, key=lambda entry: (entry.created_ms, entry.key_id))

    def document_key(self) -> str:
        """The key that seals documents and tables now. Who wraps DEKs reserves SLACK_USES of it for them, too."""
        entry = self.main_key()
        if not entry.double_wrap:  # of a dataset in single wrap, made by an ags_fast that had none for documents
            want = Want(entry.wrapping_key_id)
            entry = self.reserve({want: Uses(spare=SLACK_USES)})[want]
        return entry.key_id

    def active(self, key_id: str) -> str:
        """The key itself, or if it is retired the one that took its place."""
        entry = self.keys.get(key_id)
        want = Want.of(entry)
        try:
            while entry.state != "active" and SUCCESSOR in entry.properties:
                entry = self.keys.get(entry.properties[SUCCESSOR])
        except KeyAccessError:  # a successor that was retired, too, and is gone
            pass
        if entry.state == "active":
            return entry.key_id
        want = want._replace(wrapping_key_id=master_now(want.wrapping_key_id, self.keys.list("active")))
        return self.reserve({want: Uses()})[want].key_id

    def rewrap(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """The same files, with DEKs that retired keys wrap wrapped by those that took their places."""
        counts = wrapped_by(entries)
        moves = {key_id: new for key_id in counts if (new := self.active(key_id)) != key_id}
        if not moves:
            return list(entries)
        self.add_uses({new: counts[old] for old, new in moves.items()})
        envelope = self.envelope
        wraps = [entry.wraps(self.id) for entry in entries]
        todo: dict[str, list[tuple[bytes, bytes]]] = {key_id: [] for key_id in moves}
        for key_id, wrapped, bound in chain.from_iterable(wraps):
            if key_id in moves:
                todo[key_id].append((wrapped, bound))
        done = {old: iter(envelope.rewrap_many(old, moves[old], items)) for old, items in todo.items()}
        return [
            entry.with_wraps([(moves[k], next(done[k])) if k in moves else (k, wrapped) for k, wrapped, _ in those])
            for entry, those in zip(entries, wraps, strict=True)
        ]

    def add_uses(self, uses: Mapping[str, int]) -> None:
        """Count that these keys wrap so many more."""

        def changes() -> dict[str, KeyEntry | None]:
            entries = [self.keys.get(key_id) for key_id in uses]
            return {e.key_id: e.replace(uses=e.uses + uses[e.key_id]) for e in entries if e.double_wrap}

        self.change_keys(changes, "change")

    def change_keys(self, changes: Callable[[], Mapping[str, KeyEntry | None]], operation: str) -> None:
        """Change the key store as `changes` says; it is asked again if somebody else was first."""
        while True:
            version = self.keys.refresh()
            try:
                if made := changes():
                    self.keys.compare_and_swap(made, version, operation=operation)
                return
            except ConcurrentChangeError:
                continue
