"""Open an AGS1 stream, for bytes or text, by a mode."""

from __future__ import annotations

import io

from ags_fast._text import TextWriter
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, KeyBytes, bytes_view, prefix_bytes
from ags_fast.stream import AgsReader, AgsWriter

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import EllipsisType
    from typing import Any, Literal, Required, TypeAlias, TypedDict, Unpack, overload

    from ags_fast._types import Buffer
    from ags_fast.keys import StandardKeyMetadata

    _Metadata: TypeAlias = StandardKeyMetadata | Buffer

    class _Options(TypedDict, total=False):
        key: Buffer | None
        aad_prefix: Buffer | None
        block_size: int | str | None
        max_block_size: int | str
        threads: int | None
        fsync: bool
        storage_options: Mapping[str, Any] | None
        encoding: str | None
        errors: str | None
        newline: str | None

    class _Trusted(_Options, total=False):
        length: Required[int | EllipsisType | None]
        key_metadata: _Metadata | None

    class _Known(_Options):  # the metadata have the length
        key_metadata: _Metadata

    class _New(_Options, total=False):
        key_metadata: _Metadata | None


__all__ = ["open"]


if TYPE_CHECKING:

    @overload
    def open(file: Any, mode: Literal["rb"] = "rb", **options: Unpack[_Trusted]) -> AgsReader: ...
    @overload
    def open(file: Any, mode: Literal["rb"] = "rb", **options: Unpack[_Known]) -> AgsReader: ...
    @overload
    def open(file: Any, mode: Literal["wb", "xb"], **options: Unpack[_New]) -> AgsWriter: ...
    @overload
    def open(file: Any, mode: Literal["r", "rt"], **options: Unpack[_Trusted]) -> io.TextIOWrapper: ...
    @overload
    def open(file: Any, mode: Literal["r", "rt"], **options: Unpack[_Known]) -> io.TextIOWrapper: ...
    @overload
    def open(file: Any, mode: Literal["w", "wt", "x", "xt"], **options: Unpack[_New]) -> io.TextIOWrapper: ...
    @overload
    def open(file: Any, mode: str, **options: Unpack[_Trusted]) -> AgsReader | AgsWriter | io.TextIOWrapper: ...


def open(  # noqa: PLR0913 (the contract's)
    file: Any,
    mode: str = "rb",
    *,
    key: Buffer | None = None,
    key_metadata: StandardKeyMetadata | Buffer | None = None,
    length: int | EllipsisType | None = ...,  # None has a meaning, so it cannot be the default
    aad_prefix: Buffer | None = b"",
    block_size: int | str | None = None,
    max_block_size: int | str = 64 << 20,
    threads: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
) -> AgsReader | AgsWriter | io.TextIOWrapper:
    """Open an AGS1 stream, as `builtins.open` opens a file.

    Args:
        file: A source of AgsReader, or a target of AgsWriter.
        mode: ``rb`` reads, ``wb`` writes, ``xb`` writes a path that must not exist yet. With ``t`` in place of ``b``,
            or with neither, the file is one of text, whose `buffer` is the reader or the writer.
        key: 16, 24 or 32 bytes.
        key_metadata: StandardKeyMetadata, or its encoded bytes, in place of `key`: it holds the key, the AAD prefix
            and, for reading, the length. `key`, `aad_prefix` and `length` may be given too, but must be the same.
        length: For reading, the stream's length in bytes, from a trusted place. None accepts the length of the source,
            and with it that blocks may have been cut from the end.
        aad_prefix: Bytes that tell this stream from others under the key; None is ``b""``.
        block_size: As for AgsReader or AgsWriter, in bytes.
        max_block_size: As for AgsReader, in bytes.
        threads: As for AgsCodec.
        fsync: As for AgsWriter.
        storage_options: Options for fsspec, of a URL.
        encoding: Of text, as `builtins.open` has it; so are `errors` and `newline`.
        errors: What becomes of bytes or characters that the encoding does not have.
        newline: How lines end.

    Raises:
        ValueError: `mode` is unknown, or an argument differs from the one in `key_metadata`.
        TypeError: There is no key, or, for reading, no length.
    """
    if mode not in ("rb", "wb", "xb", "r", "rt", "w", "wt", "x", "xt"):
        raise ValueError(f"mode must be 'rb', 'wb' or 'xb', or for text 'rt', 'wt' or 'xt', not {mode!r}")
    action, text = mode[0], "b" not in mode
    if not text and (encoding, errors, newline) != (None, None, None):
        raise ValueError(f"encoding, errors and newline are for text, and mode {mode!r} is for bytes")
    key = None if key is None else KeyBytes(prefix_bytes(key))  # what the frame has until the end shows no key
    if key_metadata is not None:
        if not hasattr(key_metadata, "encryption_key"):
            from ags_fast.keys import StandardKeyMetadata

            key_metadata = StandardKeyMetadata.decode(key_metadata := KeyBytes(bytes_view(key_metadata)))
        key, aad_prefix, length = _known(key_metadata, key, aad_prefix, length, action == "r")
    if key is None:
        raise TypeError("key or key_metadata is required")
    if action == "r":
        if length is ...:
            raise TypeError(
                "length is required: the stream's bytes as a trusted place has them, or None to trust the source"
            )
        reader = AgsReader(
            file,
            key,
            length=length,
            aad_prefix=aad_prefix,
            block_size=block_size,
            max_block_size=max_block_size,
            threads=threads,
            storage_options=storage_options,
        )
        return _text(reader, encoding, errors, newline) if text else reader
    if length is not ...:
        raise TypeError("length is for reading: a writer has it, as file_length, once it is closed")
    writer = AgsWriter(
        file,
        key,
        aad_prefix=aad_prefix,
        block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
        threads=threads,
        exclusive=action == "x",
        fsync=fsync,
        storage_options=storage_options,
    )
    return _text(writer, encoding, errors, newline) if text else writer


def _text(
    file: AgsReader | AgsWriter, encoding: str | None, errors: str | None, newline: str | None
) -> io.TextIOWrapper:
    options: Any = {"encoding": io.text_encoding(encoding, 3), "errors": errors, "newline": newline}
    discard = file.close if isinstance(file, AgsReader) else file.abort
    try:
        if isinstance(file, AgsWriter):
            return TextWriter(file, discard, **options)
        return io.TextIOWrapper(file, **options)  # type: ignore[arg-type]  # it needs no buffer, and has no name
    except BaseException:
        discard()
        raise


def _known(
    key_metadata: Any, key: bytes | None, aad_prefix: Buffer | None, length: int | EllipsisType | None, reads: bool
) -> tuple[bytes, bytes, int | EllipsisType | None]:
    """Return the key, the AAD prefix and the length that `key_metadata` has, if those given are the same."""
    from hmac import compare_digest

    if key is not None and not compare_digest(key, key_metadata.encryption_key):
        raise ValueError("key is not the one in key_metadata: give one of them")
    if prefix_bytes(aad_prefix) not in (b"", key_metadata.aad_prefix):
        raise ValueError("aad_prefix is not the one in key_metadata: give one of them")
    if reads and key_metadata.file_length is not None:
        if length is not ... and length != key_metadata.file_length:
            raise ValueError("length is not the one in key_metadata: give one of them")
        length = key_metadata.file_length
    return key_metadata.encryption_key, key_metadata.aad_prefix, length
