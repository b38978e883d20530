"""Parquet Modular Encryption once more, from the spec alone: small, slow, in Python over `cryptography`.

What the engine writes is read with this, and what it reads is tampered with by this; nothing of ags_fast is imported.
All offsets and lengths are in bytes; an offset counts from the start of the file.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# ---------------------------------------------------------------- Thrift's compact protocol, lossless

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(1, 14)
INTEGERS = (I16, I32, I64)
COLLECTIONS = (LIST, SET, MAP, STRUCT)
MAX_DEPTH = 32


class MalformedError(ValueError):
    """The bytes are not what the format says."""


@dataclass
class List:
    """A list or set; the elements of a list of booleans are kept as the byte they were written as."""

    element: int
    items: list[Any]


@dataclass
class Map:
    key: int
    value: int
    items: list[tuple[Any, Any]]


@dataclass
class Struct:
    """Fields in the order of the file: [id, type, value]. Indexing is by field id, and None where there is none."""

    fields: list[list[Any]] = field(default_factory=list)

    def __getitem__(self, number: int) -> Any:
        return next((value for i, _, value in self.fields if i == number), None)

    def __contains__(self, number: int) -> bool:
        return any(i == number for i, _, _ in self.fields)

    def get(self, number: int, kind: int) -> Any:
        """As indexing, where the type of the field is not to be trusted."""
        if any(i == number and other != kind for i, other, _ in self.fields):
            raise MalformedError(f"field {number} is of another type")
        return self[number]

    def set(self, number: int, kind: int, value: Any) -> None:
        """Replace the field where it is, or put it before the first one with a higher id."""
        for one in self.fields:
            if one[0] == number:
                one[1:] = [kind, value]
                return
        at = next((at for at, (i, _, _) in enumerate(self.fields) if i > number), len(self.fields))
        self.fields.insert(at, [number, kind, value])

    def remove(self, *numbers: int) -> None:
        self.fields = [one for one in self.fields if one[0] not in numbers]


def parse(data: bytes, offset: int = 0) -> tuple[Struct, int]:
    """The struct at `offset`, and where it ends. What would not serialise to the same bytes is refused."""
    reader = _Reader(data, offset)
    try:
        parsed = reader.struct(0)
    except IndexError:
        raise MalformedError(f"thrift ends after {len(data) - offset} bytes") from None
    if serialise(parsed) != data[offset : reader.at]:
        raise MalformedError("thrift is not in its shortest form")
    return parsed, reader.at


def serialise(value: Struct) -> bytes:
    out = bytearray()
    _write(out, STRUCT, value)
    return bytes(out)


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise IndexError
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise MalformedError("a varint of more than 10 bytes")

    def zigzag(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def value(self, kind: int, depth: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return self.byte()
        if kind in INTEGERS:
            return self.zigzag()
        if kind == DOUBLE:
            return self.take(8)
        if kind == UUID:
            return self.take(16)
        if kind == BINARY:
            return self.take(self.varint())
        if depth == MAX_DEPTH:
            raise MalformedError("thrift is nested too deep")
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (LIST, SET):
            head = self.byte()
            count = head >> 4 if head >> 4 != 15 else self.varint()
            return List(head & 15, [self.element(head & 15, depth + 1) for _ in range(count)])
        if kind == MAP:
            count = self.varint()
            kinds = self.byte() if count else 0
            key, value = kinds >> 4, kinds & 15
            pairs = ((self.element(key, depth + 1), self.element(value, depth + 1)) for _ in range(count))
            return Map(key, value, list(pairs))
        raise MalformedError(f"unknown thrift type {kind}")

    def element(self, kind: int, depth: int) -> Any:
        return self.byte() if kind in (TRUE, FALSE) else self.value(kind, depth)

    def struct(self, depth: int) -> Struct:
        result, number = Struct(), 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            result.fields.append([number, head & 15, self.value(head & 15, depth)])
        return result


def _varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write(out: bytearray, kind: int, value: Any) -> None:
    if kind in COLLECTIONS:
        _write_collection(out, kind, value)
    elif kind == BYTE:
        out.append(value)
    elif kind in INTEGERS:
        _varint(out, value << 1 if value >= 0 else (-value << 1) - 1)
    elif kind in (DOUBLE, UUID):
        out += value
    elif kind == BINARY:
        _varint(out, len(value))
        out += value


def _write_collection(out: bytearray, kind: int, value: Any) -> None:
    if kind in (LIST, SET):
        if len(value.items) < 15:
            out.append(len(value.items) << 4 | value.element)
        else:
            out.append(0xF0 | value.element)
            _varint(out, len(value.items))
        for item in value.items:
            _write_element(out, value.element, item)
    elif kind == MAP:
        _varint(out, len(value.items))
        if value.items:
            out.append(value.key << 4 | value.value)
        for key, item in value.items:
            _write_element(out, value.key, key)
            _write_element(out, value.value, item)
    elif kind == STRUCT:
        last = 0
        for number, kind_of, item in value.fields:
            if kind_of in (TRUE, FALSE):
                kind_of = TRUE if item else FALSE
            if 0 < number - last <= 15:
                out.append(number - last << 4 | kind_of)
            else:
                out.append(kind_of)
                _write(out, I16, number)
            if kind_of not in (TRUE, FALSE):
                _write(out, kind_of, item)
            last = number
        out.append(0)


def _write_element(out: bytearray, kind: int, item: Any) -> None:
    _write(out, BYTE if kind in (TRUE, FALSE) else kind, item)


# ---------------------------------------------------------------- modules: AAD, framing, ciphers

FOOTER, COLUMN_META, DATA_PAGE, DICTIONARY_PAGE, DATA_HEADER, DICTIONARY_HEADER = range(6)
COLUMN_INDEX, OFFSET_INDEX, BLOOM_HEADER, BLOOM_BITSET = range(6, 10)
MODULE_NAMES = (
    "footer",
    "column metadata",
    "data page",
    "dictionary page",
    "data page header",
    "dictionary page header",
    "column index",
    "offset index",
    "bloom filter header",
    "bloom filter bitset",
)
PAGES = (DATA_PAGE, DICTIONARY_PAGE)
GCM: Final = "AES_GCM_V1"
CTR: Final = "AES_GCM_CTR_V1"


def module_aad(
    file_aad: bytes, kind: int, row_group: int | None = None, column: int | None = None, page: int | None = None
) -> bytes:
    """`file_aad` is the prefix and the file's unique bytes; ordinals are only taken by the types that have them."""
    aad = file_aad + bytes([kind])
    if kind != FOOTER:
        aad += struct.pack("<hh", row_group, column)
    if kind in (DATA_PAGE, DATA_HEADER):
        aad += struct.pack("<h", page)
    return aad


def seal(key: bytes, plain: bytes, aad: bytes, *, ctr: bool = False) -> bytes:
    """A framed module."""
    nonce = os.urandom(12)
    sealed = _ctr(key, nonce, plain) if ctr else AESGCM(key).encrypt(nonce, plain, aad)
    return struct.pack("<I", len(nonce + sealed)) + nonce + sealed


def unseal(key: bytes, framed: bytes, aad: bytes, *, ctr: bool = False) -> bytes:
    """The plaintext of exactly one framed module; cryptography's InvalidTag if it is not what was sealed."""
    if len(framed) < 16 + (0 if ctr else 16) or struct.unpack("<I", framed[:4])[0] != len(framed) - 4:
        raise MalformedError(f"a module of {len(framed)} bytes is not framed as one")
    nonce, sealed = framed[4:16], framed[16:]
    return _ctr(key, nonce, sealed) if ctr else AESGCM(key).decrypt(nonce, sealed, aad)


def _ctr(key: bytes, nonce: bytes, data: bytes) -> bytes:
    return Cipher(algorithms.AES(key), modes.CTR(nonce + b"\0\0\0\1")).encryptor().update(data)


def framed_at(data: bytes, offset: int) -> bytes:
    """The framed module at `offset`, prefix included."""
    if not 0 <= offset <= len(data) - 4:
        raise MalformedError(f"no module at {offset}")
    length = 4 + struct.unpack_from("<I", data, offset)[0]
    if length > len(data) - offset:
        raise MalformedError(f"the module at {offset} is longer than the file")
    return data[offset : offset + length]


# ---------------------------------------------------------------- key material (PKMT1)


class Pkmt1:
    """The keys of files that parquet-java's or Arrow's crypto factories wrote, over master keys that are held here.

    The KMS is parquet's InMemoryKMS: base64 of nonce, ciphertext and tag, AAD the id of the master key. An instance is
    what ParquetFile takes for `columns`, and its method `footer` for `footer_key`.
    """

    def __init__(self, master_keys: Mapping[str, bytes], file: Path | None = None) -> None:
        self.master_keys = master_keys
        self.external: dict[str, str] = {}
        if file is not None:
            beside = file.with_name(f"_KEY_MATERIAL_FOR_{file.name}.json")
            self.external = json.loads(beside.read_text())

    def metadata(self, key: bytes, master_key: str, *, footer: bool = False, double_wrapping: bool = False) -> bytes:
        """Key metadata for a data key, with the material in it."""
        wrapping, aad, double = self.master_keys[master_key], master_key.encode(), {}
        if double_wrapping:
            kek, kek_id = os.urandom(16), os.urandom(16)
            double["keyEncryptionKeyID"] = base64.b64encode(kek_id).decode()
            double["wrappedKEK"] = _wrap(wrapping, kek, aad)
            wrapping, aad = kek, kek_id
        material = {
            "keyMaterialType": "PKMT1",
            "internalStorage": True,
            "isFooterKey": footer,
            **({"kmsInstanceID": "DEFAULT", "kmsInstanceURL": "DEFAULT"} if footer else {}),
            "masterKeyID": master_key,
            "wrappedDEK": _wrap(wrapping, key, aad),
            "doubleWrapping": double_wrapping,
            **double,
        }
        return json.dumps(material).encode()

    def material(self, metadata: bytes) -> dict[str, Any]:
        material = json.loads(metadata)
        if not material["internalStorage"]:
            material = json.loads(self.external[material["keyReference"]])
        if material["keyMaterialType"] != "PKMT1":
            raise MalformedError(f"key material {material['keyMaterialType']}")
        return material

    def key(self, metadata: bytes) -> bytes:
        material = self.material(metadata)
        master = material["masterKeyID"]
        wrapping, aad = self.master_keys[master], master.encode()
        if material["doubleWrapping"]:
            wrapping = _unwrap(wrapping, material["wrappedKEK"], aad)
            aad = base64.b64decode(material["keyEncryptionKeyID"])
        return _unwrap(wrapping, material["wrappedDEK"], aad)

    def footer(self, metadata: bytes | None) -> bytes:
        if metadata is None or not self.material(metadata)["isFooterKey"]:
            raise MalformedError("no key material of a footer key")
        return self.key(metadata)

    def __call__(self, path: tuple[str, ...], metadata: bytes | None) -> bytes | None:
        if metadata is None:
            return None
        return self.key(metadata) if self.material(metadata)["masterKeyID"] in self.master_keys else None


def _wrap(wrapping: bytes, key: bytes, aad: bytes) -> str:
    nonce = os.urandom(12)
    return base64.b64encode(nonce + AESGCM(wrapping).encrypt(nonce, key, aad)).decode()


def _unwrap(key: bytes, wrapped: str, aad: bytes) -> bytes:
    sealed = base64.b64decode(wrapped)
    return AESGCM(key).decrypt(sealed[:12], sealed[12:], aad)


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Module:
    """A module of a file, opened. In the plaintext columns of a file there are modules too, that are not sealed."""

    kind: int
    row_group: int | None
    column: int | None
    page: int | None  # ordinal among the chunk's data pages
    path: tuple[str, ...] | None
    offset: int | None  # of the first byte in the file; None for column metadata, which is inside the footer
    length: int  # in the file, framing included
    sealed: bool
    ctr: bool  # and so without a tag
    plain: bytes = field(repr=False)
    levels: int = 0  # bytes before the frame in parquet-java's layout of V2 pages; `offset` and `length` include them

    @property
    def name(self) -> str:
        return MODULE_NAMES[self.kind]

    @property
    def begin(self) -> int:
        """`offset`, of a module that stands outside the footer."""
        assert self.offset is not None, f"{self.name} stands in the footer"
        return self.offset

    @property
    def at(self) -> tuple[int, int | None, int | None, int | None]:
        return self.kind, self.row_group, self.column, self.page


@dataclass(frozen=True)
class Chunk:
    row_group: int
    column: int
    path: tuple[str, ...]
    key: bytes | None = field(repr=False)  # None: not encrypted
    footer_key: bool
    key_metadata: bytes | None
    chunk: Struct
    meta: Struct  # ColumnMetaData, opened


Keys = Mapping[Any, bytes] | Callable[[tuple[str, ...], bytes | None], bytes | None]


class ParquetFile:
    """A Parquet file, plaintext or encrypted, in any mode of the spec.

    footer_key: or called with its key metadata; None opens plaintext files, and plaintext footers without a look at
    their signature.
    columns: keys by path (dotted or a tuple), or called with path and key metadata. Chunks of a column whose key is
    not given are left out of everything below.
    """

    def __init__(
        self,
        source: bytes | os.PathLike[str] | str,
        footer_key: bytes | Callable[[bytes | None], bytes] | None = None,
        columns: Keys | None = None,
        *,
        aad_prefix: bytes | None = None,
    ) -> None:
        self.data = data = bytes(source) if isinstance(source, bytes) else Path(source).read_bytes()
        self._columns = columns or {}
        self.magic = data[-4:]
        if len(data) < 12 or self.magic not in (b"PAR1", b"PARE") or data[:4] != self.magic:
            raise MalformedError("not a Parquet file")
        self.tail = len(data) - 8 - struct.unpack_from("<I", data, len(data) - 8)[0]  # where the footer begins
        if self.tail < 4:
            raise MalformedError("the footer is longer than the file")
        tail = data[self.tail : -8]
        self.crypto: Struct | None = None  # FileCryptoMetaData of an encrypted footer
        if self.magic == b"PARE":
            if footer_key is None:
                raise MalformedError("an encrypted footer needs its key")
            self.crypto, end = parse(tail)
            self._algorithm(self.crypto.get(1, STRUCT), aad_prefix)
            self._footer_key(footer_key, self.crypto[2])
            framed = tail[end:]
            plain = unseal(self.footer_key, framed, module_aad(self.aad, FOOTER))
            self.footer, _ = parse(plain)
            if 8 in self.footer or 9 in self.footer:
                raise MalformedError("an encrypted footer repeats what is in FileCryptoMetaData")
            where, length = self.tail + end, len(framed)
        else:
            self.footer, end = parse(tail)
            self._algorithm(self.footer.get(8, STRUCT), aad_prefix)
            self._footer_key(footer_key, self.footer[9])
            plain, where, length = tail[:end], self.tail, len(tail)
            if len(tail) - end != (0 if self.algorithm is None else 28):
                raise MalformedError(f"{len(tail) - end} bytes after the footer")
            check = self.algorithm is not None and self.footer_key is not None
            if check and not hmac.compare_digest(self._signature(plain, tail[end : end + 12]), tail[end:]):
                raise MalformedError("the signature is not the footer's")
        self._footer = Module(FOOTER, None, None, None, None, where, length, self.algorithm is not None, False, plain)
        self.leaves = _leaves(self.footer[2].items)

    def _algorithm(self, union: Struct | None, supplied: bytes | None) -> None:
        """algorithm: None if nothing is encrypted. aad: what all AADs of the file begin with."""
        self.algorithm, self.aad = None, b""
        if union is None:
            return
        names = {1: GCM, 2: CTR}
        if [number in names for number, _, _ in union.fields] != [True]:
            raise MalformedError("an algorithm that the spec does not have")
        number = union.fields[0][0]
        self.algorithm, parameters = names[number], union.get(number, STRUCT)
        stored, unique = parameters.get(1, BINARY), parameters.get(2, BINARY)
        if parameters[3] and supplied is None:
            raise MalformedError("the AAD prefix must be supplied")
        if stored is not None and supplied is not None and stored != supplied:
            raise MalformedError("another AAD prefix is stored")
        if not unique:
            raise MalformedError("the file has no unique bytes")
        self.aad_prefix, self.aad_unique = stored if supplied is None else supplied, unique
        self.aad = (self.aad_prefix or b"") + unique

    def _footer_key(self, key: Any, metadata: bytes | None) -> None:
        self.footer_key_metadata = metadata or None
        self.footer_key = key(self.footer_key_metadata) if callable(key) else key

    def _signature(self, footer: bytes, nonce: bytes) -> bytes:
        return nonce + AESGCM(self.footer_key).encrypt(nonce, footer, module_aad(self.aad, FOOTER))[-16:]

    def _key(self, path: tuple[str, ...], metadata: bytes | None) -> bytes | None:
        if callable(self._columns):
            return self._columns(path, metadata)
        return self._columns.get(path, self._columns.get(".".join(path)))

    # ------------------------------------------------ reading

    def chunks(self) -> Iterator[Chunk]:
        """All column chunks, in the order of the footer, with their metadata opened."""
        for row_group, group in enumerate(self.footer[4].items):
            if group[7] not in (None, row_group) or len(group[1].items) != len(self.leaves):
                raise MalformedError(f"row group {row_group} is not where it says, or not of the schema")
            for column, chunk in enumerate(group[1].items):
                opened = self._open_chunk(row_group, column, chunk)
                if opened is not None:
                    yield opened

    def _open_chunk(self, row_group: int, column: int, chunk: Struct) -> Chunk | None:
        path, crypto, sealed = self.leaves[column], chunk[8], chunk[9]
        if crypto is None:
            if sealed is not None or chunk[3] is None:
                raise MalformedError(f"{path}: an unencrypted column has its metadata in the open")
            return Chunk(row_group, column, path, None, False, None, chunk, _check_path(chunk[3], path))
        [[variant, _, by_column]] = crypto.fields
        if variant == 1:
            key, metadata = self.footer_key, None
        else:
            if tuple(name.decode() for name in by_column[1].items) != path:
                raise MalformedError(f"{path}: the key is another column's")
            metadata = by_column[2] or None
            key = self._key(path, metadata)
        if key is None:
            return None
        separate = variant == 2 or self.magic == b"PAR1"
        if separate != (sealed is not None) or (chunk[3] is not None) != (variant == 1 or self.magic == b"PAR1"):
            raise MalformedError(f"{path}: its metadata is not where this mode has it")
        meta = chunk[3]
        if sealed is not None:
            meta, _ = parse(unseal(key, sealed, module_aad(self.aad, COLUMN_META, row_group, column)))
        return Chunk(row_group, column, path, key, variant == 1, metadata, chunk, _check_path(meta, path))

    def modules(self) -> Iterator[Module]:
        """Every module: the footer, then by row group and column, metadata, pages in order, indexes, bloom filter.

        Raises what `unseal` and `parse` raise, and MalformedError where CRC, sizes, counts or positions do not fit.
        """
        yield self._footer
        for chunk in self.chunks():
            sealed = chunk.chunk[9]
            if sealed is not None:
                plain = unseal(chunk.key, sealed, module_aad(self.aad, COLUMN_META, chunk.row_group, chunk.column))  # type: ignore[arg-type]
                yield self._module(chunk, COLUMN_META, None, len(sealed), plain)
            pages = list(self.pages(chunk))
            yield from pages
            yield from self._indexes(chunk, pages)
            yield from self._bloom_filter(chunk)

    def _module(
        self,
        chunk: Chunk,
        kind: int,
        offset: int | None,
        length: int,
        plain: bytes,
        page: int | None = None,
        **more: int,
    ) -> Module:
        encrypted = chunk.key is not None
        ctr = encrypted and kind in PAGES and self.algorithm == CTR
        return Module(
            kind, chunk.row_group, chunk.column, page, chunk.path, offset, length, encrypted, ctr, plain, **more
        )

    def _open(self, chunk: Chunk, kind: int, framed: bytes, page: int | None = None) -> bytes:
        aad = module_aad(self.aad, kind, chunk.row_group, chunk.column, page)
        return unseal(chunk.key, framed, aad, ctr=kind in PAGES and self.algorithm == CTR)  # type: ignore[arg-type]

    def pages(self, chunk: Chunk) -> Iterator[Module]:
        """Headers and bodies in the order of the file. The body of a page is what was compressed, levels included."""
        meta, data = chunk.meta, self.data
        at = start = min((offset for offset in (meta[9], meta[11]) if offset), default=0)
        dictionary = bool(meta[11])
        values, count, uncompressed = meta[5], 0, 0
        end = start + meta[7]
        if end > len(data):
            raise MalformedError(f"{chunk.path}: pages outside of the file")
        while at < end:
            page = None if dictionary else count
            kind = DICTIONARY_HEADER if dictionary else DATA_HEADER
            if chunk.key is None:
                header, stop = parse(data, at)
                if header[1] == 2 and at == start:  # a dictionary that the metadata does not tell of
                    dictionary, page, kind = True, None, DICTIONARY_HEADER
                plain = data[at:stop]
            else:
                framed = framed_at(data, at)
                stop = at + len(framed)
                plain = self._open(chunk, kind, framed, page)
                header, _ = parse(plain)
            yield self._module(chunk, kind, at, stop - at, plain, page)
            if header[1] not in ((2,) if dictionary else (0, 3)):
                raise MalformedError(f"{chunk.path}: a page of type {header[1]}")
            uncompressed += stop - at + header[2]
            yield self._body(chunk, header, stop, page)
            at = stop + header[3]
            if not dictionary:
                values -= (header[5] or header[8])[1]
                count += 1
            dictionary = False
        if chunk.key is None:  # some old files tell too little of what is in the open, and are read all the same
            uncompressed, end = meta[6], max(at, end)
        if at != end or values != 0 or uncompressed != meta[6]:
            raise MalformedError(
                f"{chunk.path}: {at - end} bytes, {-values} values and {uncompressed - meta[6]} uncompressed bytes"
                " more in pages than in metadata"
            )

    def _body(self, chunk: Chunk, header: Struct, at: int, page: int | None) -> Module:
        body = self.data[at : at + header[3]]
        if len(body) != header[3] or (header[4] is not None and zlib.crc32(body) != header[4] & 0xFFFFFFFF):
            raise MalformedError(f"{chunk.path}: a page is cut, or its CRC is not that of the stored bytes")
        kind, levels, plain = DICTIONARY_PAGE if page is None else DATA_PAGE, 0, body
        if chunk.key is not None:
            whole = len(body) >= 4 and struct.unpack("<I", body[:4])[0] == len(body) - 4
            if not whole and header[8] is not None:  # parquet-java: the levels stay in the open
                levels = header[8][5] + header[8][6]
            plain = body[:levels] + self._open(chunk, kind, body[levels:], page)
        return self._module(chunk, kind, at, len(body), plain, page, levels=levels)

    def _indexes(self, chunk: Chunk, pages: list[Module]) -> Iterator[Module]:
        for kind, offset, length in ((COLUMN_INDEX, *self._span(chunk, 6)), (OFFSET_INDEX, *self._span(chunk, 4))):
            if offset is None:
                continue
            stored = self.data[offset : offset + length]  # type: ignore[operator]
            plain = stored if chunk.key is None else self._open(chunk, kind, stored)
            index, _ = parse(plain)
            if kind == OFFSET_INDEX:
                both = zip(pages[::2], pages[1::2], strict=True)
                found = [(one.offset, one.length + body.length) for one, body in both if one.kind == DATA_HEADER]
                listed = [(location[1], location[2]) for location in index[1].items]
                if found != listed:
                    raise MalformedError(f"{chunk.path}: the offset index has {listed}, the pages are at {found}")
            yield self._module(chunk, kind, offset, length, plain)  # type: ignore[arg-type]

    def _span(self, chunk: Chunk, number: int) -> tuple[int | None, int | None]:
        return chunk.chunk[number], chunk.chunk[number + 1]

    def _bloom_filter(self, chunk: Chunk) -> Iterator[Module]:
        at = chunk.meta[14]
        if at is None:
            return
        lengths = []
        if chunk.key is None:
            header, stop = parse(self.data, at)
            yield self._module(chunk, BLOOM_HEADER, at, stop - at, self.data[at:stop])
            bitset = self.data[stop : stop + header[1]]
            yield self._module(chunk, BLOOM_BITSET, stop, len(bitset), bitset)
            lengths = [stop - at, len(bitset)]
        else:
            for kind, offset in ((BLOOM_HEADER, at), (BLOOM_BITSET, None)):
                offset = at + sum(lengths) if offset is None else offset
                framed = framed_at(self.data, offset)
                lengths.append(len(framed))
                plain = self._open(chunk, kind, framed)
                yield self._module(chunk, kind, offset, len(framed), plain)
        if chunk.meta[15] not in (None, sum(lengths)):
            raise MalformedError(f"{chunk.path}: bloom_filter_length is {chunk.meta[15]}, not {lengths}")

    # ------------------------------------------------ what other readers rely on

    def complaints(self) -> list[str]:
        """What some readers trip over though each module opens: nothing in what a careful writer wrote."""
        found = []
        last = 4
        for number, group in enumerate(self.footer[4].items):
            chunks = [chunk for chunk in self.chunks() if chunk.row_group == number]
            if self.algorithm is not None and any(chunk.chunk[8] for chunk in chunks):
                if group[7] != number:
                    found.append(f"row group {number} has no ordinal: parquet-java takes 0")
                # parquet-java plans splits by file_offset; where it is missing it looks into the first column.
                if not group[5] or group[5] < last:
                    found.append(f"row group {number} has file_offset {group[5]}, expected {last} or more")
                if len(chunks) == len(self.leaves):
                    sizes = sum(chunk.meta[6] for chunk in chunks), sum(chunk.meta[7] for chunk in chunks)
                    if (group[2], group[6]) != sizes:
                        found.append(f"row group {number} has sizes {group[2]}, {group[6]}; its columns {sizes}")
                last = (group[5] or 0) + (group[6] or 0)
            for chunk in chunks:
                found += self._complaints_of(chunk)
        return found

    def _complaints_of(self, chunk: Chunk) -> Iterator[str]:
        if chunk.key is None:
            return
        kinds = [module.kind for module in self.pages(chunk)]
        there = DICTIONARY_HEADER in kinds
        name = f"row group {chunk.row_group}, {'.'.join(chunk.path)}"
        if bool(chunk.meta[11]) != there:
            yield f"{name}: dictionary_page_offset is what Arrow looks at"
        stats = chunk.meta[13]
        if stats is not None:  # parquet-java: ParquetReader's EncodingStats, then the encodings
            used = {(one[1], one[2]) for one in stats.items if one[3]}
            java = any(page == 2 for page, _ in used) and any(page in (0, 3) and how in (2, 8) for page, how in used)
        else:
            java = bool({2, 8} & set(chunk.meta[2].items))
        if java != there and DATA_PAGE in kinds:
            yield f"{name}: parquet-java takes the first page for {'a' if java else 'no'} dictionary"
        open_meta = chunk.chunk[3]
        if self.magic == b"PAR1" and open_meta is not None:
            left = [number for number, _, _ in open_meta.fields if number in (8, 12, 13, 16, 17) or number > 17]
            if left:
                yield f"{name}: fields {left} of the column metadata are in the open"

    def contents(self, moved: tuple[int, ...] = (6, 7, 9, 10, 11, 14, 15)) -> dict[tuple[Any, ...], bytes]:
        """What encryption must not change, by (module type, row group, column, page): equal before and after.

        Taken out is what has to change: sizes and CRC of stored bytes, offsets, crypto metadata, and the fields of
        ColumnMetaData that are named by `moved`.
        """
        result = {}
        for module in self.modules():
            if module.kind in (FOOTER, COLUMN_META):
                continue  # below, from the footer that is already parsed
            plain = module.plain
            if module.kind in (DATA_HEADER, DICTIONARY_HEADER):
                header, _ = parse(plain)
                header.remove(3, 4)
                plain = serialise(header)
            elif module.kind == OFFSET_INDEX:
                index, _ = parse(plain)
                for location in index[1].items:
                    location.remove(1, 2)
                plain = serialise(index)
            elif module.kind in (COLUMN_INDEX, BLOOM_HEADER):
                plain = serialise(parse(plain)[0])  # without the padding that parquet-java leaves
            result[module.at] = plain
        for chunk in self.chunks():
            meta, _ = parse(serialise(chunk.meta))
            meta.remove(*moved)
            result[COLUMN_META, chunk.row_group, chunk.column, None] = serialise(meta)
        footer, _ = parse(serialise(self.footer))
        footer.remove(8, 9)
        for group in footer[4].items:
            group.remove(2, 5, 6, 7)
            for chunk in group[1].items:
                chunk.remove(2, 3, 4, 5, 6, 7, 8, 9)
        result[FOOTER, None, None, None] = serialise(footer)
        return result

    # ------------------------------------------------ tampering, by somebody who may hold the keys

    def with_footer(
        self, footer: Struct | bytes | None = None, crypto: Struct | None = None, key: bytes | None = None
    ) -> bytes:
        """The file with another footer, sealed or signed as the one it has, with the footer key or another."""
        key = key or self.footer_key
        plain = footer if isinstance(footer, bytes) else serialise(footer or self.footer)
        if self.magic == b"PARE":
            tail = serialise(crypto or self.crypto) + seal(key, plain, module_aad(self.aad, FOOTER))  # type: ignore[arg-type]
        elif self.algorithm is not None:
            nonce = os.urandom(12)
            tail = plain + nonce + AESGCM(key).encrypt(nonce, plain, module_aad(self.aad, FOOTER))[-16:]
        else:
            tail = plain
        return self.data[: self.tail] + tail + struct.pack("<I", len(tail)) + self.magic

    def stored(self, module: Module) -> bytes:
        """The bytes of the module as they are stored, framing included."""
        if module.offset is None:
            return self.footer[4].items[module.row_group][1].items[module.column][9]
        return self.data[module.offset : module.offset + module.length]

    def replace(self, module: Module, stored: bytes) -> bytes:
        """The file with other bytes, of the same length, in place of a module.

        Column metadata is inside of the footer, which is sealed or signed again: the tampering is only found there.
        """
        if len(stored) != module.length:
            raise ValueError(f"{len(stored)} bytes cannot replace {module.length}")
        if module.offset is not None:
            return self.data[: module.offset] + stored + self.data[module.offset + module.length :]
        footer, _ = parse(serialise(self.footer))
        footer[4].items[module.row_group][1].items[module.column].set(9, BINARY, stored)
        return self.with_footer(footer)

    def flip(self, module: Module, byte: int = -1) -> bytes:
        """The file with one bit of a module turned over; `byte` counts in the stored bytes."""
        stored = bytearray(self.stored(module))
        stored[byte] ^= 1
        return self.replace(module, bytes(stored))


def _check_path(meta: Struct, path: tuple[str, ...]) -> Struct:
    if tuple(name.decode() for name in meta[3].items) != path:
        raise MalformedError(f"{path}: its metadata is another column's")
    return meta


def _leaves(schema: list[Struct]) -> list[tuple[str, ...]]:
    """Paths of the columns, in order."""
    leaves: list[tuple[str, ...]] = []
    elements = iter(schema)

    def below(path: tuple[str, ...], children: int) -> None:
        for _ in range(children):
            element = next(elements)
            here = (*path, element[4].decode())
            if element[5]:
                below(here, element[5])
            elif element[1] is not None:
                leaves.append(here)

    below((), next(elements)[5] or 0)
    if next(elements, None) is not None:
        raise MalformedError("the schema has elements that no parent has")
    return leaves
