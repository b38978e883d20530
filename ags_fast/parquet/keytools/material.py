"""Key material: its JSON, the text of wrapped keys, and the files beside Parquet files that external material is in."""

from __future__ import annotations

import base64
import errno
import json
import os
import reprlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._json import check_marks
from ags_fast.ags1 import bytes_view
from ags_fast.errors import FormatError, KeyAccessError
from ags_fast.fs import Store, folder_of
from ags_fast.keys.encoding import unbase64
from ags_fast.keys.kms import check_key_id
from ags_fast.parquet.keys import FOOTER_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast._types import Buffer, FilePath, WrappedText
    from ags_fast.fs import NewFile, NewObject

__all__ = [
    "TYPE",
    "ColumnKeys",
    "Material",
    "Path",
    "Place",
    "decoded",
    "describe",
    "dumps",
    "encoded",
    "flag_field",
    "from_text",
    "key_metadata",
    "material_path",
    "parquet_name",
    "parse_column_keys",
    "parse_json",
    "text_field",
    "to_text",
    "typed",
]

Path = str | tuple[str, ...]  # of a column: with dots between its parts, or the parts
ColumnKeys = str | Mapping[str, Collection[Path]] | Mapping[Path, Any]

TYPE = "PKMT1"
NO_KMS = "DEFAULT"  # the id and URL of the KMS, where there are none
PREFIX, SUFFIX = "_KEY_MATERIAL_FOR_", ".json"
TEMPORARY = "_TMP"  # before PREFIX: what parquet-java renames in the end, after it has deleted the old file
MATERIAL_MAX_NBYTES = 1 << 16  # of one key's JSON: far more than wrapped keys need
EXTERNAL_MAX_NBYTES = 64 << 20  # of a file's: 32767 columns, each with 2 KB
KEY_ID_MAX_LENGTH = 2048  # of a master key's id, as AWS has it
FLAGS = ("internalStorage", "isFooterKey", "doubleWrapping")
TEXTS = ("keyReference", "kmsInstanceID", "kmsInstanceURL", "masterKeyID", "wrappedDEK")
KEK_TEXTS = ("keyEncryptionKeyID", "wrappedKEK")


class WrappedKek(NamedTuple):
    """A wrapped KEK, as text."""

    id: str
    wrapped: str


class Material(NamedTuple):
    """The fields of a key's material that unwrapping needs."""

    master_key_id: str
    wrapped_dek: str
    kek: WrappedKek | None  # None: single wrapping

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Material:
        """Read the fields that unwrapping needs. FormatError for a field that is missing or impossible."""
        key_id = text_field(fields, "masterKeyID")
        try:
            check_key_id(key_id)
        except ValueError:
            raise FormatError("key material names a master key that cannot be") from None
        if len(key_id) > KEY_ID_MAX_LENGTH:
            raise FormatError(f"key material names a master key by {len(key_id)} characters")
        kek = None
        if flag_field(fields, "doubleWrapping"):
            kek = WrappedKek(text_field(fields, "keyEncryptionKeyID"), text_field(fields, "wrappedKEK"))
        return cls(key_id, text_field(fields, "wrappedDEK"), kek)


def parse_json(data: bytes | str, what: str = "key metadata", limit: int = MATERIAL_MAX_NBYTES) -> dict[str, Any]:
    """Parse a JSON object in UTF-8 whose names are unique. FormatError for anything else."""
    if len(data) > limit:
        raise FormatError(f"{what} has {len(data)} bytes, more than the {limit} that such JSON may have")
    check_marks(data, what)
    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{what} is not the JSON of Parquet's key tools ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):  # readers would disagree on which one counts
        raise ValueError("a name stands twice")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def typed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, if they are of the type that is known here. Else FormatError."""
    if fields.get("keyMaterialType") != TYPE:
        kind = reprlib.repr(fields.get("keyMaterialType"))
        raise FormatError(f"not key metadata or key material of type {TYPE}: its type is {kind}")
    return fields


def flag_field(fields: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false. FormatError for anything else."""
    value = fields.get(name)
    if isinstance(value, str):  # parquet-java's first versions wrote "true"
        value = {"true": True, "false": False}.get(value)
    if not isinstance(value, bool):
        raise FormatError(f"key material has no {name}, or its {name} is neither true nor false")
    return value


def text_field(fields: Mapping[str, Any], name: str) -> str:
    """Return a field that is text. FormatError for anything else."""
    value = fields.get(name)
    try:
        if isinstance(value, str) and value.encode():
            return value
    except UnicodeEncodeError:
        pass
    raise FormatError(f"key material has no {name}, or its {name} is not text")


def dumps(value: Mapping[str, Any]) -> str:
    """Write JSON as Parquet's key tools do."""
    return json.dumps(value, separators=(",", ":"))


def key_metadata(key_id: str, wrapped: bytes, *, footer: bool, **more: str) -> bytes:
    """Return internal key metadata of a DEK that the KMS wraps itself.

    Args:
        key_id: The master key.
        wrapped: The DEK as the KMS has wrapped it.
        footer: Whether it is the footer key.
        **more: Fields beside those of PKMT1. Its readers pass over them.
    """
    material = {"keyMaterialType": TYPE, "internalStorage": True, "isFooterKey": footer}
    if footer:
        material |= {"kmsInstanceID": NO_KMS, "kmsInstanceURL": NO_KMS}
    text = to_text(wrapped, "auto", key_id)
    return dumps({**material, "masterKeyID": key_id, "wrappedDEK": text, "doubleWrapping": False, **more}).encode()


def decoded(name: str, text: str) -> bytes:
    """Decode base64. FormatError if `text` is something else."""
    try:
        return unbase64(text)
    except ValueError:
        raise FormatError(f"{name} in key material is not base64") from None


def encoded(data: bytes) -> str:
    """Encode as base64."""
    return base64.b64encode(data).decode()


def from_text(text: str, how: WrappedText) -> bytes:
    """Return the bytes that the KMS wrapped, from the text in key material."""
    if how == "base64":
        return decoded("a wrapped key", text)
    if how == "auto":
        try:
            return unbase64(text)
        except ValueError:
            pass
    return text.encode()


def to_text(wrapped: bytes, how: WrappedText, key_id: str) -> str:
    """Return the text of a wrapped key: the inverse of `from_text`.

    Raises:
        KeyAccessError: The wrapped key is empty, or is not text where it must be.
    """
    if not wrapped:
        raise KeyAccessError(f"the KMS returned nothing for a key to wrap with {key_id!r}")
    if how == "base64":
        return encoded(wrapped)
    try:
        text = wrapped.decode()
    except UnicodeDecodeError:
        if how == "plain":
            raise KeyAccessError(
                f"the key that the KMS wrapped with {key_id!r} is not text: wrapped_text is wrong"
            ) from None
        return encoded(wrapped)
    if how == "plain" or (text.isprintable() and from_text(text, how) == wrapped):
        return text
    return encoded(wrapped)


def describe(key_metadata: Buffer) -> dict[str, bool | str] | None:
    """Show what key metadata claims about its key, without a key and without a request.

    Args:
        key_metadata: As a Parquet file stores it.

    Returns:
        Names and values as in the JSON; None if this is not PKMT1. Only fields that PKMT1 has, with values that they
        can have: keys are in it only wrapped. None of it is authenticated.
    """
    try:
        fields = typed(parse_json(bytes(bytes_view(key_metadata))))
    except FormatError:
        return None
    shown: dict[str, bool | str] = {"keyMaterialType": TYPE}
    for read, names in ((flag_field, FLAGS), (text_field, TEXTS + KEK_TEXTS)):
        for name in names:
            try:
                value = read(fields, name)
            except FormatError:
                continue
            if isinstance(value, bool) or value.isprintable():
                shown[name] = value
    return shown


def parse_column_keys(column_keys: ColumnKeys) -> dict[Path, Any]:
    """Return which master key is for which column: ``{column: id}``, or ``{column: FOOTER_KEY}``.

    Args:
        column_keys: One of

            - text as parquet-java has it in ``parquet.encryption.column.keys``: ``"kc1:ssn,address.zip;kc2:salary"``.
              The last colon counts, since ids such as ARNs have colons;
            - ``{"kc1": ["ssn", ("address", "zip")], "kc2": ["salary"]}``, as pyarrow has it;
            - ``{"ssn": "kc1", ("address", "zip"): "kc1", "salary": "kc2"}``.

            A column is a path with dots, or a tuple of its parts, which may contain dots.

    Raises:
        TypeError: `column_keys`, or a column in it, has another type.
        ValueError: A column is named twice, or its path has empty parts.
    """
    found: dict[Path, Any] = {}
    names: set[tuple[str, ...]] = set()
    for column, key_id in _pairs(column_keys, FOOTER_KEY):
        parts = tuple(column.split(".")) if isinstance(column, str) else column
        if not (isinstance(parts, tuple) and all(isinstance(part, str) for part in parts)):
            raise TypeError(f"a column is a path with dots or a tuple of text, not {column!r}")
        if not parts or "" in parts:
            raise ValueError(f"a column's path has no empty parts, unlike {column!r}")
        if parts in names:
            raise ValueError(f"the column {column!r} has two master keys, or is named twice")
        names.add(parts)
        found[column] = key_id if key_id is FOOTER_KEY else check_key_id(key_id)
    return found


def _pairs(column_keys: ColumnKeys, footer_key: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(column_keys, str):
        for part in filter(None, map(str.strip, column_keys.split(";"))):
            key_id, colon, columns = part.rpartition(":")
            if not (colon and key_id.strip()):
                raise ValueError(f"column keys are masterKeyID:column,column;masterKeyID:column, unlike {part!r}")
            for column in columns.split(","):
                yield column.strip(), key_id.strip()
        return
    if not isinstance(column_keys, Mapping):
        raise TypeError(f"column keys are text or a mapping, not {type(column_keys).__name__}")
    for name, value in column_keys.items():
        if isinstance(value, str) or value is footer_key:
            yield name, value
        elif isinstance(value, (list, set, frozenset)):  # a tuple could be a path
            if not value:
                raise ValueError(f"the master key {name!r} has no columns")
            for column in value:
                yield column, name
        else:
            raise TypeError(f"{name!r} has {type(value).__name__}, not a master key's id or a list of columns")


def material_path(path: FilePath) -> str:
    """Return the path, or URL, of the external key material of a Parquet file."""
    folder, slash, name = os.fsdecode(path).rpartition("/")
    return f"{folder}{slash}{PREFIX}{name}{SUFFIX}"


def parquet_name(path: str) -> str | None:
    """Return the path of the Parquet file that a file is the key material of; None if it is not key material."""
    folder, slash, name = path.rpartition("/")
    name = name.removeprefix(TEMPORARY)
    if not (name.startswith(PREFIX) and name.endswith(SUFFIX) and len(name) > len(PREFIX + SUFFIX)):
        return None
    return None if "_temporary" in folder.split("/") else folder + slash + name[len(PREFIX) : -len(SUFFIX)]


class Place:
    """The external material of one Parquet file, which is beside the file.

    Args:
        path: Of the Parquet file.
        storage_options: Options for fsspec, of a URL.
        within: The store that `path` is relative to; None if `path` is a path or a URL.
    """

    def __init__(
        self,
        path: FilePath,
        storage_options: Mapping[str, Any] | None = None,
        *,
        within: Store | None = None,
    ) -> None:
        above, slash, name = os.fsdecode(path).rpartition("/")
        if within is None:
            folder = folder_of(os.fsdecode(path))
            if folder is None:
                raise ValueError(f"{os.fsdecode(path)!r} is not a file's path")
            within, above, slash = Store(folder, storage_options), "", ""
        self.store = within
        self.path = f"{above}{slash}{PREFIX}{name}{SUFFIX}"
        self.temporary = f"{above}{slash}{TEMPORARY}{PREFIX}{name}{SUFFIX}"
        self.sidecar = f"{above}{slash}.{PREFIX}{name}{SUFFIX}.crc"

    def exists(self) -> bool:
        """Whether there is material."""
        return any(self.store.stat(path) is not None for path in (self.path, self.temporary))

    def check_new(self) -> None:
        """FileExistsError if there is material."""
        if self.exists():
            said = "external key material is there already, and a Parquet file may need it"
            raise FileExistsError(errno.EEXIST, said, self.store.full_path(self.path))

    def create(self, external: Mapping[str, str]) -> None:
        """Create the material exclusively, and bring it to the disk."""
        self._delete_sidecar()
        self.store.create_exclusive(self.path, dumps(external).encode())

    def read(self) -> dict[str, str]:
        """Return ``{key reference: JSON}``. KeyAccessError if there is no material."""
        # parquet-java's rotation deletes the old file before it renames the new one: perhaps between two reads.
        for path in (self.path, self.temporary, self.path):
            try:
                data = self.store.read_small(path, EXTERNAL_MAX_NBYTES)
            except FileNotFoundError:
                continue
            external = parse_json(data, f"the key material {self.store.full_path(path)}", EXTERNAL_MAX_NBYTES)
            if not all(isinstance(text, str) for text in external.values()):
                raise FormatError(f"the key material {self.store.full_path(path)} has a key whose material is not text")
            return external
        raise KeyAccessError(
            f"the key material {self.store.full_path(self.path)} is not there: it belongs beside its Parquet file"
        )

    def replace(self, new: NewFile | NewObject, external: Mapping[str, str]) -> None:
        """Publish new material, whole and on the disk, in place of the old."""
        self._delete_sidecar()
        new.write(dumps(external).encode())
        new.publish()

    def _delete_sidecar(self) -> None:
        if self.store.local:  # Hadoop's checksum of the old material, which stays readable without it
            self.store.delete(self.sidecar)
