"""How the chunks of a new file are sealed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ags_fast._core import Modules, Side
from ags_fast.columnar import thrift
from ags_fast.parquet.keys import FOOTER_KEY, ColumnPath, FooterKey, Keys, check_keys
from ags_fast.parquet.opened import Crypto

if TYPE_CHECKING:
    from ags_fast._core import Chunk
    from ags_fast.parquet.opened import Opened
    from ags_fast.parquet.reading import Encryption

__all__ = ["PLAIN", "Sealer", "new_crypto"]

UNIQUE_NBYTES = 8  # of aad_file_unique, as parquet-java and Arrow choose it


def new_crypto(encryption: Encryption, keys: Keys) -> tuple[Crypto, bytes]:
    """Return how a new file is encrypted, and the beginning of its AADs, unlike any other file's (section 4.4.1)."""
    check_keys(keys)
    prefix = bytes(encryption.aad_prefix or b"")
    unique = os.urandom(UNIQUE_NBYTES)
    stored = prefix if prefix and encryption.store_aad_prefix else None
    supply = bool(prefix) and not encryption.store_aad_prefix
    return Crypto(encryption.algorithm, unique, stored, supply, keys.footer_metadata or None), prefix + unique


PLAIN = Side("plain")
UNDER_FOOTER_KEY = thrift.struct([(1, thrift.STRUCT, thrift.struct([]))])  # a ColumnCryptoMetaData


class Sealer:
    """Tells how each chunk is to be sealed under new keys.

    Args:
        opened: The file whose columns are sealed.
        keys: The new keys.
        crypto: How the new file is encrypted.
        aad: What its AADs begin with; None in DuckDB's dialect.
        other_columns: What becomes of columns that `keys` do not name: "footer" or "plain".
        like: Whether columns stay under the kind of key that they are under.
    """

    def __init__(
        self, opened: Opened, keys: Keys, crypto: Crypto, aad: bytes | None, other_columns: str, like: bool = False
    ) -> None:
        if not keys.has_footer_key:
            raise ValueError("a footer key is required to seal a file: these Keys have none")
        keys.check_paths(opened.leaves)
        self.crypto = crypto
        self.aad = aad
        self._opened = opened
        self._keys = keys
        self._other = other_columns
        self._like = like
        self._sides: dict[tuple[int, str], Side] = {}  # by number and kind of key

    def footer(self) -> Modules:
        """Return how the footer is sealed."""
        return Modules(self._opened.keyring.make(self._keys.footer_key()), self.aad, None, None)

    def __call__(self, chunk: Chunk) -> Side:
        """Return how a chunk is sealed."""
        place = chunk.column, chunk.kind
        side = self._sides.get(place)
        if side is None:
            side = self._sides[place] = self._side(chunk)
        return side

    def _side(self, chunk: Chunk) -> Side:
        entry = self._keys.column(chunk.path)
        if entry is None and (chunk.kind == "plain" if self._like else self._other == "plain"):
            return PLAIN
        value, metadata = entry if entry is not None else (FOOTER_KEY, None)
        if isinstance(value, FooterKey):
            kind, value, crypto_metadata = "footer", self._keys.footer_key(), UNDER_FOOTER_KEY
        else:
            kind, crypto_metadata = "column", _crypto_metadata(chunk.path, metadata)
        return Side(
            kind,
            self._opened.keyring.make(value),
            self.aad,
            ctr=self.crypto.algorithm == "AES_GCM_CTR_V1",
            by_ordinal=self._like,
            key_metadata=metadata,
            crypto_metadata=crypto_metadata,
        )


def _crypto_metadata(path: ColumnPath, key_metadata: bytes | None) -> bytes:
    """Encode the ColumnCryptoMetaData of a column with a key of its own (section 5.2)."""
    names = thrift.list_of(thrift.BINARY, [thrift.binary(name.encode("utf-8", "surrogateescape")) for name in path])
    metadata = thrift.binary(key_metadata) if key_metadata else None
    fields = thrift.struct([(1, thrift.LIST, names), (2, thrift.BINARY, metadata)])
    return thrift.struct([(2, thrift.STRUCT, fields)])
