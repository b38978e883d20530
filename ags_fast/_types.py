"""Types of arguments that several public functions share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer
else:
    Buffer = object

__all__ = ["Buffer", "FilePath", "ReadableFile", "ReadableSource", "Retriever", "WritableFile", "WritableTarget"]


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
