"""Find files below a table's location that nothing names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from pyarrow.fs import FileSelector, FileType

from ags_fast.errors import PolicyError
from ags_fast.iceberg.locations import normal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ags_fast.iceberg.io import FileIO

__all__ = ["Stored", "not_named", "stored_files"]

IGNORED = ("version-hint.text", "_SUCCESS")


class Stored(NamedTuple):
    """A file in the storage."""

    path: str
    length: int  # bytes


def stored_files(io: FileIO, folder: str) -> Iterator[Stored]:
    """Yield all files below a folder, by the spelling of the folder. PolicyError if the FileIO cannot list."""
    inner: Any = io.inner(folder)
    folder = folder.rstrip("/")
    if hasattr(inner, "fs_by_scheme"):  # PyArrowFileIO
        scheme, netloc, base = inner.parse_location(folder, inner.properties)
        everything = FileSelector(base, allow_not_found=True, recursive=True)
        found = inner.fs_by_scheme(scheme, netloc).get_file_info(everything)
        base = base.rstrip("/")
        for info in found:
            if info.type == FileType.File:
                yield Stored(folder + info.path[len(base) :], info.size or 0)
    elif hasattr(inner, "get_fs"):  # FsspecFileIO
        system = inner.get_fs(urlsplit(folder).scheme or "file")
        base = system._strip_protocol(folder).rstrip("/")  # noqa: SLF001 (fsspec has no public name)
        found = system.find(folder, detail=True)
        system.invalidate_cache()  # else files that come later would not be found by what reads the table
        for path, info in found.items():
            yield Stored(folder + path[len(base) :], info.get("size") or 0)
    else:
        raise PolicyError(f"orphans=True wants PyArrowFileIO or FsspecFileIO: {type(inner).__name__} lists no files")


def not_named(files: Iterable[Stored], named: set[str]) -> Iterator[Stored]:
    """Yield the files whose `normal` location is not `named`. The checksum ``.x.crc`` of Java belongs to x."""
    for one in files:
        folder, _, name = one.path.rpartition("/")
        if name.startswith(".") and name.endswith(".crc"):
            name = name[1:-4]
        if normal(f"{folder}/{name}") not in named and name not in IGNORED:
            yield one
