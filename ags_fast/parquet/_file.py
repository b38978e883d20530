"""A Parquet file as encryption sees it: its footer, who sealed what, and where each column chunk's parts are.

Nothing of a footer is believed before its tag or signature has passed, and no length before it was compared with the
file's size (Parquet Modular Encryption, section 5).
"""

from __future__ import annotations

import hmac

from ags_fast._core import (
    CHECK,
    DONE,
    ColumnChunk,
    ColumnMetadata,
    Footer,
    Key,
    Modules,
    PageRun,
    run_pages,
    thrift_splice,
)
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.files.source import Source
from ags_fast.parquet._thrift import BINARY, FALSE, I32, LIST, STRUCT, TRUE, Struct, binary, integer, list_of, struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from typing_extensions import Buffer

    _Path = tuple[str, ...]
    _Retriever = Callable[[Any], Buffer | None]  # of bytes, or None
    _Edits = list[tuple[int, int, bytes | None]]

__all__ = ["ALGORITHMS", "FOOTER_KEY", "Chunk", "Crypto", "Dropped", "Keys", "Opened", "Source", "dotted"]

# Types of modules, as they stand in an AAD (section 4.4.2), where they are no pages.
FOOTER, COLUMN_METADATA, COLUMN_INDEX, OFFSET_INDEX, BLOOM_HEADER, BLOOM_BITSET = 0, 1, 6, 7, 8, 9

ALGORITHMS = ("AES_GCM_V1", "AES_GCM_CTR_V1")
QUIRKS = frozenset({"duckdb", "arrow-ctr-mislabel"})
MAGIC_NBYTES = 4
TAIL_NBYTES = 8  # the footer's length and the magic
SIGNATURE_NBYTES = 28  # nonce and tag


class _FooterKey:
    __slots__ = ()

    def __repr__(self) -> str:
        return "FOOTER_KEY"

    def __reduce__(self) -> str:
        return "FOOTER_KEY"


FOOTER_KEY = _FooterKey()
"""In `Keys.columns`: the column is sealed with the footer key."""


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def _key_bytes(key: Buffer, what: str) -> bytes:
    value = bytes(memoryview(key).cast("B"))
    if len(value) not in (16, 24, 32):
        raise ValueError(f"{what} must have 16, 24 or 32 bytes, it has {len(value)}")
    if not any(value):
        raise ValueError(f"{what} is all zeros: that is no key, but memory that nobody filled")
    return value


class Keys:
    """The keys of a Parquet file, by column.

    footer: the footer key, 16, 24 or 32 bytes; None to read, of a file with a signed footer, only columns that have
    keys of their own. The signature is not verified then. columns: {dotted path or tuple of names: key or FOOTER_KEY};
    the path of a group stands for every column in it, and a tuple for names that have dots. footer_metadata,
    column_metadata: the `key_metadata` to be stored beside (section 4.3), of the columns under the same paths. Sizes
    may be mixed.

    Where a file has two columns with the same dotted path, the path with dots names both, but for one that a tuple
    names, too. Never pickled, never shown. Raises ValueError for a key of another size or of zeros only, and for a
    column that is named twice.
    """

    __slots__ = ("_columns", "_footer", "column_metadata", "footer_metadata")

    def __init__(
        self,
        footer: Buffer | None,
        columns: Mapping[str | _Path, Buffer | _FooterKey] | None = None,
        *,
        footer_metadata: bytes | None = None,
        column_metadata: Mapping[str | _Path, bytes] | None = None,
    ) -> None:
        self._footer = None if footer is None else _key_bytes(footer, "the footer key")
        self._columns: dict[str | _Path, bytes | _FooterKey] = {}
        for path, key in (columns or {}).items():
            name = path if isinstance(path, str) else tuple(path)
            shown = path if isinstance(path, str) else dotted(path)
            if ("." not in shown and {shown, (shown,)} & self._columns.keys()) or name in self._columns:
                raise _twice(shown)
            self._columns[name] = key if isinstance(key, _FooterKey) else _key_bytes(key, f"the key of {shown!r}")
        if footer is None and (not columns or footer_metadata is not None or FOOTER_KEY in self._columns.values()):
            raise ValueError("without a footer key, all there can be is columns with keys of their own")
        self.footer_metadata = footer_metadata
        self.column_metadata = {
            path if isinstance(path, str) else tuple(path): bytes(value)
            for path, value in (column_metadata or {}).items()
        }
        unknown = [path for path in self.column_metadata if path not in self._columns]
        if unknown:
            raise ValueError(f"column_metadata names {unknown[0]!r}, of which columns has no key")

    def __repr__(self) -> str:
        return f"<ags_fast Parquet keys: {'no ' * (self._footer is None)}footer, {len(self._columns)} columns>"

    def __reduce__(self) -> str:
        raise TypeError("keys are never pickled: send key metadata, and unwrap the keys where they are used")

    @property
    def has_footer_key(self) -> bool:
        return self._footer is not None

    def footer_key(self) -> bytes:
        """KeyAccessError if there is none."""
        if self._footer is None:
            raise KeyAccessError("the footer key is needed and not given: these Keys only read columns")
        return self._footer

    def column(self, path: _Path) -> tuple[bytes | _FooterKey, bytes | None] | None:
        """A leaf column's key and its metadata; None if neither it nor a group that holds it is named."""
        for depth in range(len(path), 0, -1):
            for name in (path[:depth], dotted(path[:depth])):
                key = self._columns.get(name)
                if key is not None:
                    return key, self.column_metadata.get(name) or None
        return None

    def check_paths(self, leaves: list[_Path]) -> None:
        """Refuse a path that names no column: a misspelt one would leave its column under another key, or in plain.

        And one with dots, where tuples name every column that it could name.
        """
        known: set[str | _Path] = set()
        for leaf in leaves:
            for depth in range(1, len(leaf) + 1):
                known.add(leaf[:depth])
                known.add(dotted(leaf[:depth]))
        for path in self._columns:
            if path not in known:
                shown = path if isinstance(path, str) else dotted(path)
                some = ", ".join(repr(dotted(leaf)) for leaf in leaves[:10])
                raise ValueError(
                    f"the file has no column {shown!r}: its columns are {some}{', …' * (len(leaves) > 10)}"
                )
            named = {tuple(one) for one in known if not isinstance(one, str) and dotted(one) == path}
            if named and named <= self._columns.keys():
                raise _twice(str(path))


def _twice(path: str) -> ValueError:
    return ValueError(f"the column {path!r} is named twice, as text and as a tuple: it has one key")


class Crypto:
    """What a file says of its encryption: EncryptionAlgorithm, and the footer key's metadata (section 5.2).

    `unique` is aad_file_unique; None is DuckDB's dialect, which uses no AAD. `stored` is the prefix that stands in the
    file, or None; `supply` says that readers must know it.
    """

    __slots__ = ("algorithm", "key_metadata", "stored", "supply", "unique")

    def __init__(
        self, algorithm: str, unique: bytes | None, stored: bytes | None, supply: bool, key_metadata: bytes | None
    ) -> None:
        self.algorithm = algorithm
        self.unique = unique
        self.stored = stored
        self.supply = supply
        self.key_metadata = key_metadata

    @classmethod
    def read(cls, union: Struct | None, key_metadata: bytes | None) -> Crypto:
        for number, algorithm in enumerate(ALGORITHMS, 1):
            fields = union.struct(number) if union is not None else None
            if fields is not None:
                return cls(algorithm, fields.binary(2), fields.binary(1), bool(fields.bool(3)), key_metadata or None)
        raise FormatError("the file is encrypted with an algorithm that Parquet's specification does not have")

    def encode(self) -> bytes:
        """The union, as FileCryptoMetaData and FileMetaData hold it."""
        supply = TRUE if self.supply else FALSE
        fields = struct(
            [
                (1, BINARY, None if self.stored is None else binary(self.stored)),
                (2, BINARY, None if self.unique is None else binary(self.unique)),
                (3, supply, b""),
            ]
        )
        return struct([(ALGORITHMS.index(self.algorithm) + 1, STRUCT, fields)])


# A plaintext footer shows no field of an encrypted column that could have been computed from its values. Fields of a
# ColumnChunk that are not known here are kept in the sealed ColumnMetaData, in one more field: bytes, KEPT_MARK and a
# struct of these fields.
KEPT_MARK = b"ags_fast ColumnChunk\0"
KNOWN = 9  # the last field of a ColumnChunk that is known here
LAST_ID = 32767  # of a field


def with_kept(metadata: bytes, data: bytes) -> bytes:
    """A ColumnMetaData that keeps the unknown fields of a ColumnChunk."""
    fields, there = Struct(data).fields, Struct(metadata)
    unknown: _Edits = [
        (number, kind, data[begin:end]) for number, (kind, begin, end) in fields.items() if number > KNOWN
    ]
    value = binary(KEPT_MARK + thrift_splice(b"\0", 0, unknown))
    free = next(number for number in range(LAST_ID, KNOWN, -1) if number not in there)
    return thrift_splice(metadata, 0, [(free, BINARY, value)])


class Chunk:
    """A column chunk: its place, its ColumnMetaData once that is known, and how its modules are sealed.

    `data` is the ColumnChunk. `kept` are those of its fields that came out of the sealed ColumnMetaData.

    kind: "plain", "footer" or "column", after the key. `modules` is None if it is plain or its key is not held;
    `metadata` is None if its key is not held and the footer is encrypted.
    """

    __slots__ = (
        "column",
        "data",
        "kept",
        "kept_in",
        "key_metadata",
        "kind",
        "metadata",
        "metadata_bytes",
        "missing",
        "modules",
        "number",
        "ordinal",
        "path",
        "raw",
        "row_group",
    )

    def __init__(
        self, number: int, row_group: int, ordinal: int, column: int, path: _Path, raw: ColumnChunk, footer: bytes
    ) -> None:
        self.data = footer[raw.begin : raw.end]
        self.kept: _Edits = []
        self.kept_in = 0  # the number of the field that they came out of
        self.number = number
        self.row_group = row_group
        self.ordinal = ordinal  # the row group's, as its AADs have it
        self.column = column
        self.path = path
        self.raw = raw
        self.kind = "plain"
        self.key_metadata: bytes | None = None
        self.metadata: ColumnMetadata | None = None
        self.metadata_bytes = b""
        self.modules: Modules | None = None
        self.missing = False

    @property
    def name(self) -> str:
        return dotted(self.path)

    def numbers(self) -> ColumnMetadata:
        if self.metadata is None:
            raise KeyAccessError(f"the key of column {self.name!r} is needed and not given")
        return self.metadata

    def shown_metadata(self) -> bytes:
        """The ColumnMetaData without what encryption put there."""
        return thrift_splice(self.metadata_bytes, 0, [(self.kept_in, 0, None)]) if self.kept_in else self.metadata_bytes

    def begin(self) -> int:
        """Where its pages begin in the file."""
        metadata = self.numbers()
        return min((at for at in (metadata.dictionary_page, metadata.data_page) if at > 0), default=0)


def _restore(chunk: Chunk) -> None:
    """Put the fields of a ColumnChunk that were kept in its sealed ColumnMetaData where they were."""
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
    """A Parquet file whose footer was read, and, given keys, opened and checked.

    keys: Keys, or a function from key_metadata (None where none is stored) to a key; None opens nothing.
    aad_prefix: as the caller knows it; compared with what the file says. aad_prefix_verifier: called with the prefix,
    raises if it is wrong.
    quirks: of `QUIRKS`. allow_ctr: whether page bytes may be without tags. plain: whether a file may be without
    encryption. length, exact, storage_options: as for Source.

    Raises FormatError, IntegrityError, KeyAccessError, and PolicyError where it is less protected than it must be.
    """

    def __init__(
        self,
        src: Any,
        keys: Keys | _Retriever | None,
        *,
        aad_prefix: bytes | None = None,
        aad_prefix_verifier: Callable[[bytes], object] | None = None,
        quirks: Iterable[str] = (),
        allow_ctr: bool = False,
        plain: bool = False,
        length: int | None = None,
        exact: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.quirks = frozenset(quirks)
        if self.quirks - QUIRKS:
            raise ValueError(f"quirks are {sorted(QUIRKS)}, not {sorted(self.quirks - QUIRKS)[0]!r}")
        self._keys = keys
        self._allow_ctr = allow_ctr
        self._made: dict[bytes, Key] = {}  # one object for a key value: its schedule is shared
        self._held: dict[_Path | bytes | None, Key | None] = {}
        self._refusals: dict[_Path | bytes | None, KeyAccessError] = {}
        self._ctr_columns: dict[_Path, bool] = {}
        self.crypto: Crypto | None = None
        self.footer_key: Key | None = None
        self.footer_verified = False  # by its tag or its signature
        self.source = Source(src, length, exact=exact, storage_options=storage_options)
        try:
            self._read_footer(keys, aad_prefix, aad_prefix_verifier, plain)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the footer

    def _read_footer(
        self,
        keys: Keys | _Retriever | None,
        aad_prefix: bytes | None,
        verifier: Callable[[bytes], object] | None,
        plain: bool,
    ) -> None:
        size = self.source.size
        if size < MAGIC_NBYTES + TAIL_NBYTES:
            raise FormatError(f"{size} bytes are too few for a Parquet file")
        tail_begin = max(0, size - (64 << 10))  # mostly the footer is in it: one read
        tail = self.source.read(tail_begin, size)
        magic = bytes(tail[-MAGIC_NBYTES:])
        if magic not in (b"PAR1", b"PARE") or bytes(self.source.read(0, MAGIC_NBYTES)) != magic:
            raise FormatError(
                "this is no Parquet file: it neither begins nor ends with PAR1 or PARE, or not with the same"
            )
        length = int.from_bytes(tail[-TAIL_NBYTES:-MAGIC_NBYTES], "little")
        self.footer_offset = size - TAIL_NBYTES - length
        if self.footer_offset < MAGIC_NBYTES:
            raise FormatError(f"the footer claims {length} bytes, the file has {size}: it is damaged or was cut")
        if self.footer_offset < tail_begin:
            data = self.source.read(self.footer_offset, size - TAIL_NBYTES)
        else:
            data = tail[self.footer_offset - tail_begin : -TAIL_NBYTES]
        self.encrypted_footer = magic == b"PARE"
        if self.encrypted_footer:
            self._open_footer(bytes(data), keys, aad_prefix, verifier)
        else:
            self._check_footer(bytes(data), keys, aad_prefix, verifier, plain)

    def _open_footer(
        self, data: bytes, keys: Keys | _Retriever | None, aad_prefix: bytes | None, verifier: Any
    ) -> None:
        outer = Struct(data)
        self.crypto = Crypto.read(outer.struct(1), outer.binary(2))
        if keys is None:
            return
        self._unlock(keys, aad_prefix, verifier)
        if self.footer_key is None:
            raise KeyAccessError(
                "the footer is encrypted, and the footer key not given: only beside a signed footer in plain text can "
                "columns be read without"
            )
        opened, _ = self._footer_modules().open(FOOTER, memoryview(data)[outer.end :])
        self.footer_verified = True
        self._parse(opened)

    def _check_footer(
        self, data: bytes, keys: Keys | _Retriever | None, aad_prefix: bytes | None, verifier: Any, plain: bool
    ) -> None:
        self._parse(data)
        # The row groups are in between: to read these two fields is a walk of its own.
        fields = Struct(data)
        if 8 in fields:
            self.crypto = Crypto.read(fields.struct(8), fields.binary(9))
        elif self.footer.encrypted():
            raise PolicyError("columns are encrypted, but the footer does not say how: its signature was removed")
        elif keys is not None and not plain:
            raise PolicyError("keys were given, but the file is not encrypted: somebody may have put it there")
        if self.crypto is None or keys is None:
            return
        self._unlock(keys, aad_prefix, verifier)
        if self.footer_key is None:
            return  # what it says of a column is checked with that: `_check_unverified`
        signature = data[self.footer.end : self.footer.end + SIGNATURE_NBYTES]
        aad = b"" if self.aad is None else self.aad + bytes([FOOTER])
        expected = self.footer_key.seal(signature[:12], memoryview(data)[: self.footer.end], aad) if signature else b""
        if len(signature) != SIGNATURE_NBYTES or not hmac.compare_digest(expected[-16:], signature[12:]):
            raise IntegrityError(
                "the footer's signature is not its own: it was changed, or the key or the AAD prefix is another",
                module="footer",
            )
        self.footer_verified = True

    def _unlock(self, keys: Keys | _Retriever, aad_prefix: bytes | None, verifier: Any) -> None:
        """Settle the AAD and the footer key."""
        crypto = self.crypto
        assert crypto is not None
        if crypto.unique is None and "duckdb" not in self.quirks:
            raise FormatError(
                "the file has no aad_file_unique: DuckDB writes that, in a dialect without AAD; to read it, pass "
                'quirks={"duckdb"}'
            )
        if crypto.algorithm == "AES_GCM_CTR_V1" and not self._allow_ctr:
            # Beside an encrypted footer this stands in plain text, and no tag covers it.
            raise self._without_tags("the file claims AES_GCM_CTR_V1")
        given = bytes(aad_prefix) if aad_prefix else None
        if given is None and crypto.stored is None and crypto.supply:
            raise PolicyError("the file was written with an AAD prefix that it does not hold: pass aad_prefix")
        if given is not None and crypto.stored is None and not crypto.supply:
            raise PolicyError("an AAD prefix was asked for, and the file has none: nothing binds it to its name")
        if given is not None and crypto.stored is not None and given != crypto.stored:
            raise PolicyError(
                "the file's AAD prefix is not the one that was asked for: it is another file, or an older version of it"
            )
        self.prefix = given if given is not None else crypto.stored or b""
        if verifier is not None:
            verifier(self.prefix)
        self.aad = None if crypto.unique is None else self.prefix + crypto.unique
        if isinstance(keys, Keys):
            self.footer_key = self.key(keys.footer_key()) if keys.has_footer_key else None
        else:
            try:
                self.footer_key = self._retrieve(keys, crypto.key_metadata, "the footer")
            except KeyAccessError as error:
                if self.encrypted_footer:
                    raise
                raise KeyAccessError(
                    f"{error}; without the footer key, Keys(None, {{column: key}}) reads columns with keys of their own"
                ) from error

    def _without_tags(self, what: str) -> PolicyError:
        return PolicyError(
            f"{what}, where page bytes carry no tag: either the file was written so, or somebody with write access has "
            "taken the tags of its pages away to change them. Pass allow_ctr=True to read a file that you know to be "
            "written under AES_GCM_CTR_V1 (ags-fast parquet: --allow-ctr)"
        )

    @property
    def _dialect(self) -> bool:
        """Whether it is DuckDB's: there all columns are under the footer key, and none says so."""
        return self.crypto is not None and self.crypto.unique is None

    def _parse(self, data: bytes) -> None:
        self.footer = Footer(data)
        self.data = data
        self.leaves = self.footer.leaves()
        self.groups = self.footer.groups()
        for _, _, _, count in self.groups:
            if count != len(self.leaves):
                raise FormatError(f"a row group has {count} column chunks, the schema {len(self.leaves)} columns")

    # ---- keys

    def key(self, value: bytes) -> Key:
        made = self._made.get(value)
        if made is None:
            made = self._made[value] = Key(value)
        return made

    def _retrieve(self, retriever: _Retriever, key_metadata: bytes | None, what: str) -> Key:
        """The key that a function finds. It is asked for None where the file stores no key_metadata."""
        stored = "the key_metadata" if key_metadata is not None else "None, as the file stores no key_metadata,"
        try:
            value = retriever(key_metadata)
        except KeyError as error:  # what a dict's lookup raises
            raise KeyAccessError(f"no key was found for {stored} of {what}") from error
        except (TypeError, AttributeError) as error:
            if key_metadata is not None:
                raise
            raise KeyAccessError(
                f"the function takes no None, and the file stores no key_metadata of {what}"
            ) from error
        if value is None:
            raise KeyAccessError(f"no key was found for {stored} of {what}")
        return self.key(_key_bytes(value, f"the key of {what}"))

    def _column_key(self, path: _Path, key_metadata: bytes | None) -> Key | None:
        place = path if isinstance(self._keys, Keys) else key_metadata  # a function is asked once for each
        if place not in self._held:
            found: Key | None = None
            if isinstance(self._keys, Keys):
                entry = self._keys.column(path)
                if entry is not None:
                    found = self.footer_key if isinstance(entry[0], _FooterKey) else self.key(entry[0])
            elif key_metadata is None and self.crypto is not None and self.crypto.key_metadata is None:
                found = self.footer_key  # what it has found for None
            elif self._keys is not None:
                try:
                    found = self._retrieve(self._keys, key_metadata, f"column {dotted(path)!r}")
                except KeyAccessError as error:  # no reason not to read the other columns
                    self._refusals[place] = error
            self._held[place] = found
        return self._held[place]

    def lacks(self, chunk: Chunk) -> KeyAccessError:
        """What to raise if a column is needed whose key is not held."""
        error = KeyAccessError(f"the key of column {chunk.name!r} is needed and not given{self.refusal(chunk)}")
        error.__cause__ = self._refusals.get(chunk.key_metadata)
        return error

    def refusal(self, chunk: Chunk) -> str:
        """What the function that has the keys said of a column's, if it said something."""
        if chunk.kind == "footer":
            return ": it is the footer key"
        error = self._refusals.get(chunk.key_metadata)
        return "" if error is None else f": {error}"

    def _footer_modules(self) -> Modules:
        assert self.footer_key is not None
        return Modules(self.footer_key, self.aad, None, None)

    # ---- column chunks

    def ordinal(self, group: int) -> int:
        """A row group's ordinal, as its AADs have it."""
        value = Struct(self.data, self.groups[group][0]).integer(7)
        if value is None or value < 0:
            return group
        if value != group and self._unverified:
            raise IntegrityError(
                f"row group {group} is said to be number {value}, in a footer that is not verified: it was moved",
                module="footer",
                row_group=group,
            )
        return value

    def chunks(self) -> Iterator[Chunk]:
        """Every column chunk, opened as far as the keys go."""
        for group, (_, _, first, count) in enumerate(self.groups):
            ordinal = self.ordinal(group) if self.crypto is not None else group
            for column in range(count):
                yield self.chunk(first + column, group, ordinal, column)

    def chunk(self, number: int, group: int, ordinal: int, column: int) -> Chunk:
        raw = self.footer.chunk(number)
        chunk = Chunk(number, group, ordinal, column, self.leaves[column], raw, self.data)
        if raw.file_path:
            raise FormatError(
                "the footer is of a _metadata file, whose pages are in other files: take these one by one"
            )
        if raw.metadata:
            chunk.metadata = ColumnMetadata(self.data, raw.metadata)
            chunk.metadata_bytes = self.data[raw.metadata : chunk.metadata.end]
        if raw.crypto or self._dialect:
            self._open_chunk(chunk)
            if self._unverified and not chunk.missing:
                self._check_unverified(chunk)
        elif self._unverified and isinstance(self._keys, Keys) and self._keys.column(chunk.path) is not None:
            raise PolicyError(
                f"a key of column {chunk.name!r} was given, but the footer, which is not verified, says that the "
                "column is not encrypted: somebody may have put it there"
            )
        elif not raw.metadata:
            raise FormatError(f"column {chunk.name!r}, row group {group} has no metadata: the file is damaged")
        if chunk.metadata is not None and min(chunk.metadata.compressed_nbytes, chunk.metadata.num_values) < 0:
            raise FormatError(
                f"the metadata of column {chunk.name!r}, row group {group} has no size or no count: the file is damaged"
            )
        return chunk

    @property
    def _unverified(self) -> bool:
        """Whether columns are read without the footer key, and what the footer says is not known to be so."""
        return self.crypto is not None and self._keys is not None and not self.footer_verified

    def _check_unverified(self, chunk: Chunk) -> None:
        """The column's own metadata, which its key has sealed, must say what the footer says of it."""
        names = Struct(chunk.metadata_bytes).strings(3) if chunk.raw.sealed_metadata else None
        if names != list(chunk.path):
            raise IntegrityError(
                f"the column metadata of {chunk.name!r}, row group {chunk.row_group} is not that column's: the footer, "
                "which is not verified, was changed",
                module="column metadata",
                row_group=chunk.row_group,
                column=chunk.name,
            )

    def _open_chunk(self, chunk: Chunk) -> None:
        raw = chunk.raw
        union = Struct(self.data, raw.crypto) if raw.crypto else None
        own = union.struct(2) if union is not None else None
        if own is not None:
            chunk.kind = "column"
            chunk.key_metadata = own.binary(2) or None
            key = self._column_key(chunk.path, chunk.key_metadata)
        elif union is None or 1 in union:
            chunk.kind = "footer"
            key = self.footer_key
        else:
            raise FormatError(f"column {chunk.name!r} is encrypted in a way that Parquet's specification does not have")
        if key is None:
            chunk.missing = True
            if self.encrypted_footer:
                chunk.metadata = None  # a footer key alone does not vouch for it
            return
        assert self.crypto is not None
        ctr = self.crypto.algorithm == "AES_GCM_CTR_V1"
        chunk.modules = self._modules(chunk, key, ctr)
        if raw.sealed_metadata:
            sealed = memoryview(self.data)[raw.sealed_metadata : raw.sealed_metadata + raw.sealed_metadata_nbytes]
            try:
                chunk.metadata_bytes, _ = chunk.modules.open(COLUMN_METADATA, sealed)
            except IntegrityError:
                if own is None or chunk.key_metadata is not None or isinstance(self._keys, Keys):
                    raise
                # A function that is asked for None cannot tell which column it is asked for.
                self._refusals[None] = KeyAccessError("the file stores no key_metadata of it, so pass Keys")
                chunk.missing, chunk.modules = True, None
                if self.encrypted_footer:
                    chunk.metadata = None
                return
            chunk.metadata = ColumnMetadata(chunk.metadata_bytes)
            chunk.metadata_bytes = chunk.metadata_bytes[: chunk.metadata.end]  # parquet-java pads
            if not self.encrypted_footer and KEPT_MARK in chunk.metadata_bytes:
                _restore(chunk)
        elif chunk.metadata is None:
            raise FormatError(
                f"column {chunk.name!r}, row group {chunk.row_group} has no metadata: the file is damaged"
            )
        if "arrow-ctr-mislabel" in self.quirks and not ctr and not self.encrypted_footer and self._is_ctr(chunk):
            if not self._allow_ctr:
                raise self._without_tags(
                    f"the pages of column {chunk.name!r} are not under AES_GCM_V1, as the footer says"
                )
            chunk.modules = self._modules(chunk, key, True)

    def _modules(self, chunk: Chunk, key: Key, ctr: bool) -> Modules:
        return Modules(key, self.aad, chunk.ordinal, chunk.column, ctr=ctr, label=chunk.name)

    def _is_ctr(self, chunk: Chunk) -> bool:
        """Whether the first page has no tag, though the file says that all have: its header opens, not its body."""
        found = self._ctr_columns.get(chunk.path)
        if found is None:
            if chunk.numbers().compressed_nbytes <= 0:
                return False  # there is no page to go by: perhaps in the next row group
            modules = chunk.modules
            assert modules is not None
            try:
                self._check_first_page(chunk, modules)
                found = False
            except IntegrityError as error:
                found = error.module in ("data page", "dictionary page")
            except FormatError:  # one of few bytes has no room for a tag: it is whole without
                try:
                    self._check_first_page(chunk, self._modules(chunk, modules.key, True))
                    found = True
                except (FormatError, IntegrityError):
                    found = False
            self._ctr_columns[chunk.path] = found
        return found

    def _check_first_page(self, chunk: Chunk, modules: Modules) -> None:
        """Raise what is wrong with it; what follows does not matter."""
        begin, nbytes = chunk.begin(), chunk.numbers().compressed_nbytes
        run = PageRun(modules, None, CHECK, nbytes, 0, label=chunk.name)
        wanted = 64 << 10
        while run.in_total == 0:
            view = self.source.read(begin, min(begin + min(wanted, nbytes), self.footer_offset))
            run.feed(view, len(view) == nbytes, bytearray(len(view)))
            try:
                run_pages([run], 1)
            except (FormatError, IntegrityError):
                if run.in_total == 0:
                    raise
            if run.stop == DONE:
                break
            wanted = max(2 * wanted, run.wanted)


class Dropped:
    """Columns whose keys are not held, as whole top-level fields, and how a footer looks without them."""

    def __init__(self, opened: Opened, tops: set[str]) -> None:
        self.tops = tops
        self.columns = {i for i, leaf in enumerate(opened.leaves) if leaf[0] in tops}
        self.names = [dotted(opened.leaves[i]) for i in sorted(self.columns)]
        kept = [i for i in range(len(opened.leaves)) if i not in self.columns]
        self._number = {old: new for new, old in enumerate(kept)}

    @classmethod
    def of(cls, opened: Opened, chunks: Iterable[Chunk]) -> Dropped | None:
        """None if no key is missing."""
        tops = {chunk.path[0] for chunk in chunks if chunk.missing}
        return cls(opened, tops) if tops else None

    def schema(self, footer: bytes) -> _Edits:
        """FileMetaData's schema."""
        elements = Struct(footer).elements(2) or []
        kept, skipping, fields = [], False, 0
        depth = 0  # elements still to come of the top-level field at hand
        for begin, end in elements[1:]:
            element = Struct(footer, begin)
            if depth == 0:
                name = (element.binary(4) or b"").decode("utf-8", "surrogateescape")
                skipping = name in self.tops
                fields += not skipping
                depth = 1
            depth += (element.integer(5) or 0) - 1
            if not skipping:
                kept.append(footer[begin:end])
        root = thrift_splice(footer, elements[0][0], [(5, I32, integer(fields))])
        return [(2, LIST, list_of(STRUCT, [root, *kept]))]

    def orders(self, footer: bytes) -> _Edits:
        """FileMetaData's column_orders, one for each leaf."""
        elements = Struct(footer).elements(7)
        if elements is None:
            return []
        kept = [footer[begin:end] for i, (begin, end) in enumerate(elements) if i not in self.columns]
        return [(7, LIST, list_of(STRUCT, kept))]

    def sorting(self, footer: bytes, group: int) -> _Edits:
        """A row group's sorting_columns, up to the first that is gone: the next ones only order rows within that."""
        elements = Struct(footer, group).elements(4)
        if elements is None:
            return []
        kept = []
        for begin, _ in elements:
            number = self._number.get(Struct(footer, begin).integer(1) or 0)
            if number is None:
                break
            kept.append(thrift_splice(footer, begin, [(1, I32, integer(number))]))
        return [(4, LIST, list_of(STRUCT, kept) if kept else None)]
