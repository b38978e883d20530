"""Commits: new versions, made by compare-and-swap on the number of the newest version."""

from __future__ import annotations

import time
from heapq import merge
from itertools import chain
from typing import TYPE_CHECKING

from ags_fast.dataset.merging import lanes, path_bytes, to_compact
from ags_fast.dataset.names import VERSIONS
from ags_fast.dataset.rewriting import Rewriting, Writer
from ags_fast.dataset.versions import KeysAt, Version, key_store_digest, runs_of
from ags_fast.errors import ConcurrentChangeError, IntegrityError
from ags_fast.fs.numbered import numbered
from ags_fast.keys.chain import Chain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.tables import TableRef


class Commits(Rewriting):
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
        written: dict[bytes, TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.current(writes=True)
            try:
                version, refused = self._commit_on(head, operation, job_id, add, base, replaced, policy, written)
            except (FileExistsError, ConcurrentChangeError):
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self.remove_unused(written, version)
            return version, [entry for entry in add if entry.path in refused]

    def is_newest(self, version: Version | None) -> bool:
        """Whether nobody has made a version since."""
        return self.newest_number() == (version.number if version else 0)

    def _commit_on(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        base: Version | None,
        replaced: Mapping[str, str],
        policy: Policy | None,
        written: dict[bytes, TableRef],
    ) -> tuple[Version | None, set[str]]:
        """`commit`, if `head` is still the newest version. FileExistsError, or IntegrityError, if it is not."""
        add = self.keyring.rewrap(add)
        refused, there = self._conflicts(add, base, head, replaced)
        added = [entry for entry in add if entry.path not in refused and entry.path not in there]
        if not added:
            return head, refused
        added.sort(key=path_bytes)
        names = {entry.path for entry in added}
        taken = {path: file for path, file in replaced.items() if path in names}
        left, gone = self.without(head, taken)
        refs = self.merged(head, added, left, Writer(self, job_id, written))
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

    def commit_removal(self, job_id: str, remove: Sequence[FileEntry]) -> tuple[Version, list[FileEntry]]:
        """Make a version without the files of `remove`; returns it, and those of them that stay, since another job has
        put another file in their place meanwhile. What another job has removed, too, needs no version."""
        files = {entry.path: entry.file for entry in remove}
        sets = {entry.set_id for entry in remove} - {None}
        written: dict[bytes, TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.committed(self.current(writes=True))
            try:
                left, gone = self.without(head, files, sets)
                refs = self.merged(head, (), left, Writer(self, job_id, written))
                made = self._succeed(head, "remove", job_id, refs, (), gone) if gone else head
                now = self.find_many(made, files) if len(gone) < len(remove) else {}
            except (FileExistsError, ConcurrentChangeError):
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self.remove_unused(written, made)
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
        written: dict[bytes, TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.current(writes=True)
            try:
                made = self._commit_whole_on(head, operation, job_id, add, remove, written)
            except FileExistsError:
                continue
            except ConcurrentChangeError:
                if head is not None and not self.has_version(head.number):
                    continue  # expired while it was read
                self.remove_unused(written, None)
                raise
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what the head has was expired meanwhile
            self.remove_unused(written, made)
            return made

    def _commit_whole_on(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        remove: Sequence[FileEntry],
        written: dict[bytes, TableRef],
    ) -> Version:
        """`commit_whole`, if `head` is still the newest version. FileExistsError, or IntegrityError, if it is not."""
        if head is not None and head.job_id == job_id:
            return head  # the answer to an earlier attempt was lost
        add = self.keyring.rewrap(add)
        old = {entry.path: entry.file for entry in remove}
        paths = old.keys() | {entry.path for entry in add}
        there = {path: entry.file for path, (_, entry) in self.find_where(head, paths).items()}
        changed = sorted(path for path in paths if there.get(path) != old.get(path))
        if changed:
            more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
            raise ConcurrentChangeError(
                f"another job has changed {changed[0]!r}{more} in the dataset meanwhile: nothing was committed"
            )
        sets = {entry.set_id for entry in remove} - {None}
        left, gone = self.without(head, old, sets)
        refs = self.merged(head, add, left, Writer(self, job_id, written))
        return self._succeed(head, operation, job_id, refs, add, gone)

    def commit_compaction(self, job_id: str) -> tuple[Version, list[TableRef]]:
        """Make a version with the same files in one run; returns it, and the manifests that were merged. If there is
        nothing to merge, the version stays."""
        written: dict[bytes, TableRef] = {}
        while True:
            head = self.committed(self.current(writes=True))
            try:
                writer = Writer(self, job_id, written)
                old = to_compact(head.manifests)
                if not old:
                    return head, []
                stay = [ref for ref in head.manifests if ref not in old]
                made = writer.write(merge(*(self.rows_of_lane(lane) for lane in lanes(old)), key=path_bytes))
                refs = sorted([*stay, *made], key=lambda ref: ref.first)
                run = refs[0].path
                version = self.succeed(head, "compact", job_id, [ref._replace(run=run) for ref in refs])
            except (FileExistsError, ConcurrentChangeError):
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self.remove_unused(written, version)
            return version, old

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
        links, made = head.chain.next(head.sha256) if head else (Chain(1), {})
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
            (),
            head.policy if policy is None else policy,
            key_id,
            links,
            KeysAt(at, key_store_digest(self.keys, at)),
        )
        runs = runs_of(refs)
        lists = [self._lists.add(run) for run in runs if len(run) > 1]
        body = {
            "format": "ags-version",
            "dataset_id": self.id,
            "version": version.number,
            **{name: getattr(version, name) for name in ("parent", "operation", "job_id", "time_ms")},
            "files": version.files,
            "plain_length": version.plain_length,
            "lists": lists,
            "manifests": [ref.to_json() for (ref, *more) in runs if not more],
            "policy": version.policy.to_json(),
            **links.to_json(),
            "key_store": version.keys._asdict(),
        }
        self._chain_objects.write(made)
        self._lists.write(set(lists) - set(head.lists))
        digest = self.seal_body(VERSIONS + numbered(version.number), body, key_id, self.envelope)
        listed = [self._lists.get(name, VERSIONS) for name in lists]
        single = [ref._replace(run="") for (ref, *more) in runs if not more]
        self._head = version._replace(
            sha256=digest, lists=tuple(lists), manifests=(*chain.from_iterable(listed), *single)
        )
        return self._head

    def _conflicts(
        self,
        add: Sequence[FileEntry],
        base: Version | None,
        head: Version | None,
        replaced: Mapping[str, str],
    ) -> tuple[set[str], set[str]]:
        """The paths of `add` that are another job's by now, and those that somebody has committed for us."""
        if (base and base.sha256) == (head and head.sha256):
            return set(), set()
        ours = {entry.path for entry in add}
        present = {path: entry.file for path, (_, entry) in self.find_where(head, ours).items()}
        there = {entry.path for entry in add if present.get(entry.path) == entry.file}
        return {path for path in ours - there if present.get(path) != replaced.get(path)}, there
