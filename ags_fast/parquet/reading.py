"""The arguments of the public functions as values: how an encrypted file is read, and how a new one is encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ags_fast.parquet.spec import ALGORITHMS

if TYPE_CHECKING:
    from ags_fast._types import Retriever
    from ags_fast.parquet.keys import Keys

__all__ = ["PLAIN", "QUIRKS", "V2_LAYOUTS", "Encryption", "Reading", "check_choice"]

QUIRKS = frozenset({"duckdb", "arrow-ctr-mislabel"})
V2_LAYOUTS = {None: 0, "arrow": 1, "parquet-java": 2}  # as PageRun numbers them; None keeps what a page has


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError if an argument is not one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Reading:
    """How a file is opened. See `ags_fast.parquet.decrypt_file` for the fields that are its arguments."""

    keys: Keys | Retriever | None = None  # None opens no module
    aad_prefix: bytes | None = None
    aad_prefix_verifier: Callable[[bytes], object] | None = None
    quirks: Iterable[str] = ()
    allow_ctr: bool = False
    check_crc: bool = True
    allow_unauthenticated_levels: bool = True
    allow_plain: bool = False  # whether a file without encryption is accepted beside keys
    length: int | None = None  # of the file in bytes, from a trusted place
    exact: bool = False  # whether bytes after `length` are an IntegrityError
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "quirks", frozenset(self.quirks))  # an iterable can be used once only
        for unknown in sorted(frozenset(self.quirks) - QUIRKS):
            raise ValueError(f"quirks are {sorted(QUIRKS)}, not {unknown!r}")


PLAIN = Reading()  # of a file that is opened without keys


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Encryption:
    """How a new file is encrypted. See `ags_fast.parquet.encrypt_file` for the fields."""

    algorithm: str = "AES_GCM_V1"
    plaintext_footer: bool = False
    other_columns: str = "footer"
    aad_prefix: bytes | None = None
    store_aad_prefix: bool = True
    v2_layout: str | None = "arrow"

    def __post_init__(self) -> None:
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_choice("other_columns", self.other_columns, ("footer", "plain"))
        check_choice("v2_layout", self.v2_layout, V2_LAYOUTS)
