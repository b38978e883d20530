"""Commits: new versions, made by compare-and-swap on the number of the newest version."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset import decide
from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.decide import Change, Wish
from ags_fast.dataset.names import VERSIONS
from ags_fast.dataset.rewriting import Rewriting, Writer
from ags_fast.dataset.versions import Batch, KeysAt, Version, key_store_digest, runs_of, with_batch
from ags_fast.errors import AgsError, ConcurrentChangeError
from ags_fast.fs.numbered import numbered
from ags_fast.keys.chain import Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.tables import TableRef


class Committed(NamedTuple):
    """The outcome of a commit.

    Attributes:
        version: The version that was made; the newest version if nothing was to change.
        before: The version that `change` changed; None: there was no version, or the answer to the commit was lost.
        change: What the commit changed.
    """

    version: Version | None
    before: Version | None
    change: Change


class Commits(Rewriting):
    """Makes versions."""

    def commit(self, wish: Wish) -> Committed:
        """Make the next version as `decide.next_version` decides. If nothing is to change, make no version.

        Data keys whose KEK has retired since the job was planned are wrapped again. Calls of the KMS and manifests come
        before the commit, so that any failure leaves the version as it was. If the storage's answer to the commit was
        lost, the version is found.

        Args:
            wish: What the job wants.

        Raises:
            ConcurrentChangeError: Another job has changed a path of a wish that is to be committed whole.
        """
        try:
            return self._commit(wish)
        except (ConcurrentChangeError, OSError):
            with suppress(AgsError, OSError):
                self.keys.refresh()
                for version in self.versions(after=wish.base.number if wish.base else 0):
                    if version.job_id == wish.job_id:
                        there = self._objects_at(version, wish)
                        return Committed(version, None, decide.next_version(replace(wish, whole=False), version, there))
            raise

    def _commit(self, wish: Wish) -> Committed:
        written: dict[bytes, TableRef] = {}  # manifests of an attempt that lost, for the next attempt

        def decided(head: Version | None) -> Change:
            seen = (wish.base and wish.base.sha256) == (head and head.sha256)
            return decide.next_version(wish, head, None if seen else self._objects_at(head, wish))

        def applied(head: Version | None, change: Change) -> Committed:
            return Committed(self._apply(head, wish, change, Writer(self, wish.job_id, written)), head, change)

        made = until_unchanged(
            lambda: self.current(writes=True), decided, applied, lambda head: not self.is_newest(head)
        )
        with suppress(AgsError, OSError):  # what stays is left to `sweep`
            self._remove_unused({ref.path for ref in written.values()}, wish, made)
        if wish.whole and (late := made.change.refused):
            if wish.clears and not wish.remove:
                raise ConcurrentChangeError(
                    "another job has added files to the dataset, which had none, meanwhile: nothing was committed"
                )
            more = f" and {len(late) - 1} more files" if len(late) > 1 else ""
            raise ConcurrentChangeError(
                f"another job has changed {late[0].path!r}{more}, or a file or folder in that place, meanwhile: "
                "nothing was committed"
            )
        return made

    def _remove_unused(self, written: set[str], wish: Wish, made: Committed) -> None:
        """Remove manifests of attempts that lost, if no version names them."""
        written.difference_update(ref.path for ref in (made.version.manifests if made.version else ()))
        # The answer to an attempt may have been lost, so that it only seems to have lost.
        for version in self.versions(after=wish.base.number if wish.base else 0) if written else ():
            written.difference_update(ref.path for ref in version.manifests)
        for path in written:
            self.store.delete(path)

    def is_newest(self, version: Version | None) -> bool:
        """Return whether no newer version was made."""
        return self.newest_number() == (version.number if version else 0)

    def _objects_at(self, version: Version | None, wish: Wish) -> dict[str, str]:
        """Return {path: object} of the files of a version that decide what becomes of a wish."""
        found = self.find_where(version, wish.paths_around(), [entry.path for entry in wish.add])
        return {path: entry.file for path, (_, entry) in found.items()}

    def _apply(self, head: Version | None, wish: Wish, change: Change, writer: Writer) -> Version | None:
        """Make the version after `head`. Raises FileExistsError or IntegrityError if `head` is not the newest."""
        if not change:
            return head
        added = self.keyring.rewrap(change.adds)
        left, gone = self.without(head, change.removes, change.breaks)
        refs = self.merged(head, added, left, writer, compact=bool(change.merges))
        nbytes = sum(entry.plain_length for entry in added) - sum(entry.plain_length for entry in gone)
        count = len(added) - len(gone)
        return self.succeed(
            head, wish.operation, wish.job_id, refs, count, nbytes, policy=change.policy, once=wish.once
        )

    def succeed(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        refs: Sequence[TableRef],
        files: int = 0,
        plain_length: int = 0,
        policy: Policy | None = None,
        once: tuple[str, int] | None = None,
    ) -> Version:
        """Create the version after `head`: this is the commit.

        Args:
            head: The newest version; None: there is none.
            operation: What the version says of its job.
            job_id: The id of the job.
            refs: The manifests of the version.
            files: How many files the version has more than `head`.
            plain_length: How many bytes of plaintext the version has more than `head`.
            policy: The policy of the version; None: as in `head`.
            once: The id of a stream and the number of its batch, which the version records; None: none.

        Raises:
            FileExistsError: Somebody else has made the next version.
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
        streams = head.streams if once is None else with_batch(head.streams, Batch(*once, version.time_ms))
        version = version._replace(streams=streams)
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
        if version.streams:
            body["streams"] = [batch._asdict() for batch in version.streams]
        self._chain_objects.write(made)
        self._lists.write(set(lists) - set(head.lists))
        digest = self.seal_body(VERSIONS + numbered(version.number), body, key_id, self.envelope)
        listed = [self._lists.get(name, VERSIONS) for name in lists]
        single = [ref._replace(run="") for (ref, *more) in runs if not more]
        self._head = version._replace(
            sha256=digest, lists=tuple(lists), manifests=(*chain.from_iterable(listed), *single)
        )
        return self._head
