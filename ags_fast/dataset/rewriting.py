"""Manifests that a commit writes: what is left of those that change, and what is merged."""

from __future__ import annotations

import hashlib
from heapq import merge
from typing import TYPE_CHECKING

from ags_fast.dataset.manifests import Manifests
from ags_fast.dataset.merging import SMALL_ENTRIES, apart, lanes, path_bytes, to_merge
from ags_fast.dataset.names import manifest_name
from ags_fast.dataset.tables import chunks
from ags_fast.dataset.versions import runs_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.tables import TableRef
    from ags_fast.dataset.versions import Version


class Rewriting(Manifests):
    """The files of each version of a dataset, and the manifests of the version to come."""

    def without(
        self, head: Version | None, taken: Mapping[str, str], sets: Collection[str | None] = ()
    ) -> tuple[dict[str, list[FileEntry]], list[FileEntry]]:
        """By the path of each manifest that changes what is left of it without `taken`, path -> file; and what is gone.
        What is left of numbered sets in `sets` is no set any more."""
        if head is None or not taken:
            return {}, []
        left: dict[str, list[FileEntry]] = {}
        gone: list[FileEntry] = []
        envelope = self.envelope
        # Who loses a member of a set is not known without a look.
        touched = head.manifests if sets else {ref: None for ref, _ in self.find_where(head, taken).values()}
        for ref in touched:
            entries = self.open_table(ref, envelope)
            kept = [
                entry if entry.set_id not in sets else entry._replace(set_id=None, part=None, parts=None)
                for entry in entries
                if taken.get(entry.path) != entry.file
            ]
            gone += [entry for entry in entries if taken.get(entry.path) == entry.file]
            if kept != entries:
                left[ref.path] = kept
        return left, gone

    def merged(
        self,
        head: Version | None,
        added: Sequence[FileEntry],
        left: Mapping[str, list[FileEntry]],
        writer: Writer,
    ) -> list[TableRef]:
        """The manifests of the version after `head`: `left` in the place of those that change, and the entries of
        `added`, sorted by path, merged with what is about as small."""
        more = list(added)
        runs: list[list[TableRef]] = []
        for run in runs_of(head.manifests if head else ()):
            refs: list[TableRef] = []
            for ref in run:
                kept = left.get(ref.path)
                if kept is None:
                    refs.append(ref)
                elif added and len(kept) < SMALL_ENTRIES:
                    more += kept
                else:
                    refs += [made._replace(run=ref.run or ref.path) for made in writer.write(kept)]
            if refs:
                runs.append(refs)
        if not more:
            return [ref for run in runs for ref in run]
        more.sort(key=path_bytes)
        places = set(to_merge(runs, len(more)))
        chosen = [ref for place in places for ref in runs[place]]
        stay = apart(chosen, more)
        streams = [self.rows_of_lane(lane) for lane in lanes(ref for ref in chosen if ref not in stay)]
        made = sorted([*stay, *writer.write(merge(more, *streams, key=path_bytes))], key=lambda ref: ref.first)
        rest = [ref for place, run in enumerate(runs) if place not in places for ref in run]
        return rest + [ref._replace(run=made[0].path) for ref in made]

    def rows_of_lane(self, lane: Iterable[TableRef]) -> Iterator[FileEntry]:
        envelope = self.envelope
        for ref in lane:
            yield from self.open_table(ref, envelope)

    def remove_unused(self, written: Mapping[bytes, TableRef], version: Version | None) -> None:
        """Remove the manifests that were written for an attempt that lost, and that the version does not name."""
        named = {ref.path for ref in version.manifests} if version else set()
        for ref in written.values():
            if ref.path not in named:
                self.store.delete(ref.path)


class Writer:
    """Writes the manifests of one job. Those that an attempt has written which lost are used by the next one."""

    def __init__(self, dataset: Rewriting, job_id: str, written: dict[bytes, TableRef]) -> None:
        self._dataset = dataset
        self._job_id = job_id
        self._written = written

    def write(self, entries: Iterable[FileEntry]) -> list[TableRef]:
        """Write manifests of these entries, which are sorted by path."""
        key_id = self._dataset.keyring.document_key()
        return [self._write(chunk, key_id) for chunk in chunks(entries)]

    def _write(self, entries: Sequence[FileEntry], key_id: str) -> TableRef:
        what = hashlib.sha256(key_id.encode())
        for entry in entries:
            what.update(repr((entry.file, entry.key_id, entry.set_id)).encode("utf-8", "surrogateescape"))
        name = what.digest()
        if name not in self._written:
            path = manifest_name(self._job_id)
            self._written[name] = self._dataset.seal_table(path, entries, key_id, self._dataset.envelope)
        return self._written[name]
