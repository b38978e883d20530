"""open_plain: an encrypted Parquet file as a plain one, for any reader.

Every module is shown where it stands in the sealed file, and as long as it is there: the bytes that sealing added to a
page become a field of its header that no reader knows. So all offsets in the footer stay right, and opening a file
reads only its footer. Pages are opened when they are read.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING
from weakref import WeakMethod

from ags_fast._core import new_bytes
from ags_fast._cursor import Cursor
from ags_fast._threads import thread_count
from ags_fast._types import Buffer, OrShow, ReadableSource, Retriever, check_choice
from ags_fast.ags1 import bytes_view, clamp
from ags_fast.errors import IntegrityError
from ags_fast.parquet.footer import Dropped, plain_footer, unsigned, view_length, without
from ags_fast.parquet.keys import Keys, dotted
from ags_fast.parquet.masked import Masked
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import Reading, opening
from ags_fast.parquet.shown import Layout, Shown, fill_zeros
from ags_fast.parquet.spec import MAGIC_NBYTES, PLAIN_MAGIC

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Unpack

    from ags_fast._core import Chunk
    from ags_fast.keys import StandardKeyMetadata
    from ags_fast.parquet.reading import Opening
    from ags_fast.parquet.shown import Job, Part

__all__ = ["PlainView", "open_plain"]

FOOTER_KEY_NBYTES = 4  # of the crypto_metadata of a chunk under the footer key, with its field head


class PlainView(Cursor):
    """A plaintext view of an encrypted Parquet file. `open_plain` makes it.

    Offsets are those of the sealed file; only the footer is another. Threads may share `read_at` and `readinto_at`, but
    not the methods that move the cursor. Nothing is returned before its tag has passed. Reads raise IntegrityError for
    a module that does not authenticate, each time; all else stays readable.

    Args:
        src: As for open_plain.
        reading: The keys, and which weaknesses of the file are accepted.
        missing: As for open_plain.
    """

    def __init__(self, src: ReadableSource, reading: Reading, missing: OrShow = "error") -> None:
        check_choice("missing", missing, OrShow)
        self._position = 0
        self._gone: Dropped | Masked | None = None
        threads = thread_count(reading.threads)
        opened = Opened(src, reading)
        self._shown = Shown(opened, threads)
        self._opened = opened
        try:
            self._begin(opened, missing)
        except BaseException:
            opened.close()
            raise

    def _begin(self, opened: Opened, missing: str) -> None:
        """Make the plain footer, and settle which columns are shown."""
        if opened.crypto is None:
            self._show(Layout(opened, None), opened.source.size, bytearray())
            return
        footer = opened.footer.plain({})
        chunks = None
        # A footer that lost no more than it does under the footer key has no columns whose keys could be missing, and
        # no metadata that is still sealed. With very many chunks, to read each would take longer than all the rest.
        shed = opened.footer.end - len(footer)
        if not opened.footer_verified or shed != FOOTER_KEY_NBYTES * opened.footer.encrypted():
            chunks, footer = self._open_chunks(opened, missing)
        if not opened.encrypted_footer:
            footer = unsigned(footer)
        end, made = opened.footer_offset, 0
        parts: list[Part] = []
        if isinstance(self._gone, Masked):
            parts, end, made = self._gone.parts, self._gone.derived_end, self._gone.end - self._gone.derived_end
        length = view_length(end, made + len(footer))
        footer += len(footer).to_bytes(4, "little") + PLAIN_MAGIC
        self._show(Layout(opened, chunks, parts), length, footer)

    def _show(self, layout: Layout, length: int, tail: bytearray) -> None:
        """Have the view show these parts, and the tail at its end."""
        self._layout, self._length, self._tail = layout, length, tail
        self._tail_begin = length - len(tail)

    def _open_chunks(self, opened: Opened, missing: str) -> tuple[list[Chunk], bytearray]:
        """Return the chunks that are shown, and their plain footer."""
        chunks = list(opened.chunks())
        if opened.lost(chunks, missing == "error"):
            held = [chunk for chunk in chunks if not chunk.missing]
            self._show(Layout(opened, held), opened.footer_offset, bytearray())  # for what Masked reads
            reader = WeakMethod(self.read_at)  # in no circle with the view, which is closed when nobody has it
            self._gone = Dropped(opened, chunks) if missing == "hide" else Masked(opened, chunks, reader)
            chunks = [chunk for chunk in held if chunk.column not in self._gone.columns]
        metadata = {chunk.number: chunk.shown_metadata() for chunk in chunks if chunk.modules is not None}
        footer = plain_footer(opened.footer, metadata, {chunk.number: chunk.kept for chunk in chunks}, False)
        if self._gone is not None:
            footer = without(bytes(footer), self._gone, chunks)
        return chunks, footer

    def __repr__(self) -> str:
        name = "" if self._opened.source.path is None else f" of {self._opened.source.path!r}"
        return f"<ags_fast plain view{name}, {self._length} bytes{', closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a view holds keys and is never pickled: open it where it is read")

    @property
    def size(self) -> int:
        """Length of the view in bytes."""
        return self._length

    @property
    def columns(self) -> list[str]:
        """Dotted paths of the leaf columns that are shown, also as nulls."""
        hidden = self._gone.columns if isinstance(self._gone, Dropped) else ()
        return [dotted(leaf) for number, leaf in enumerate(self._opened.leaves) if number not in hidden]

    @property
    def hidden(self) -> list[str]:
        """Dotted paths of the leaf columns that are hidden, because their keys are not held."""
        return list(self._gone.names) if isinstance(self._gone, Dropped) else []

    @property
    def masked(self) -> list[str]:
        """Dotted paths of the leaf columns that are shown as nulls, because their keys are not held."""
        return list(self._gone.names) if isinstance(self._gone, Masked) else []

    @property
    def decrypted(self) -> int:
        """Bytes of pages, indexes and bloom filters that were opened so far, as long as they are in the file."""
        return self._shown.decrypted

    @property
    def footer_verified(self) -> bool:
        """Whether the footer passed its tag or signature. False if it was read by Keys without a footer key."""
        return self._opened.footer_verified

    @property
    def unauthenticated_levels(self) -> list[tuple[str, int]]:
        """(column, row group) of pages opened so far whose levels have no tag. See `decrypt_file`."""
        return list(self._shown.levels)

    # ---- random access

    def read_at(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`, or fewer at the end.

        Raises:
            ValueError: `offset` or `size` is negative, or the view is closed.
        """
        return self.read_ranges([(offset, size)])[0]

    def read_buffer(self, size: int) -> Any:
        """Read as `read` does, into memory of pyarrow's pool. pyarrow calls this in place of `read`.

        Memory that the pool had before costs less than new memory of `bytes`, which the system has to zero.
        """
        import pyarrow as pa

        size = self._clamp(self._position, size)
        buffer = pa.allocate_buffer(size)
        self._position += self.readinto_ranges([(self._position, size)], buffer)
        return buffer

    def readinto_at(self, offset: int, buffer: Buffer) -> int:
        """Read from `offset` into a writable buffer.

        Returns:
            The number of bytes read: fewer than the buffer has only at the end. After an error the buffer is all zeros.
        """
        return self.readinto_ranges([(offset, bytes_view(buffer).nbytes)], buffer)

    def read_ranges(self, ranges: Iterable[Sequence[int]]) -> list[bytes]:
        """Read several ranges. The requests of a store for their pages run at once.

        Args:
            ranges: ``(offset, size)`` pairs, in bytes.

        Returns:
            What `read_at` returns for each range, in the order of `ranges`.
        """
        outs: list[bytes] = []
        jobs: list[Job] = []
        for offset, size in ranges:
            nbytes = self._clamp(offset, size)
            out, view = new_bytes(nbytes) if nbytes else (b"", memoryview(b""))
            outs.append(out)
            if nbytes:
                self._fill(offset, view, jobs)
        self._shown.run(jobs)
        return outs

    def readinto_ranges(self, ranges: Iterable[Sequence[int]], buffer: Buffer) -> int:
        """Read several ranges into a writable buffer, one behind the other, as `read_ranges` does.

        Args:
            ranges: ``(offset, size)`` pairs, in bytes.
            buffer: At least as long as the ranges together.

        Returns:
            The number of bytes read. After an error the buffer is all zeros.
        """
        view = bytes_view(buffer)
        if view.readonly:
            raise TypeError(f"a writable bytes-like object is required, not a read-only {type(buffer).__name__!r}")
        clamped = [(offset, self._clamp(offset, size)) for offset, size in ranges]
        if sum(nbytes for _, nbytes in clamped) > view.nbytes:
            raise ValueError("the buffer is shorter than the ranges together")
        jobs: list[Job] = []
        at = 0
        try:
            for offset, nbytes in clamped:
                if nbytes:
                    self._fill(offset, view[at : at + nbytes], jobs)
                at += nbytes
            self._shown.run(jobs)
        except BaseException:
            fill_zeros(view)
            raise
        return at

    def _clamp(self, offset: int, size: int) -> int:
        self._check_open()
        return clamp(operator.index(offset), operator.index(size), self._length)

    def _fill(self, offset: int, out: memoryview, jobs: list[Job]) -> None:
        """Write the bytes from `offset` to the whole of `out`. jobs: gets the whole pages, for `Shown.run`."""
        end = offset + len(out)
        at = offset
        if at < MAGIC_NBYTES:
            out[: MAGIC_NBYTES - at] = PLAIN_MAGIC[at:end]
            at = min(end, MAGIC_NBYTES)
        body_end = min(end, self._layout.end)
        for part in self._layout.find(at, body_end) if at < body_end else ():
            begin, stop = max(at, part.begin), min(part.end, body_end)
            fill_zeros(out[at - offset : begin - offset])
            self._shown.show(part, begin, out[begin - offset : stop - offset], jobs)
            at = stop
        if at < self._tail_begin:
            stop = min(end, self._tail_begin)
            fill_zeros(out[at - offset : stop - offset])
            at = stop
        if at < end:
            out[at - offset :] = memoryview(self._tail)[at - self._tail_begin : end - self._tail_begin]

    def close(self) -> None:
        """Release opened pages, and close the source if the view opened it. May be called again.

        `close` does not wait for other threads: a read in flight ends as if `close` came later, or raises ValueError.
        """
        opened = getattr(self, "_opened", None)  # None if the constructor failed
        if opened is not None:
            self._shown.close()
            opened.close()
        super().close()


@opening
def open_plain(
    src: ReadableSource,
    keys: Keys | Retriever | None = None,
    *,
    key_metadata: StandardKeyMetadata | Buffer | None = None,
    length: int | None = None,
    missing: OrShow = "error",
    **how: Unpack[Opening],
) -> PlainView:
    """Open an encrypted Parquet file as a seekable, read-only file that is a plain Parquet file to any reader.

    Only the footer is read, and checked, by this call. Pages are opened when they are read, and a few are kept. Nothing
    is returned before its tag has passed; pages under CTR have no tag, nor have levels in parquet-java's V2 layout.

    Args:
        src: A path, a URL, a bytes-like object or a seekable binary file, which is left open.
        keys: Keys, or a function from the file's key_metadata to a key, as for decrypt_file.
        key_metadata: In place of `keys`, Iceberg's StandardKeyMetadata, or its encoded bytes: one key for all columns,
            the AAD prefix and, if it has one, the file's length. That length must be `length` if given, else the length
            of the source.
        length: The file's length in bytes, from a trusted place. Bytes after it are never read.
        missing: What becomes of columns whose keys are not held: "error"; "hide" them, as whole top-level fields; or
            "null": they are there with their types, and all nulls. In lists and structs, the topmost field all of whose
            columns are refused is null; a map without its keys is null as a whole. A required field is shown as
            optional, and a repeated one that is no list as empty.
        **how: How the file is opened, and the errors if it is not: see `Opening`. A read that covers several column
            chunks opens them in parallel.

    Raises:
        IntegrityError: The source has another length. Reads raise it, each time, for a module whose tag does not pass;
            the error names the place, and all else stays readable.
        ValueError: Both `keys` and `key_metadata` are given, or `aad_prefix` is not the one in `key_metadata`.
    """
    exact = False
    if key_metadata is not None:
        if keys is not None:
            raise ValueError("keys and key_metadata are given: give one of them")
        keys, how["aad_prefix"], known = _from_metadata(key_metadata, how.get("aad_prefix"))
        if known is not None:
            exact = length is None
            if not exact and length != known:
                raise IntegrityError(f"the file should have {length} bytes, but {known} by its key_metadata")
            length = known
    if keys is None:
        raise TypeError("keys or key_metadata is required")
    return PlainView(src, Reading(keys, length=length, exact=exact, **how), missing)


def _from_metadata(key_metadata: Any, aad_prefix: bytes | None) -> tuple[Keys, bytes, int | None]:
    """Return the keys, the AAD prefix and the file's length in bytes that StandardKeyMetadata holds."""
    if not hasattr(key_metadata, "encryption_key"):
        from ags_fast.keys import StandardKeyMetadata

        key_metadata = StandardKeyMetadata.decode(key_metadata)
    stored = key_metadata.aad_prefix or b""
    if aad_prefix and bytes(aad_prefix) != stored:
        raise ValueError("aad_prefix is not the one in key_metadata: give one of them")
    return Keys(key_metadata.encryption_key), stored, key_metadata.file_length
