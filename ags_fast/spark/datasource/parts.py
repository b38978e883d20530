"""What one task of a read gets: parts of files, each with the wrapped keys that open the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from ags_fast.fs import local_path
from ags_fast.spark.datasource.paths import is_hidden

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ags_fast.dataset.dataset import Dataset, SealedFile
    from ags_fast.spark.datasource.options import ReadOptions

__all__ = ["FilesPartition", "Part", "chosen", "in_bins"]

# What opening a file costs, in bytes of reading: in an object store as Spark's spark.sql.files.openCostInBytes, on a
# disk less. There a task costs more than many files: a Python worker takes tens of milliseconds for any task.
STORE_OPEN_NBYTES = 4 << 20
LOCAL_OPEN_NBYTES = 512 << 10
PARTS = 10_000  # of one file, at most: each is a line of the plan, whatever splitBytes says
TASKS = 64  # a dataset that is large enough is read by about as many tasks, or more

Part = tuple["SealedFile", int, int]  # the file, and the bytes of its plaintext [begin, end) in which units begin


class FilesPartition(InputPartition):
    """Parts of files. Pickles; holds no key. Where there is no partition, Spark has None read."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"<{len(self.parts)} parts of files>"


def chosen(dataset: Dataset, options: ReadOptions, columns: Iterable[str] | None) -> Iterator[SealedFile]:
    """Iterate over the files that the options choose, with the keys of these columns; None: of all columns.

    Files that Spark would pass over are left out, unless a pattern chooses files.
    """
    for file in dataset.sealed_files(options.files, columns=columns, missing=options.missing):
        if options.files is not None or not is_hidden(file.path):
            yield file


def in_bins(dataset: Dataset, files: Iterable[SealedFile], split_bytes: int) -> Iterator[FilesPartition]:
    """Cut large files, and put small ones together: about `split_bytes` of plaintext to a task, or less if few."""
    files = sorted(files, key=lambda file: file.path)
    opening = STORE_OPEN_NBYTES if local_path(dataset.url) is None else LOCAL_OPEN_NBYTES
    nbytes = sum(file.plain_length + opening for file in files)
    limit = min(split_bytes, max(opening, nbytes // TASKS))
    parts: list[Part] = []
    held = 0
    for file in files:
        count = max(1, min(PARTS, -(-file.plain_length // split_bytes)))
        step = max(1, -(-file.plain_length // count))  # parts are alike: no task has most of a file
        for begin in range(0, max(file.plain_length, 1), step):
            end = min(begin + step, file.plain_length)
            size = end - begin + opening
            if parts and held + size > limit:
                yield FilesPartition(tuple(parts))
                parts, held = [], 0
            parts.append((file, begin, end if end < file.plain_length else file.plain_length + 1))
            held += size
    if parts:
        yield FilesPartition(tuple(parts))
