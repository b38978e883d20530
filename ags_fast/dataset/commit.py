"""Commits: new versions, made by compare-and-swap on the number of the newest version."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.manifests import Manifests
from ags_fast.dataset.names import VERSIONS, manifest_name
from ags_fast.dataset.tables import chunks
from ags_fast.dataset.versions import KeysAt, Version, key_store_digest
from ags_fast.errors import ConcurrentChangeError, IntegrityError
from ags_fast.fs.numbered import numbered
from ags_fast.keys.chain import Chain

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.tables import TableRef
    from ags_fast.keys.envelope import Envelope


class Commits(Manifests):
    """Makes versions."""

    def commit(
        self,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        *,
        base: Version | None,
        replaced: Mapping[str, str] | None = None,
        policy: Policy | None = None,
    ) -> tuple[Version | None, list[FileEntry]]:
        """Make a version with the files of `add`; returns it, and those that could not be added.

        DEKs whose key was retired since they were planned are wrapped anew. policy: None leaves what the dataset has.

        base: the version that `add` was planned on. replaced: path -> file of entries to take out, as they were there.
        A path that came, went or changed since then is another job's, and stays as that job has it: ours is returned.
        KMS calls and manifests come before the commit, so that whatever fails leaves the version before.
        """
        replaced = dict(replaced or {})
        written: dict[tuple[Any, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.current(writes=True)
            try:
                version, refused = self._commit_on(head, operation, job_id, add, base, replaced, policy, written)
            except FileExistsError:
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self._remove(ref for ref in written.values() if version is None or ref not in version.manifests)
            return version, [entry for entry in add if entry.path in refused]

    def is_newest(self, version: Version | None) -> bool:
        """Whether nobody has made a version since."""
        return self.version_numbers()[-1:] == ([version.number] if version else [])

    def _commit_on(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        base: Version | None,
        replaced: Mapping[str, str],
        policy: Policy | None,
        written: dict[tuple[Any, ...], TableRef],
    ) -> tuple[Version | None, set[str]]:
        """`commit`, if `head` is still the newest version. FileExistsError, or IntegrityError, if it is not."""
        add = self.keyring.rewrap(add)
        key_id, envelope = self.keyring.document_key(), self.envelope
        refused, there = self._conflicts(add, base, head, replaced, envelope)
        added = [entry for entry in add if entry.path not in refused and entry.path not in there]
        if not added:
            return head, refused
        names = {entry.path for entry in added}
        taken = {path: file for path, file in replaced.items() if path in names}
        refs, gone = self._without(head, taken, key_id, envelope, written, job_id) if head else ([], [])
        refs += [self._manifest(chunk, key_id, envelope, written, job_id) for chunk in chunks(added)]
        return self._succeed(head, operation, job_id, refs, added, gone, policy), refused

    def _succeed(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        refs: Sequence[TableRef],
        added: Sequence[FileEntry],
        gone: Sequence[FileEntry],
        policy: Policy | None = None,
    ) -> Version:
        nbytes = sum(entry.plain_length for entry in added) - sum(entry.plain_length for entry in gone)
        return self.succeed(head, operation, job_id, refs, len(added) - len(gone), nbytes, policy)

    def _without(
        self,
        head: Version,
        taken: Mapping[str, str],
        key_id: str,
        envelope: Envelope,
        written: dict[tuple[Any, ...], TableRef],
        job_id: str,
        sets: Container[str | None] = (),
    ) -> tuple[list[TableRef], list[FileEntry]]:
        """The manifests of a version without the entries of `taken`, path -> file, and these entries. What is left of
        numbered sets in `sets` is no set any more."""
        if not taken:
            return list(head.manifests), []
        refs: list[TableRef] = []
        gone: list[FileEntry] = []
        for ref in head.manifests:
            entries = self.open_table(ref, envelope)
            kept = [
                entry if entry.set_id not in sets else entry._replace(set_id=None, part=None, parts=None)
                for entry in entries
                if taken.get(entry.path) != entry.file
            ]
            gone += [entry for entry in entries if taken.get(entry.path) == entry.file]
            if kept == entries:
                refs.append(ref)
            elif kept:
                refs.append(self._manifest(kept, key_id, envelope, written, job_id))
        return refs, gone

    def commit_removal(self, job_id: str, remove: Sequence[FileEntry]) -> tuple[Version, list[FileEntry]]:
        """Make a version without the files of `remove`; returns it, and those of them that stay, since another job has
        put another file in their place meanwhile. What another job has removed, too, needs no version."""
        files = {entry.path: entry.file for entry in remove}
        sets = {entry.set_id for entry in remove} - {None}
        written: dict[tuple[Any, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.committed(self.current(writes=True))
            try:
                key_id, envelope = self.keyring.document_key(), self.envelope
                refs, gone = self._without(head, files, key_id, envelope, written, job_id, sets)
                made = self._succeed(head, "remove", job_id, refs, (), gone) if gone else head
                now = {entry.path for entry in self.entries(made)} if len(gone) < len(remove) else set()
            except (FileExistsError, ConcurrentChangeError):
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self._remove(ref for ref in written.values() if ref not in made.manifests)
            return made, [entry for entry in remove if entry.path in now]

    def commit_whole(
        self,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        remove: Sequence[FileEntry],
    ) -> Version:
        """Make a version with the files of `add` and without those of `remove`; all of it, or nothing.

        A path of `add` must be free, or in `remove`. ConcurrentChangeError if another job has changed one of the paths
        since they were looked at.
        """
        written: dict[tuple[Any, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.current(writes=True)
            try:
                made = self._commit_whole_on(head, operation, job_id, add, remove, written)
            except FileExistsError:
                continue
            except ConcurrentChangeError:
                self._remove(written.values())
                raise
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what the head has was expired meanwhile
            self._remove(ref for ref in written.values() if ref not in made.manifests)
            return made

    def _commit_whole_on(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        remove: Sequence[FileEntry],
        written: dict[tuple[Any, ...], TableRef],
    ) -> Version:
        """`commit_whole`, if `head` is still the newest version. FileExistsError, or IntegrityError, if it is not."""
        if head is not None and head.job_id == job_id:
            return head  # the answer to an earlier attempt was lost
        add = self.keyring.rewrap(add)
        key_id, envelope = self.keyring.document_key(), self.envelope
        old = {entry.path: entry.file for entry in remove}
        paths = old.keys() | {entry.path for entry in add}
        there = {
            entry.path: entry.file
            for ref in (head.manifests if head else ())
            for entry in self.open_table(ref, envelope)
            if entry.path in paths
        }
        changed = sorted(path for path in paths if there.get(path) != old.get(path))
        if changed:
            more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
            raise ConcurrentChangeError(
                f"another job has changed {changed[0]!r}{more} in the dataset meanwhile: nothing was committed"
            )
        sets = {entry.set_id for entry in remove} - {None}
        refs, gone = self._without(head, old, key_id, envelope, written, job_id, sets) if head else ([], [])
        refs += [self._manifest(chunk, key_id, envelope, written, job_id) for chunk in chunks(add)]
        return self._succeed(head, operation, job_id, refs, add, gone)

    def succeed(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        refs: Sequence[TableRef],
        files: int = 0,
        plain_length: int = 0,
        policy: Policy | None = None,
    ) -> Version:
        """Create the version after `head`, which this is the commit of. FileExistsError if somebody was first.

        files, plain_length: what it has more than `head`.
        """
        chain, made = head.chain.next(head.sha256) if head else (Chain(1), {})
        head = head or Version(0, None, "", "", 0, 0, 0, ())
        key_id = self.keyring.document_key()
        at = self.keys.version
        version = Version(
            head.number + 1,
            head.number or None,
            operation,
            job_id,
            time.time_ns() // 1_000_000,
            head.files + files,
            head.plain_length + plain_length,
            tuple(refs),
            head.policy if policy is None else policy,
            key_id,
            chain,
            KeysAt(at, key_store_digest(self.keys, at)),
        )
        body = {
            "format": "ags-version",
            "dataset_id": self.id,
            "version": version.number,
            **{name: getattr(version, name) for name in ("parent", "operation", "job_id", "time_ms")},
            "files": version.files,
            "plain_length": version.plain_length,
            "manifests": [ref.to_json() for ref in refs],
            "policy": version.policy.to_json(),
            **chain.to_json(),
            "key_store": version.keys._asdict(),
        }
        self._chain_objects.write(made)
        digest = self.seal_body(VERSIONS + numbered(version.number), body, key_id, self.envelope)
        self._head = version._replace(sha256=digest)
        return self._head

    def _conflicts(
        self,
        add: Sequence[FileEntry],
        base: Version | None,
        head: Version | None,
        replaced: Mapping[str, str],
        envelope: Envelope,
    ) -> tuple[set[str], set[str]]:
        """The paths of `add` that are another job's by now, and those that somebody has committed for us."""
        known = set(base.manifests) if base else set()
        now = set(head.manifests) if head else set()
        if known == now:
            return set(), set()
        ours = {entry.path for entry in add}
        present: dict[str, str] = {}
        for ref in head.manifests if head else ():
            if replaced or ref not in known:
                present.update((e.path, e.file) for e in self.open_table(ref, envelope) if e.path in ours)
        there = {entry.path for entry in add if present.get(entry.path) == entry.file}
        return {path for path in ours - there if present.get(path) != replaced.get(path)}, there

    def _manifest(
        self,
        entries: Sequence[FileEntry],
        key_id: str,
        envelope: Envelope,
        written: dict[tuple[Any, ...], TableRef],
        job_id: str,
    ) -> TableRef:
        name = key_id, tuple((entry.file, entry.key_id, entry.set_id) for entry in entries)
        if name not in written:
            written[name] = self.seal_table(manifest_name(job_id), entries, key_id, envelope)
        return written[name]

    def _remove(self, refs: Iterable[TableRef]) -> None:
        for ref in refs:
            self.store.delete(ref.path)
