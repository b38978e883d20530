"""Which files of a source tree a job takes, and what the files are called in the dataset."""

from __future__ import annotations

import fnmatch
import os
import string
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.dataset.names import HIDDEN, object_name
from ags_fast.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import Entry, Store


class Choice(NamedTuple):
    """Select the files of a source. The fields are arguments of `encrypt_files`."""

    hidden: bool = False
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    links: str = "skip"

    @classmethod
    def of(cls, hidden: bool, include: Any, exclude: Any, links: str) -> Choice:
        """Take the arguments of `encrypt_files`. Raises ValueError for an unknown `links`."""
        if links not in ("skip", "follow", "error"):
            raise ValueError(f"links must be 'skip', 'follow' or 'error', not {links!r}")
        included, excluded = (
            None if patterns is None else (patterns,) if isinstance(patterns, str) else tuple(patterns)
            for patterns in (include, exclude)
        )
        return cls(hidden, included, excluded or (), links)


def list_sources(source: Store, choice: Choice) -> tuple[list[Entry], list[tuple[str, str, str]]]:
    """List the files of a tree in the order of their names, and what is left out.

    Left out are what a store leaves out (see `Store.list_all`), what `choice` excludes, and what readers of such a tree
    skip: names that begin with ``.`` or ``_`` (``_SUCCESS``), files in folders with such names unless the folders are
    partitions (``_year=2026``), and checksums (``x.crc``).

    Returns:
        The files, and (path, kind, reason) of each path that is left out.

    Raises:
        PolicyError: The tree holds a Delta, Iceberg or Hudi table, or links that `choice` refuses.
        ValueError: A pattern of `choice.include` matches nothing.
    """
    listed, left_out = source.list_all()
    files: list[Entry] = []
    unused = set(choice.include or ())
    rows: list[tuple[str, str, str]] = []
    for entry in listed:
        parts = entry.path.split("/")
        _refuse_tables(source, parts)
        reason = _left_out(entry.path, parts, choice, unused)
        if reason is None:
            files.append(entry)
        else:
            rows.append((entry.path, *reason))
    for path, kind, why in left_out:
        reason = _left_out(path, path.rstrip("/").split("/"), choice, unused)
        if kind in ("OutsideLink", "DanglingLink", "LinkLoop") and reason is None:
            if choice.links == "error":
                raise PolicyError(f"{source.full_path(path)} is {why}: remove it, exclude it, or pass links='skip'")
            if kind == "OutsideLink":
                why += ": links='follow' takes what it leads to"
        rows.append((path, *reason) if reason is not None else (path, kind, why))
    if unused:
        raise ValueError(f"include={sorted(unused)[0]!r} matches no file of {source.url}")
    return files, sorted(rows)


def _left_out(path: str, parts: Sequence[str], choice: Choice, unused: set[str]) -> tuple[str, str] | None:
    """Return kind and reason if a path is left out. Patterns that match the path are removed from `unused`."""
    if parts[0] == HIDDEN.rstrip("/"):
        return "ReservedName", f"reserved: a dataset keeps its own files in {HIDDEN}"
    if choice.include is not None or choice.exclude:
        above = [
            "/".join(parts[:n]) for n in range(1, len(parts) + 1)
        ]  # a pattern that matches a folder takes all of it
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


def names_around(listed: Iterable[Entry], format: str) -> tuple[set[str], set[str]]:
    """Return the paths that `check_names` must see if a dataset has them, and the names that may be folders.

    A path is in the way if it is the path of a new file, of its object, or of a folder above one of them. The object of
    an AGS1 stream has the name of the file with ``.ags``.
    """
    paths: set[str] = set()
    folders: set[str] = set()
    for entry in listed:
        folders.update((entry.path, object_name(entry.path, format=format)))
    for name in folders:
        while name and name not in paths:
            paths.update((name, name.removesuffix(".ags")))
            name = name.rpartition("/")[0]
    return paths, folders


def check_names(planned: Iterable[FileEntry], present: Iterable[FileEntry]) -> None:
    """Raise ValueError if two files would have one name, or a file the name of another file's folder."""
    for what in ("path", "file"):
        names: dict[str, str] = {}
        for entry in (*present, *planned):
            name = getattr(entry, what)
            if name in names:
                raise ValueError(
                    f"{entry.source!r} and {names[name]!r} would both be {name!r} in the dataset: rename one of them"
                )
            names[name] = entry.source
        for name in names:
            folder = name
            while "/" in folder:
                folder = folder.rpartition("/")[0]
                if folder in names:
                    raise ValueError(
                        f"{names[folder]!r} would be the file {folder!r} in the dataset, and {names[name]!r} would "
                        "need a folder of that name: rename one of them"
                    )


def aad_prefixes(template: str | bytes | None, count: int) -> list[bytes]:
    """Return the AAD prefix of each of `count` files.

    Args:
        template: None: 16 random bytes for each file; else a text with ``{n}`` for the number of the file.
        count: The number of files.

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
