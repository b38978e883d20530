"""Keys of a Parquet file by column, and the keys that are found while a file is open."""

from __future__ import annotations

from ags_fast._core import Key
from ags_fast.ags1 import KeyBytes
from ags_fast.errors import KeyAccessError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, TypeVar

    from ags_fast._types import Buffer, Retriever

__all__ = ["FOOTER_KEY", "ColumnPath", "FooterKey", "KeyRing", "Keys", "check_keys", "dotted"]


ColumnPath = tuple[str, ...]
if TYPE_CHECKING:
    # A Mapping is invariant in its keys: without this variable, dict[str, bytes] would be refused.
    _PathT = TypeVar("_PathT", bound=Sequence[str])  # text, or a tuple of names
    _NotedPathT = TypeVar("_NotedPathT", bound=Sequence[str])


class FooterKey:
    """The type of `FOOTER_KEY`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "FOOTER_KEY"

    def __reduce__(self) -> str:
        return "FOOTER_KEY"


FOOTER_KEY = FooterKey()
"""In `Keys.columns`: the column is sealed with the footer key."""


def dotted(path: Iterable[str]) -> str:
    """Return a column's path as text, with dots."""
    return path if isinstance(path, str) else ".".join(path)


def _key_bytes(key: Any, what: str) -> Any:
    if isinstance(key, FooterKey):
        return key
    try:
        value = KeyBytes(memoryview(key).cast("B"))
    except TypeError:
        raise TypeError(f"{what} is 16, 24 or 32 bytes, not {type(key).__name__!r}") from None
    if len(value) not in (16, 24, 32):
        raise ValueError(f"{what} must have 16, 24 or 32 bytes, not {len(value)}")
    if not any(value):
        raise ValueError(f"{what} is all zeros: memory that was never filled, not a key")
    return value


class Keys:
    """The keys of a Parquet file, by column. They are never pickled and never shown. Sizes may be mixed.

    Args:
        footer: The footer key: 16, 24 or 32 bytes. None reads, of a file with a signed footer, only columns that have
            keys of their own; the signature is not verified then.
        columns: ``{path: key or FOOTER_KEY}``. A path is text with dots, or a tuple of names, which may contain dots.
            The path of a group stands for every column in it. If a file has two columns with the same dotted path, the
            path with dots names both, except one that a tuple names.
        footer_metadata: The key_metadata to store for the footer key (section 4.3).
        column_metadata: The key_metadata to store for keys of columns, by the same paths (section 4.3).

    Raises:
        ValueError: A key has another size or is all zeros, or a column is named twice.
    """

    __slots__ = ("_columns", "_footer", "column_metadata", "footer_metadata")

    def __init__(
        self,
        footer: Buffer | None,
        columns: Mapping[_PathT, Buffer | FooterKey] | None = None,
        *,
        footer_metadata: bytes | None = None,
        column_metadata: Mapping[_NotedPathT, bytes] | None = None,
    ) -> None:
        self._columns: dict[str | ColumnPath, Any] = {}
        self._footer: bytes | None = None
        footer = self._footer = None if footer is None else _key_bytes(footer, "the footer key")
        columns = {path: _key_bytes(key, f"the key of {dotted(path)!r}") for path, key in (columns or {}).items()}
        for path, key in columns.items():
            name = path if isinstance(path, str) else tuple(path)
            shown = dotted(path)
            if ("." not in shown and {shown, (shown,)} & self._columns.keys()) or name in self._columns:
                raise _twice(shown)
            self._columns[name] = key
        if footer is None and (not columns or footer_metadata is not None or FOOTER_KEY in self._columns.values()):
            raise ValueError("without a footer key, only columns with keys of their own are possible")
        self.footer_metadata = footer_metadata
        self.column_metadata: dict[str | ColumnPath, bytes] = {
            path if isinstance(path, str) else tuple(path): bytes(value)
            for path, value in (column_metadata or {}).items()
        }
        unknown = [path for path in self.column_metadata if path not in self._columns]
        if unknown:
            raise ValueError(f"column_metadata names {unknown[0]!r}, for which columns has no key")

    def __repr__(self) -> str:
        return f"<ags_fast Parquet keys: {'no ' * (self._footer is None)}footer, {len(self._columns)} columns>"

    def __reduce__(self) -> str:
        raise TypeError("keys are never pickled: send key metadata, and unwrap the keys where they are used")

    @property
    def has_footer_key(self) -> bool:
        """Whether there is a footer key."""
        return self._footer is not None

    def footer_key(self) -> bytes:
        """Return the footer key. KeyAccessError if there is none."""
        if self._footer is None:
            raise KeyAccessError("the footer key is needed and not given: these Keys only read columns")
        return self._footer

    def column(self, path: ColumnPath) -> tuple[bytes | FooterKey, bytes | None] | None:
        """Return a leaf column's key and its metadata; None if neither the column nor a group around it is named."""
        if not self._columns:
            return None
        for depth in range(len(path), 0, -1):
            for name in (path[:depth], dotted(path[:depth])):
                key = self._columns.get(name)
                if key is not None:
                    return key, self.column_metadata.get(name) or None
        return None

    def check_paths(self, leaves: list[ColumnPath]) -> None:
        """Raise ValueError for a path that names no column of a file.

        With a misspelt path its column would be under another key, or in plain text. A path with dots is also refused
        if tuples name every column that it could name.
        """
        known: set[str | ColumnPath] = set()
        for leaf in leaves:
            for depth in range(1, len(leaf) + 1):
                known.add(leaf[:depth])
                known.add(dotted(leaf[:depth]))
        for path in self._columns:
            if path not in known:
                shown = dotted(path)
                some = ", ".join(repr(dotted(leaf)) for leaf in leaves[:10])
                raise ValueError(
                    f"the file has no column {shown!r}: its columns are {some}{', …' * (len(leaves) > 10)}"
                )
            named = {tuple(one) for one in known if not isinstance(one, str) and dotted(one) == path}
            if named and named <= self._columns.keys():
                raise _twice(str(path))


def check_keys(given: Any, *, or_function: bool = False) -> None:
    """Raise TypeError unless an argument is `Keys`, or, if that is allowed, a function."""
    if not isinstance(given, Keys) and not (or_function and callable(given)):
        function = ", or a function from key_metadata to a key" * or_function
        raise TypeError(f"keys must be Keys, such as Keys(footer_key){function}, not {type(given).__name__!r}")


def _twice(path: str) -> ValueError:
    return ValueError(f"the column {path!r} is named twice, as text and as a tuple: it has one key")


class KeyRing:
    """The keys of one open file. Each is asked for once, and has one Key: its schedule is shared."""

    def __init__(self, given: Keys | Retriever | None) -> None:
        self.footer: Key | None = None
        self.footer_metadata: bytes | None = None  # that the file stores beside its footer
        self._given = given
        self._made: dict[bytes, Key] = {}
        self._held: dict[ColumnPath | bytes | None, Key | None] = {}
        self._refusals: dict[ColumnPath | bytes | None, KeyAccessError] = {}

    @property
    def explicit(self) -> bool:
        """Whether the keys are Keys, not a function."""
        return isinstance(self._given, Keys)

    def make(self, value: bytes) -> Key:
        """Return the Key of a value."""
        if value not in self._made:
            self._made[value] = Key(value)
        return self._made[value]

    def open_footer(self, key_metadata: bytes | None, encrypted: bool) -> None:
        """Find the footer key. Without one, `footer` stays None. KeyAccessError if a function with keys finds none."""
        self.footer_metadata = key_metadata
        if isinstance(self._given, Keys):
            self.footer = self.make(self._given.footer_key()) if self._given.has_footer_key else None
            return
        try:
            self.footer = self._retrieve(key_metadata, "the footer")
        except KeyAccessError as error:
            if encrypted:
                raise
            raise KeyAccessError(
                f"{error}; without the footer key, Keys(None, {{column: key}}) reads columns with keys of their own"
            ) from error

    def names(self, path: ColumnPath) -> bool:
        """Whether Keys have an entry for a column."""
        return isinstance(self._given, Keys) and self._given.column(path) is not None

    def column(self, path: ColumnPath, key_metadata: bytes | None) -> Key | None:
        """Find the key of a column that has a key of its own; None if it is not held."""
        place = path if isinstance(self._given, Keys) else key_metadata  # a function is called once for each metadata
        if place not in self._held:
            found: Key | None = None
            if isinstance(self._given, Keys):
                entry = self._given.column(path)
                if entry is not None:
                    found = self.footer if isinstance(entry[0], FooterKey) else self.make(entry[0])
            elif key_metadata is None and self.footer_metadata is None:
                found = self.footer  # which the function returned for None
            elif self._given is not None:
                try:
                    found = self._retrieve(key_metadata, f"column {dotted(path)!r}")
                except KeyAccessError as error:  # other columns may still be readable
                    self._refusals[place] = error
            self._held[place] = found
        return self._held[place]

    def _retrieve(self, key_metadata: bytes | None, what: str) -> Key:
        """Call the function that has the keys, with None where the file stores no key_metadata."""
        assert self._given is not None and not isinstance(self._given, Keys)
        stored = "the key_metadata" if key_metadata is not None else "None, as the file stores no key_metadata,"
        try:
            value = self._given(key_metadata)
        except KeyError as error:  # from a dict's lookup
            raise KeyAccessError(f"no key was found for {stored} of {what}") from error
        except (TypeError, AttributeError) as error:
            if key_metadata is not None:
                raise
            raise KeyAccessError(
                f"the function takes no None, and the file stores no key_metadata of {what}"
            ) from error
        if value is None:
            raise KeyAccessError(f"no key was found for {stored} of {what}")
        return self.make(_key_bytes(value, f"the key of {what}"))

    def refuse_unnamed(self) -> None:
        """Note that a function cannot find the keys of columns whose key_metadata the file does not store."""
        self._refusals[None] = KeyAccessError("the file stores no key_metadata for this column, so pass Keys")

    def refusal(self, key_metadata: bytes | None) -> KeyAccessError | None:
        """The error of the function for a column's key_metadata, if it raised one."""
        return self._refusals.get(key_metadata)
