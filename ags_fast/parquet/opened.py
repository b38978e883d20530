"""A Parquet file as encryption sees it: its footer, its keys, and where each column chunk's parts are.

No field of a footer is used before its tag or signature has passed, and no length before it was compared with the
file's size (Parquet Modular Encryption, section 5).
"""

from __future__ import annotations

import hmac
from functools import cached_property

from ags_fast._core import (
    CHECK,
    DONE,
    Chunk,
    ColumnMetadata,
    Footer,
    Modules,
    PageRun,
    column_chunks,
    run_pages,
    thrift_splice,
)
from ags_fast.columnar.schema import leaf_paths
from ags_fast.columnar.thrift import BINARY, FALSE, STRUCT, TRUE, Struct, binary, struct
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.files.source import Source
from ags_fast.parquet.keys import KeyRing, dotted
from ags_fast.parquet.reading import PLAIN, Reading
from ags_fast.parquet.spec import (
    ALGORITHMS,
    COLUMN_METADATA,
    ENCRYPTED_MAGIC,
    FOOTER,
    MAGIC_NBYTES,
    PLAIN_MAGIC,
    SIGNATURE_NBYTES,
    TAIL_NBYTES,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast._core import Key
    from ags_fast._types import Algorithm, ReadableSource
    from ags_fast.columnar.thrift import Edits
    from ags_fast.parquet.keys import ColumnPath

__all__ = ["Crypto", "Opened", "unknown_fields", "with_kept"]

FIRST_READ_NBYTES = (64 << 10) - 4  # from the end: mostly the footer is in it; 64 KiB with the magic at the beginning


class Crypto:
    """What a file claims about its encryption: EncryptionAlgorithm, and the footer key's metadata (section 5.2).

    `unique` is aad_file_unique; None is DuckDB's dialect, which uses no AAD. `stored` is the AAD prefix that the file
    stores, or None. `supply` tells whether readers must supply the prefix.
    """

    __slots__ = ("algorithm", "key_metadata", "stored", "supply", "unique")

    def __init__(
        self, algorithm: Algorithm, unique: bytes | None, stored: bytes | None, supply: bool, key_metadata: bytes | None
    ) -> None:
        self.algorithm = algorithm
        self.unique = unique
        self.stored = stored
        self.supply = supply
        self.key_metadata = key_metadata

    @classmethod
    def read(cls, union: Struct | None, key_metadata: bytes | None) -> Crypto:
        """Read the union of algorithms. FormatError if it has none that is known."""
        for number, algorithm in enumerate(ALGORITHMS, 1):
            fields = union.struct(number) if union is not None else None
            if fields is not None:
                return cls(algorithm, fields.binary(2), fields.binary(1), bool(fields.bool(3)), key_metadata or None)
        raise FormatError("the file is encrypted with an algorithm that Parquet's specification does not have")

    def encode(self) -> bytes:
        """Encode the union as FileCryptoMetaData and FileMetaData hold it."""
        supply = TRUE if self.supply else FALSE
        fields = struct(
            [
                (1, BINARY, None if self.stored is None else binary(self.stored)),
                (2, BINARY, None if self.unique is None else binary(self.unique)),
                (3, supply, b""),
            ]
        )
        return struct([(ALGORITHMS.index(self.algorithm) + 1, STRUCT, fields)])


# A plaintext footer must not show a field of an encrypted column that could have been computed from its values. Fields
# of a ColumnChunk that are unknown here are moved into the sealed ColumnMetaData, into one more field: KEPT_MARK and a
# struct of these fields, as bytes.
KEPT_MARK = b"ags_fast ColumnChunk\0"
KNOWN = 9  # the last field of a ColumnChunk that is known here
LAST_ID = 32767  # the largest id of a field


def unknown_fields(chunk: Chunk) -> list[int]:
    """Return the fields of a ColumnChunk that this version does not know."""
    return [number for number in Struct(chunk.data).fields if number > KNOWN]


def with_kept(metadata: bytes, data: bytes) -> bytes:
    """Return a ColumnMetaData that keeps the unknown fields of a ColumnChunk."""
    fields, there = Struct(data).fields, Struct(metadata)
    unknown: Edits = [
        (number, kind, data[begin:end]) for number, (kind, begin, end) in fields.items() if number > KNOWN
    ]
    value = binary(KEPT_MARK + thrift_splice(b"\0", 0, unknown))
    free = next(number for number in range(LAST_ID, KNOWN, -1) if number not in there)
    return thrift_splice(metadata, 0, [(free, BINARY, value)])


def _restore(chunk: Chunk) -> None:
    """Move the fields of a ColumnChunk that its sealed ColumnMetaData kept back to where they were."""
    metadata, there = Struct(chunk.metadata_bytes), Struct(chunk.data)
    for number in metadata.fields:
        value = metadata.binary(number) or b""
        if value.startswith(KEPT_MARK):
            data = value[len(KEPT_MARK) :]
            fields = Struct(data).fields.items()
            chunk.kept_in = number
            chunk.kept = [(one, kind, data[begin:end]) for one, (kind, begin, end) in fields if one not in there]
            chunk.data = thrift_splice(chunk.data, 0, chunk.kept)
            return


class Opened:
    """A Parquet file whose footer was read and, given keys, opened and checked.

    Args:
        src: A path, a URL, a bytes-like object or a seekable binary file.
        reading: The keys, and which weaknesses of the file are accepted.

    Raises:
        FormatError: The file is not a Parquet file, or is damaged.
        IntegrityError: The footer's tag or signature does not pass, or the file has another length.
        KeyAccessError: The footer key is needed and not given.
        PolicyError: The file is less protected than `reading` requires.
    """

    def __init__(self, src: ReadableSource, reading: Reading = PLAIN) -> None:
        self.reading = reading
        self.keyring = KeyRing(reading.keys)
        self.crypto: Crypto | None = None
        self.footer_verified = False  # by its tag or its signature
        self._ctr_columns: dict[ColumnPath, bool] = {}
        self.source = Source(
            src, reading.length, exact=reading.exact, storage_options=reading.storage_options, tail=True
        )
        try:
            self._read_footer()
        except MemoryError:
            self.close()
            raise FormatError(
                "the footer takes more memory than there is: it is damaged, or of too many parts"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the source if it was opened here."""
        self.source.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the footer

    def check_beginning(self) -> None:
        """Raise FormatError if the file does not begin as it ends. Of an object in a store only this checks it."""
        _check_beginning(self.source, ENCRYPTED_MAGIC if self.encrypted_footer else PLAIN_MAGIC)

    def _read_footer(self) -> None:
        magic, self.footer_offset, data = _read_tail(self.source)
        self.encrypted_footer = magic == ENCRYPTED_MAGIC
        if self.encrypted_footer:
            self._open_footer(data)
        else:
            self._check_footer(data)

    def _open_footer(self, data: bytes) -> None:
        """An encrypted footer (section 5.4)."""
        outer = Struct(data)
        self.crypto = Crypto.read(outer.struct(1), outer.binary(2))
        if self.reading.keys is None:
            return
        self._unlock(self.crypto)
        if self.keyring.footer is None:
            raise KeyAccessError(
                "the footer is encrypted, and the footer key is not given: columns can be read without the footer key "
                "only if the footer is signed, in plain text"
            )
        opened, _ = self._footer_modules(self.keyring.footer).open(FOOTER, memoryview(data)[outer.end :])
        self.footer_verified = True
        self._parse(opened)

    def _check_footer(self, data: bytes) -> None:
        """A footer in plain text, signed (section 5.5) or of a file without encryption."""
        self._parse(data)
        if self.footer.signed:
            fields = Struct(data)
            self.crypto = Crypto.read(fields.struct(8), fields.binary(9))
        elif self.footer.encrypted():
            raise PolicyError("columns are encrypted, but the footer does not say how: its signature was removed")
        elif self.reading.keys is not None and not self.reading.allow_plain:
            raise PolicyError("keys were given, but the file is not encrypted: an attacker may have put it there")
        if self.crypto is None or self.reading.keys is None:
            return
        self._unlock(self.crypto)
        key = self.keyring.footer
        if key is None:
            return  # each column's own metadata is compared with the footer: `_check_unverified`
        signature = data[self.footer.end : self.footer.end + SIGNATURE_NBYTES]
        aad = b"" if self.aad is None else self.aad + bytes([FOOTER])
        expected = key.seal(signature[:12], memoryview(data)[: self.footer.end], aad) if signature else b""
        if len(signature) != SIGNATURE_NBYTES or not hmac.compare_digest(expected[-16:], signature[12:]):
            raise IntegrityError(
                "the footer's signature does not match: it was changed, or the key or the AAD prefix is another",
                module="footer",
            )
        self.footer_verified = True

    def _unlock(self, crypto: Crypto) -> None:
        """Settle the AAD and the footer key."""
        reading = self.reading
        if crypto.unique is None and "duckdb" not in reading.quirks:
            raise FormatError(
                "the file has no aad_file_unique: DuckDB writes such files, in a dialect without AAD. To read it, pass "
                'quirks={"duckdb"}'
            )
        if crypto.algorithm == "AES_GCM_CTR_V1" and not reading.allow_ctr:
            # Beside an encrypted footer the algorithm is in plain text, and no tag covers it.
            raise _without_tags("the file claims AES_GCM_CTR_V1")
        given = bytes(reading.aad_prefix) if reading.aad_prefix else None
        if given is None and crypto.stored is None and crypto.supply:
            raise PolicyError("the file was written with an AAD prefix that it does not store: pass aad_prefix")
        if given is not None and crypto.stored is None and not crypto.supply:
            raise PolicyError("aad_prefix was given, but the file has no AAD prefix: nothing binds it to its name")
        if given is not None and crypto.stored is not None and given != crypto.stored:
            raise PolicyError(
                "the file's AAD prefix is not aad_prefix: this is another file, or an older version of the file"
            )
        self.prefix = given if given is not None else crypto.stored or b""
        if reading.aad_prefix_verifier is not None:
            reading.aad_prefix_verifier(self.prefix)
        self.aad = None if crypto.unique is None else self.prefix + crypto.unique
        self.keyring.open_footer(crypto.key_metadata, self.encrypted_footer)

    @property
    def _dialect(self) -> bool:
        """Whether DuckDB wrote the file: all of its columns are under the footer key, and none says so."""
        return self.crypto is not None and self.crypto.unique is None

    def _parse(self, data: bytes) -> None:
        self.footer = Footer(data)
        self.data = data
        self.groups = self.footer.groups()
        for _, _, _, count in self.groups:
            if count != self.footer.columns:
                raise FormatError(f"a row group has {count} column chunks, the schema {self.footer.columns} columns")

    def _footer_modules(self, key: Key) -> Modules:
        return Modules(key, self.aad, None, None)

    # ---- keys

    def lost(self, chunks: list[Chunk], needed: bool) -> list[Chunk]:
        """Return the chunks whose keys are not held. KeyAccessError if there is one, and all are needed."""
        lost = [chunk for chunk in chunks if chunk.missing]
        if lost and needed:
            what = f"the key of column {lost[0].name!r} is needed and not given{self.refusal(lost[0])}"
            raise KeyAccessError(what) from self.keyring.refusal(lost[0].key_metadata)
        return lost

    def refusal(self, chunk: Chunk) -> str:
        """Return why a column's key is not held, as the end of a message."""
        if chunk.kind == "footer":
            return ": it is the footer key"
        error = self.keyring.refusal(chunk.key_metadata)
        return "" if error is None else f": {error}"

    # ---- column chunks

    def ordinal(self, group: int) -> int:
        """Return a row group's ordinal, as its AADs have it."""
        value = Struct(self.data, self.groups[group][0]).integer(7)
        if value is None or value < 0:
            return group
        if value != group and self._unverified:
            raise IntegrityError(
                f"row group {group} claims to be number {value}, in a footer that is not verified: it was moved",
                module="footer",
                row_group=group,
            )
        return value

    @cached_property
    def leaves(self) -> list[ColumnPath]:
        """The paths of all columns."""
        return leaf_paths(self.footer.schema())

    @cached_property
    def names(self) -> list[str]:
        """The dotted paths of all columns."""
        return [dotted(path) for path in self.leaves]

    def chunks(self) -> Iterator[Chunk]:
        """Yield every column chunk, opened as far as the keys allow."""
        all_of_them = self._dialect or self._unverified
        for group, (_, _, first, _) in enumerate(self.groups):
            ordinal = self.ordinal(group) if self.crypto is not None else group
            for chunk in column_chunks(self.footer, first, group, ordinal, self.leaves, self.names):
                if all_of_them or chunk.raw.crypto or not chunk.whole:
                    self._settle(chunk)
                yield chunk

    def chunk(self, number: int, group: int, ordinal: int, column: int) -> Chunk:
        """Return a column chunk, opened as far as the keys allow."""
        chunk = Chunk(self.footer, number, group, ordinal, column, self.leaves[column], self.names[column])
        self._settle(chunk)
        return chunk

    def _settle(self, chunk: Chunk) -> None:
        """Open the metadata of a chunk as far as the keys allow, and check that they are whole."""
        if chunk.raw.crypto or self._dialect:
            self._open_chunk(chunk)
            if self._unverified and not chunk.missing:
                self._check_unverified(chunk)
        elif self._unverified and self.keyring.names(chunk.path):
            raise PolicyError(
                f"a key of column {chunk.name!r} was given, but the footer, which is not verified, says that the "
                "column is not encrypted: an attacker may have put it there"
            )
        elif not chunk.raw.metadata:
            raise _no_metadata(chunk)
        if chunk.metadata is not None and not chunk.whole:
            raise FormatError(
                f"the metadata of column {chunk.name!r}, row group {chunk.row_group} lacks a size or a count: the file "
                "is damaged"
            )

    @property
    def _unverified(self) -> bool:
        """Whether columns are read without the footer key, from a footer that was not verified."""
        return self.crypto is not None and self.reading.keys is not None and not self.footer_verified

    def _check_unverified(self, chunk: Chunk) -> None:
        """Compare the column's own metadata, which its key has sealed, with what the footer says."""
        names = None
        if chunk.raw.sealed_metadata:
            elements = Struct(chunk.metadata_bytes).binaries(3)
            names = None if elements is None else tuple(name.decode("utf-8", "surrogateescape") for name in elements)
        if names != chunk.path:
            raise IntegrityError(
                f"the column metadata of {chunk.name!r}, row group {chunk.row_group} is not that column's: the footer, "
                "which is not verified, was changed",
                module="column metadata",
                row_group=chunk.row_group,
                column=chunk.name,
            )

    def _open_chunk(self, chunk: Chunk) -> None:
        raw = chunk.raw
        if raw.column_key:
            chunk.kind = "column"
            chunk.key_metadata = raw.key_metadata
            key = self.keyring.column(chunk.path, chunk.key_metadata)
        elif raw.footer_key or not raw.crypto:
            chunk.kind = "footer"
            key = self.keyring.footer
        else:
            raise FormatError(f"column {chunk.name!r} is encrypted in a way that Parquet's specification does not have")
        if key is None:
            self._miss(chunk)
            return
        assert self.crypto is not None
        ctr = self.crypto.algorithm == "AES_GCM_CTR_V1"
        chunk.modules = self._modules(chunk, key, ctr)
        if raw.sealed_metadata:
            sealed = memoryview(self.data)[raw.sealed_metadata : raw.sealed_metadata + raw.sealed_metadata_nbytes]
            try:
                chunk.metadata_bytes, _ = chunk.modules.open(COLUMN_METADATA, sealed)
            except IntegrityError:
                if not raw.column_key or chunk.key_metadata is not None or self.keyring.explicit:
                    raise
                # A function that is called with None cannot tell which column the key is for.
                self.keyring.refuse_unnamed()
                self._miss(chunk)
                return
            chunk.metadata = ColumnMetadata(chunk.metadata_bytes)
            chunk.metadata_bytes = chunk.metadata_bytes[: chunk.metadata.end]  # parquet-java pads
            if not self.encrypted_footer and KEPT_MARK in chunk.metadata_bytes:
                _restore(chunk)
        elif chunk.metadata is None:
            raise _no_metadata(chunk)
        if (
            "arrow-ctr-mislabel" in self.reading.quirks
            and not ctr
            and not self.encrypted_footer
            and self._is_ctr(chunk)
        ):
            if not self.reading.allow_ctr:
                raise _without_tags(f"the pages of column {chunk.name!r} are not under AES_GCM_V1, as the footer says")
            chunk.modules = self._modules(chunk, key, True)

    def _miss(self, chunk: Chunk) -> None:
        """Mark a chunk whose key is not held."""
        chunk.missing, chunk.modules = True, None
        if self.encrypted_footer:
            chunk.metadata = None  # the footer key alone does not authenticate it

    def _modules(self, chunk: Chunk, key: Key, ctr: bool) -> Modules:
        return Modules(key, self.aad, chunk.ordinal, chunk.column, ctr=ctr, label=chunk.name)

    def _is_ctr(self, chunk: Chunk) -> bool:
        """Whether the first page has no tag, though the file claims so: its header opens, its body does not."""
        found = self._ctr_columns.get(chunk.path)
        if found is None:
            if chunk.numbers().compressed_nbytes <= 0:
                return False  # this row group has no page to tell by; perhaps the next one has
            modules = chunk.modules
            assert modules is not None
            try:
                _check_first_page(self, chunk, modules)
                found = False
            except IntegrityError as error:
                found = error.module in ("data page", "dictionary page")
            except FormatError:  # a page with few bytes has no room for a tag: it is whole without one
                try:
                    _check_first_page(self, chunk, self._modules(chunk, modules.key, True))
                    found = True
                except (FormatError, IntegrityError):
                    found = False
            self._ctr_columns[chunk.path] = found
        return found


def _check_beginning(source: Source, magic: bytes) -> None:
    if bytes(source.read(0, MAGIC_NBYTES)) != magic:
        raise _no_parquet_file()


def _no_parquet_file() -> FormatError:
    return FormatError("not a Parquet file: it does not begin and end with PAR1, or with PARE")


def _read_tail(source: Source) -> tuple[bytes, int, bytes]:
    """Read the end of a file. Returns its magic, where its footer begins, and the footer's bytes."""
    size = source.size
    if size < MAGIC_NBYTES + TAIL_NBYTES:
        raise FormatError(f"{size} bytes are too few for a Parquet file")
    tail_begin = max(0, size - FIRST_READ_NBYTES)
    tail = source.read(tail_begin, size)
    magic = bytes(tail[-MAGIC_NBYTES:])
    if magic not in (PLAIN_MAGIC, ENCRYPTED_MAGIC):
        raise _no_parquet_file()
    if not source.is_remote:  # there this would be one more request: see `Opened.check_beginning`
        _check_beginning(source, magic)
    length = int.from_bytes(tail[-TAIL_NBYTES:-MAGIC_NBYTES], "little")
    offset = size - TAIL_NBYTES - length
    if offset < MAGIC_NBYTES:
        raise FormatError(f"the footer claims {length} bytes, the file has {size}: it is damaged or was cut")
    if offset < tail_begin:
        data = source.read(offset, size - TAIL_NBYTES)
    else:
        data = tail[offset - tail_begin : -TAIL_NBYTES]
    return magic, offset, bytes(data)


def _check_first_page(opened: Opened, chunk: Chunk, modules: Modules) -> None:
    """Raise what is wrong with the first page; later pages do not matter."""
    begin, nbytes = chunk.begin(), chunk.numbers().compressed_nbytes
    run = PageRun(modules, None, CHECK, nbytes, 0, label=chunk.name)
    wanted = 64 << 10
    while run.in_total == 0:
        view = opened.source.read(begin, min(begin + min(wanted, nbytes), opened.footer_offset))
        run.feed(view, len(view) == nbytes, bytearray(len(view)))
        try:
            run_pages([run], 1)
        except (FormatError, IntegrityError):
            if run.in_total == 0:
                raise
        if run.stop == DONE:
            break
        wanted = max(2 * wanted, run.wanted)


def _without_tags(what: str) -> PolicyError:
    return PolicyError(
        f"{what}, where page bytes carry no tag: either the file was written so, or somebody with write access has "
        "removed the tags of its pages to change the pages. Pass allow_ctr=True to read a file that you know to be "
        "written under AES_GCM_CTR_V1 (ags-fast parquet: --allow-ctr)"
    )


def _no_metadata(chunk: Chunk) -> FormatError:
    return FormatError(f"column {chunk.name!r}, row group {chunk.row_group} has no metadata: the file is damaged")
