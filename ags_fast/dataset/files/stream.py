"""Files of a dataset in the AGS1 format: read one, and write one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.dataset.names import check_path
from ags_fast.errors import IntegrityError
from ags_fast.fs import NotAFileError
from ags_fast.stream import AgsReader, AgsWriter

if TYPE_CHECKING:
    from ags_fast._types import WritableFile
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.contents import Contents
    from ags_fast.fs import NewFile, NewObject

CHUNK_NBYTES = 1 << 20  # of plaintext that is copied at a time


def view(contents: Contents, entry: FileEntry, file: str | None = None) -> AgsReader:
    """Open the plaintext of `entry`, or of `file` in its place."""
    name = check_path(file or entry.file)
    try:
        return AgsReader(
            contents.store.open_seekable(name),
            contents.dek(entry),
            length=entry.file_length,
            aad_prefix=entry.aad_prefix,
            block_size=entry.block_size,
            threads=contents.threads,
        )
    except FileNotFoundError:
        raise IntegrityError(f"{name} is missing, but the dataset names it") from None
    except NotAFileError:
        raise IntegrityError(f"{name} is not a regular file, but the dataset names it") from None


def copy(contents: Contents, entry: FileEntry, target: WritableFile) -> None:
    """Decrypt a file to anything that takes bytes. Each block is written after its tag has passed."""
    with view(contents, entry) as reader:
        chunk = memoryview(bytearray(max(CHUNK_NBYTES, reader.block_size)))
        while got := reader.readinto(chunk):
            target.write(chunk[:got])


class StreamWriter:
    """An AGS1 stream in the making, under the entry's data key."""

    def __init__(self, contents: Contents, entry: FileEntry, new: NewFile | NewObject) -> None:
        prefix, block_size, threads = entry.aad_prefix, entry.block_size, contents.threads
        self._writer = AgsWriter(new, contents.dek(entry), aad_prefix=prefix, block_size=block_size, threads=threads)
        self.write = self._writer.write
        self.tell = self._writer.tell
        self.abort = self._writer.abort

    def finish(self) -> tuple[int, int, None]:
        """See `FormatWriter`."""
        plain_length = self._writer.tell()
        self._writer.close()
        return plain_length, self._writer.file_length, None


write = StreamWriter
