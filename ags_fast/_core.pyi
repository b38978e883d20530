from os import PathLike
from typing import Any, Self, final

from typing_extensions import Buffer

NONCE_NBYTES: int
TAG_NBYTES: int
OVERHEAD_NBYTES: int
MAX_THREADS: int
libcrypto_bundled: bool

@final
class Key:
    def __new__(cls, key: Buffer) -> Self: ...
    def __reduce__(self) -> Any: ...
    @property
    def sealed(self) -> int: ...
    def carry(self, sealed_before: int) -> None: ...
    def seal(self, nonce: Buffer, data: Buffer, aad: Buffer) -> bytes: ...
    def open(self, nonce: Buffer, data: Buffer, aad: Buffer) -> bytes: ...
    def seal_run(
        self,
        aad_prefix: bytes,
        block_size: int,
        first_block: int,
        plain: Buffer,
        target: Buffer | int,
        offset: int,
        threads: int,
    ) -> int: ...
    def open_run(
        self,
        aad_prefix: bytes,
        block_size: int,
        first_block: int,
        source: Buffer | int,
        offset: int,
        nbytes: int,
        out: Buffer,
        threads: int,
    ) -> None: ...
    def open_bytes(
        self,
        aad_prefix: bytes,
        block_size: int,
        first_block: int,
        source: Buffer | int,
        offset: int,
        nbytes: int,
        threads: int,
    ) -> bytes: ...

def grow(buffer: bytearray, nbytes: int) -> None: ...
def append(buffer: bytearray, filled: int, data: Buffer) -> int: ...
def open_file(path: str | PathLike[str], length: int | None, small: int) -> tuple[int, int, bytes]: ...

@final
class Span:
    def __new__(cls, offset: int, data: bytes) -> Self: ...
    @property
    def offset(self) -> int: ...
    @property
    def data(self) -> bytes: ...
    def get(self, offset: int, size: int) -> bytes | None: ...

def read_at(self: Any, offset: int, size: int) -> bytes: ...
def new_bytes(nbytes: int) -> tuple[bytes, memoryview]: ...
def libcrypto_version() -> str: ...
def libcrypto_cpu() -> str | None: ...
