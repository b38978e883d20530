"""The sources of an encryption: which files of a tree are taken, and which of them are deleted afterwards."""

from __future__ import annotations

import fnmatch
import os
import string
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._types import Links, check_choice
from ags_fast.dataset.entries import exact_first
from ags_fast.dataset.files.contents import closing
from ags_fast.dataset.names import HIDDEN, check_path, folders_above
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.errors import AgsError, ConcurrentChangeError, PolicyError
from ags_fast.jobs.results import Row, describe
from ags_fast.jobs.run import verified
from ags_fast.jobs.work.context import Context, SourceChangedError, ends
from ags_fast.jobs.work.dispatch import work_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.log import Log
    from ags_fast.fs import Entry, Store
    from ags_fast.jobs.results import JobResult
    from ags_fast.jobs.run import Options


class Choice(NamedTuple):
    """Select the files of a source. The fields are arguments of `encrypt_files`."""

    hidden: bool = False
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    links: Links = "skip"

    @classmethod
    def of(cls, hidden: bool, include: Any, exclude: Any, links: Links) -> Choice:
        """Take the arguments of `encrypt_files`. Raises ValueError for an unknown `links`."""
        check_choice("links", links, Links)
        included, excluded = (
            None if patterns is None else (patterns,) if isinstance(patterns, str) else tuple(patterns)
            for patterns in (include, exclude)
        )
        return cls(hidden, included, excluded or (), links)

    def exact(self, names: set[str]) -> Choice:
        """Return the choice with patterns that match only the file, or the folder, of that name if there is one."""
        names |= {folder for name in names for folder in folders_above(name)}
        include, exclude = (tuple(exact_first(p, names) for p in ps or ()) for ps in (self.include, self.exclude))
        return self._replace(include=include or self.include, exclude=exclude)


def list_sources(source: Store, choice: Choice) -> tuple[list[Entry], list[Row]]:
    """List the files of a tree in the order of their names, and a row for each thing that is left out.

    Left out are what a store leaves out (see `Store.list_all`), what `choice` excludes, and what readers of such a tree
    skip: names that begin with ``.`` or ``_`` (``_SUCCESS``), files in folders with such names unless the folders are
    partitions (``_year=2026``), and checksums (``x.crc``).

    Raises:
        FileNotFoundError: There is no such folder.
        PolicyError: The tree holds a Delta, Iceberg or Hudi table, or links that `choice` refuses.
        ValueError: A pattern of `choice.include` matches nothing.
    """
    if source.local and os.path.isfile(source.url):
        raise NotADirectoryError(
            f"{source.url} is a file, and a job takes a folder: AgsWriter, or `ags-fast stream encrypt`, encrypts "
            "one file"
        )
    if source.local and not source.exists():
        raise FileNotFoundError(f"there is no folder {source.url}")
    listed, left_out = source.list_all()
    if choice.include or choice.exclude:
        choice = choice.exact({entry.path for entry in listed})
    if not listed and not left_out and not source.exists():
        raise FileNotFoundError(f"there is no folder {source.url}")
    files: list[Entry] = []
    unused = set(choice.include or ())
    rows: list[Row] = []
    for entry in listed:
        _refuse_tables(source, entry.path.split("/"))
        reason = _left_out(entry.path, choice, unused)
        if reason is None:
            files.append(entry)
        else:
            rows.append(_row(source, entry.path, *reason))
    for path, kind, why in left_out:
        reason = _left_out(path, choice, unused)
        if kind in ("OutsideLink", "DanglingLink", "LinkLoop") and reason is None:
            if choice.links == "error":
                raise PolicyError(f"{source.full_path(path)} is {why}: remove it, exclude it, or pass links='skip'")
            if kind == "OutsideLink":
                why += ": links='follow' takes what it leads to"
        rows.append(_row(source, path, *(reason or (kind, why))))
    if unused:
        raise ValueError(f"include={sorted(unused)[0]!r} matches no file of {source.url}")
    return files, sorted(rows)


def gone_files(
    source: Store, choice: Choice, listed: Sequence[Entry], left_out: Sequence[Row], files: Iterable[FileEntry]
) -> dict[str, FileEntry]:
    """Return those of a dataset's files that `choice` takes, and whose sources are gone, by path.

    What is left out of the source, or below a link that is, is not gone. `listed` and `left_out` are what
    `list_sources` returns.
    """
    there = {entry.path for entry in listed}
    out = {source.path_in(row.src) for row in left_out if row.error_class != "EmptyFolder"}
    if choice.include or choice.exclude:
        choice = choice.exact(there | out)
    gone: dict[str, FileEntry] = {}
    full: set[str] = set()  # folders with files that stay
    for file in files:
        above = folders_above(file.path)
        if file.path in there or not out.isdisjoint((file.path, *above)) or _left_out(file.path, choice, set()):
            full.update(above)
        else:
            gone[file.path] = file
    blocked = there & full  # sources in the places of such folders fail, so the files below them stay as they are
    return {path: file for path, file in gone.items() if blocked.isdisjoint(folders_above(path))}


def ends_of(source: Store, found: Entry) -> tuple[bytes, bytes]:
    """Return how a source begins and ends: see `ends`. Nothing if it cannot be read, which its task will report."""
    try:
        with closing(source.open_seekable(found.path, found)) as file:
            return ends(file)
    except (AgsError, OSError):
        return b"", b""


def _row(source: Store, path: str, kind: str, why: str) -> Row:
    if kind == "HiddenFile":
        try:
            check_path(path)
        except PolicyError as error:  # "." in a name of an object store is no folder that is hidden
            return Row(source.full_path(path), None, "failed", "PolicyError", describe(error))
    return Row(source.full_path(path), None, "skipped", kind, why)


def _left_out(path: str, choice: Choice, unused: set[str]) -> tuple[str, str] | None:
    """Return kind and reason if a path is left out. Patterns that match the path are removed from `unused`."""
    parts = path.rstrip("/").split("/")
    if parts[0] == HIDDEN.rstrip("/"):
        return "ReservedName", f"reserved: a dataset keeps its own files in {HIDDEN}"
    if choice.include is not None or choice.exclude:
        # A pattern that matches a folder takes all of it.
        above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        matched = [p for p in choice.include or () if any(fnmatch.fnmatchcase(name, p) for name in above)]
        unused.difference_update(matched)
        if choice.include is not None and not matched:
            return "Excluded", "no pattern of include matches it"
        for pattern in choice.exclude:
            if any(fnmatch.fnmatchcase(name, pattern) for name in above):
                return "Excluded", f"exclude={pattern!r} matches it"
    if choice.hidden:
        return None
    marked = path[0] in "._" or "/." in path or "/_" in path  # a quick check: few paths are
    if marked and any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts):
        return "HiddenFile", "hidden: readers of such folders skip it, and hidden=True takes it"
    if parts[-1].endswith((".crc", ".agstmp")):
        return "HiddenFile", "a checksum or temporary file: hidden=True takes it"
    return None


def _refuse_tables(source: Store, parts: Sequence[str]) -> None:
    for i, part in enumerate(parts[:-1]):
        kind = {"_delta_log": "Delta", ".hoodie": "Hudi"}.get(part)
        if part == "metadata" and parts[-1].endswith(".metadata.json") and i == len(parts) - 2:
            kind = "Iceberg"
        if kind:
            table = "/".join([source.url.rstrip("/"), *parts[:i]])
            raise PolicyError(
                f"{table} is the folder of a {kind} table: its log names files by their paths and sizes, "
                "which encrypted files do not have. Export the table to plain files, or use the table's own encryption"
            )


def aad_prefixes(template: str | bytes | None, count: int) -> list[bytes]:
    """Return the AAD prefix of each of `count` files: 16 random bytes, or a template with the file's number as ``{n}``.

    Raises:
        ValueError: The template lacks ``{n}``. All files would have the same prefix, and a swap would go unseen.
    """
    if template is None:
        random = os.urandom(16 * count)
        return [random[i : i + 16] for i in range(0, 16 * count, 16)]
    if isinstance(template, bytes):
        template = template.decode()
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    if fields != ["n"]:
        raise ValueError(
            f"aad_prefix={template!r} must have the field {{n}}, the number of the file, once and no other: "
            "'customers_2026-11-20.part{n}'"
        )
    return [template.format(n=n).encode() for n in range(count)]


def delete_sources(log: Log, source: Store, entries: Sequence[FileEntry], result: JobResult, options: Options) -> None:
    """Delete sources after every file was read back from storage, by what the newest version says of it.

    The rows of files that do not read back, and of sources that stay, fail.
    """
    names = {entry.path: entry for entry in entries}
    made = [names[row.dst] for row in result.rows if row.status == "ok" and row.dst in names]
    snapshot = Snapshot(log, log.head())
    there = {row.path: row for _, row in snapshot.find([entry.path for entry in made]).values()}
    good = [there[entry.path] for entry in made if entry.path in there and there[entry.path].file == entry.file]
    checked = {row.src: row for row in verified(snapshot, good, options, result.job_id)[1]}
    for i, row in enumerate(result.rows):
        check = checked.get(row.dst or "")
        if check is not None and check.status != "ok":
            result.rows[i] = row._replace(status="failed", error_class=check.error_class, error=check.error)
    replaced = {entry.file for entry in made} - {row.file for row in good}

    def may_go(entry: FileEntry) -> bool:
        if entry.file in replaced:
            raise ConcurrentChangeError("another job has replaced or removed the file since")
        return True

    if not result.failed:
        _delete(source, made, result, may_go)


def delete_unchanged(snapshot: Snapshot, source: Store, same: Sequence[FileEntry], result: JobResult) -> None:
    """Delete sources that an earlier run encrypted but did not delete. Bytes are compared: that run may be long ago."""
    if result.failed or not same:
        return
    contents = snapshot.holding({key_id for row in same for key_id in row.key_ids()})
    context = Context("decrypt", result.job_id, contents.dataset_id, contents.store, contents.envelope, source)
    _delete(source, same, result, lambda entry: work_on(entry.format).same_as_source(context, entry))


def _delete(
    source: Store, entries: Sequence[FileEntry], result: JobResult, may_go: Callable[[FileEntry], bool]
) -> None:
    rows = {row.dst: i for i, row in enumerate(result.rows)}
    for entry in entries:
        try:
            there = source.stat(entry.path)
            if there is None:
                continue
            if not entry.is_of(there.size, there.stamp):
                raise SourceChangedError("the source has changed since")
            if not may_go(entry):
                raise SourceChangedError("the source has other bytes, but the same size and time of change")
            source.delete_read(there)
        except (AgsError, OSError) as error:  # the file is committed, and other sources are deleted by now: only report
            i = rows[entry.path]
            why = f"the file is in the dataset, but its source was not deleted: {describe(error)}"
            result.rows[i] = result.rows[i]._replace(status="failed", error_class=type(error).__name__, error=why)
