"""Manifests that a commit writes: what is left of those that change, and what is merged."""

from __future__ import annotations

import hashlib
from heapq import merge
from typing import TYPE_CHECKING

from ags_fast.dataset.entries import without_set
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
        self, head: Version | None, taken: Mapping[str, str], breaks: Collection[str]
    ) -> tuple[dict[str, list[FileEntry]], list[FileEntry]]:
        """Take files out of manifests.

        Args:
            head: The version.
            taken: The files to take out: {path: object}.
            breaks: The numbered sets whose remaining members get no number any more.

        Returns:
            What is left of each manifest that changes, by the path of the manifest; and the files that are taken out.
        """
        if head is None or not taken:
            return {}, []
        left: dict[str, list[FileEntry]] = {}
        gone: list[FileEntry] = []
        envelope = self.envelope
        # Any manifest may have members of a set.
        touched = head.manifests if breaks else {ref: None for ref, _ in self.find_where(head, taken).values()}
        for ref in touched:
            entries = self.open_table(ref, envelope)
            kept = [
                entry if entry.set_id not in breaks else without_set(entry)
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
        *,
        compact: bool = False,
    ) -> list[TableRef]:
        """Write the manifests of the version after `head`.

        Args:
            head: The newest version; None: there is none.
            added: The files to add. They are merged with the runs that are about as small.
            left: What is left of manifests that change: {path of the manifest: files}.
            writer: Writes the manifests.
            compact: Merge all runs into one.

        Returns:
            The manifests of the new version.
        """
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
        if not more and not compact:
            return [ref for run in runs for ref in run]
        more.sort(key=path_bytes)
        places = set(range(len(runs)) if compact else to_merge(runs, len(more)))
        chosen = [ref for place in places for ref in runs[place]]
        stay = apart(chosen, more)
        streams = [self._files_of(lane) for lane in lanes(ref for ref in chosen if ref not in stay)]
        made = sorted([*stay, *writer.write(merge(more, *streams, key=path_bytes))], key=lambda ref: ref.first)
        rest = [ref for place, run in enumerate(runs) if place not in places for ref in run]
        return rest + [ref._replace(run=made[0].path) for ref in made]

    def _files_of(self, lane: Iterable[TableRef]) -> Iterator[FileEntry]:
        envelope = self.envelope
        for ref in lane:
            yield from self.open_table(ref, envelope)


class Writer:
    """Writes the manifests of one job. An attempt to commit uses the manifests that an earlier attempt has written."""

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
