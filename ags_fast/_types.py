"""Types of arguments that several public functions share, and the words that arguments take."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer
else:
    Buffer = object


class ReadableFile(Protocol):
    """A seekable binary file, open for reading."""

    def read(self, size: int = ..., /) -> Any: ...
    def seek(self, offset: int, whence: int = ..., /) -> Any: ...
    def seekable(self) -> bool: ...


class WritableFile(Protocol):
    """A binary file, open for writing."""

    def write(self, data: Any, /) -> Any: ...


FilePath: TypeAlias = str | os.PathLike[str]
ReadableSource: TypeAlias = FilePath | Buffer | ReadableFile
WritableTarget: TypeAlias = FilePath | WritableFile
Retriever: TypeAlias = Callable[[Any], Buffer | None]  # from a Parquet file's key_metadata (bytes, or None) to a key

# The words that an argument takes: its type, and for `check_choice`.
Algorithm: TypeAlias = Literal["AES_GCM_V1", "AES_GCM_CTR_V1"]
ColumnsLeft: TypeAlias = Literal["footer", "plain"]
Event: TypeAlias = Literal["planned", "kek-leaked", "dek-leaked", "mek-leaked"]
FileFormat: TypeAlias = Literal["ags1", "parquet", "auto"]
KeyMaterial: TypeAlias = Literal["keytools"]
Layout: TypeAlias = Literal["arrow", "parquet-java"]
Links: TypeAlias = Literal["skip", "follow", "error"]
OnError: TypeAlias = Literal["row", "raise"]
OrAllow: TypeAlias = Literal["refuse", "allow"]
OrDrop: TypeAlias = Literal["error", "drop"]
OrShow: TypeAlias = Literal["error", "hide", "null"]
OrSkip: TypeAlias = Literal["error", "skip"]
Rekeyed: TypeAlias = Literal["manifests", "data"]
Resume: TypeAlias = Literal["length", "verify"]
Rotated: TypeAlias = Literal["kek", "mek", "double-wrap"]
RotatedTable: TypeAlias = Literal["kek", "mek"]
WrappedText: TypeAlias = Literal["auto", "base64", "plain"]


def check_choice(name: str, value: Any, words: Any, *more: Any) -> None:
    """Raise ValueError unless the argument `name` is one of the words, which are a type above, or one of `more`."""
    known = (*get_args(words), *more)
    if value not in known:
        raise ValueError(f"{name} must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, not {value!r}")
