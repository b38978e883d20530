"""The arguments of the public functions: those that several share, and as values how a file is read or encrypted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypedDict, TypeVar

from ags_fast._types import Algorithm, ColumnsLeft, Layout, Retriever, check_choice
from ags_fast.parquet.keys import Keys, check_keys

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "PLAIN",
    "QUIRKS",
    "V2_LAYOUTS",
    "Accepting",
    "Encryption",
    "Opening",
    "Reading",
    "accepting",
    "opening",
    "sharing",
]

QUIRKS = frozenset({"duckdb", "arrow-ctr-mislabel"})
V2_LAYOUTS = {None: 0, "arrow": 1, "parquet-java": 2}  # as PageRun numbers them; None keeps what a page has


def sharing(shared: Any, before: Any = dict, **defaults: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have functions show the arguments of a TypedDict by their names, and refuse wrong ones in their own names.

    Args:
        shared: The TypedDict, which is their ``**`` argument.
        before: Makes the keyword arguments that the function gets, of those of the call.
        **defaults: What arguments are shown to be; None if it is not here.
    """
    hints = {name: hint.__forward_arg__ for name, hint in shared.__annotations__.items()}
    values, kind = {**dict.fromkeys(hints), **defaults}, inspect.Parameter.KEYWORD_ONLY
    named = [inspect.Parameter(name, kind, default=values[name], annotation=hint) for name, hint in hints.items()]

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.annotation != f"Unpack[{shared.__name__}]"]
        if shares := len(own) < len(signature.parameters):
            signature = signature.replace(parameters=sorted([*named, *own], key=lambda each: each.kind))

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> T:
            try:
                signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **(before(options) if shares else options))

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


class Accepting(TypedDict, total=False):
    """What is accepted of encrypted files: keyword arguments of the functions that open them.

    Attributes:
        aad_prefix_verifier: Called with the AAD prefix; raises if this is the wrong file.
        quirks: Mistakes of other writers to accept: "duckdb", "arrow-ctr-mislabel".
        allow_ctr: Whether to accept a file under AES_GCM_CTR_V1, whose page bytes have no tag. Pass True only for a
            file that you know to be written so. Beside an encrypted footer no tag covers the algorithm's name: anyone
            with write access to the storage can rename AES_GCM_V1 to AES_GCM_CTR_V1, and then change the pages of a
            file that had tags.
        check_crc: Whether a wrong CRC of a page without a tag is an IntegrityError. This finds damage, not forgery: 16
            bytes of such a page can be chosen so that the CRC fits.
        allow_unauthenticated_levels: Whether to accept V2 pages as parquet-java writes them, whose levels are outside
            of the module, in plain text and without a tag. Anyone with write access can change which values are null,
            and where lists begin. Reports and views name such pages; False refuses them with IntegrityError.
        threads: As for AgsCodec.

    Raises:
        FormatError: The file is not a Parquet file, or is damaged.
        IntegrityError: A tag does not pass. The error names module, row group, column and page.
        KeyAccessError: A key is missing. The error names the column.
        PolicyError: The file is not encrypted, has another AAD prefix, or is less protected than the arguments require.
    """

    aad_prefix_verifier: Callable[[bytes], object] | None
    quirks: Iterable[str]
    allow_ctr: bool
    check_crc: bool
    allow_unauthenticated_levels: bool
    threads: int | None


class Opening(Accepting, total=False):
    """How an encrypted file is opened: `Accepting`, and two more arguments.

    Attributes:
        aad_prefix: The file's AAD prefix. Required if the file does not store it, else compared with the stored one.
        storage_options: Options for fsspec, of URLs.
    """

    aad_prefix: bytes | None
    storage_options: Mapping[str, Any] | None


DEFAULTS: dict[str, Any] = {"quirks": (), "allow_ctr": False, "check_crc": True, "allow_unauthenticated_levels": True}
accepting = sharing(Accepting, **DEFAULTS)
opening = sharing(Opening, **DEFAULTS)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Reading:
    """How a file is opened. See `Opening` for the fields that are arguments."""

    keys: Keys | Retriever | None = None  # None opens no module
    aad_prefix: bytes | None = None
    aad_prefix_verifier: Callable[[bytes], object] | None = None
    quirks: Iterable[str] = ()
    allow_ctr: bool = False
    check_crc: bool = True
    allow_unauthenticated_levels: bool = True
    threads: int | None = None
    allow_plain: bool = False  # whether a file without encryption is accepted beside keys
    length: int | None = None  # of the file in bytes, from a trusted place
    exact: bool = False  # whether bytes after `length` are an IntegrityError
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.keys is not None:
            check_keys(self.keys, or_function=True)
        object.__setattr__(self, "quirks", frozenset(self.quirks))  # an iterable can be used once only
        for unknown in sorted(frozenset(self.quirks) - QUIRKS):
            raise ValueError(f"quirks are {sorted(QUIRKS)}, not {unknown!r}")


PLAIN = Reading()  # of a file that is opened without keys


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Encryption:
    """How a new file is encrypted. See `ags_fast.parquet.encrypt_file` for the fields."""

    algorithm: Algorithm = "AES_GCM_V1"
    plaintext_footer: bool = False
    other_columns: ColumnsLeft = "footer"
    aad_prefix: bytes | None = None
    store_aad_prefix: bool = True
    v2_layout: Layout | None = "arrow"

    def __post_init__(self) -> None:
        check_choice("algorithm", self.algorithm, Algorithm)
        check_choice("other_columns", self.other_columns, ColumnsLeft)
        check_choice("v2_layout", self.v2_layout, Layout, None)
