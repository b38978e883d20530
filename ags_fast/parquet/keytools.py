"""Key material of Parquet's own key tools (PKMT1), over a `KmsClient`.

As parquet-java's PropertiesDrivenCryptoFactory and the CryptoFactory of Arrow and pyarrow write and read it.

A file has a data key (DEK) for its footer and one for each column that has a key of its own. How to come by a DEK is
its *key material*, a flat JSON object. In **double wrapping** (the default) a key encryption key (KEK) wraps it here:
nonce (12 bytes), AES-GCM(KEK, DEK), tag (16), with the KEK's id (16 random bytes) as AAD; the KMS wraps the KEK. In
**single wrapping** the KMS wraps each DEK, without any AAD of ours: other readers could not repeat it. **Internal**
material is the key's metadata in the Parquet file. **External** material is in ``_KEY_MATERIAL_FOR_<name>.json`` beside
the file, where it can be rotated, and the key's metadata refers to it.

What the KMS returns is bytes to a `KmsClient` and text in Parquet. ``wrapped_text`` says how one becomes the other:

- ``"base64"``: standard base64 with padding, as clients of services whose wrapped keys are binary do;
- ``"plain"``: the wrapped key is text itself, such as ``vault:v1:...`` or a JSON object: its UTF-8 bytes;
- ``"auto"``: reading, base64 is taken for base64, and what is no base64 for plain; writing, printable text that is no
  base64 stays plain, everything else becomes base64. It always reads what it wrote. Only a service whose wrapped
  keys are text that looks like base64 (letters and digits, a multiple of 4) needs ``"plain"``.

Which KMS is asked follows from the caller's client alone: ``kmsInstanceID`` and ``kmsInstanceURL`` in a file are never
used. The master key's id comes from the file; ``encryption.allowed-key-ids`` of the client limits it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import reprlib
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ags_fast._core import NONCE_NBYTES, OVERHEAD_NBYTES, Key
from ags_fast._json import check_marks
from ags_fast.ags1 import bytes_view
from ags_fast.errors import AgsError, ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import Store, folder_of
from ags_fast.keys.cache import KeyCache
from ags_fast.keys.encoding import unbase64
from ags_fast.keys.kek import KEY_NBYTES
from ags_fast.keys.kms import KmsClient, aes_key, as_kms, check_key_id, shared_client

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from typing_extensions import Buffer

    from ags_fast.parquet import Keys

    _Path = str | tuple[str, ...]  # of a column: with dots between its parts, or the parts
    _WrappedText = Literal["auto", "base64", "plain"]
    _ColumnKeys = str | Mapping[str, Collection[_Path]] | Mapping[_Path, Any]

__all__ = [
    "CryptoFactory",
    "KeyRetriever",
    "clear_cache",
    "describe",
    "material_path",
    "parse_column_keys",
    "resolve",
    "rotate",
]

TYPE = "PKMT1"
FOOTER = "footerKey"  # key references in external material
COLUMN = "columnKey"
PREFIX, SUFFIX = "_KEY_MATERIAL_FOR_", ".json"
TEMPORARY = "_TMP"  # before PREFIX: what parquet-java renames in the end, after it has deleted the old file
MATERIAL_MAX_NBYTES = 1 << 16  # of one key's JSON: far more than wrapped keys need
EXTERNAL_MAX_NBYTES = 64 << 20  # of a file's: 32767 columns, each with 2 KB
KEK_ID_NBYTES = 16
KEY_ID_MAX_LENGTH = 2048  # of a master key's id, as AWS has it
FLAGS = ("internalStorage", "isFooterKey", "doubleWrapping")
TEXTS = ("keyReference", "kmsInstanceID", "kmsInstanceURL", "masterKeyID", "wrappedDEK")
KEK_TEXTS = ("keyEncryptionKeyID", "wrappedKEK")
WRAPPED = ("wrappedDEK", "doubleWrapping", *KEK_TEXTS)  # what rotation changes
WRAPPED_TEXTS = ("auto", "base64", "plain")

# ---------------------------------------------------------------------------------------------------------- the factory


@dataclass(frozen=True, slots=True, eq=False)
class CryptoFactory:
    """Makes keys with key metadata for new Parquet files, and finds the keys of existing ones.

    kms: a client, or its properties. The other arguments say how new keys are wrapped; files are read whichever way
    they were written. double_wrapping, internal: see above. data_key_length, kek_length: in bytes. kms_instance_id,
    kms_instance_url: what new files say of their KMS, for parquet-java; nothing here reads them. cache_lifetime: how
    many seconds this process keeps a KEK: to open data keys, and to wrap new ones. wrapped_text: see above.
    storage_options: for fsspec, where external material is.

    It pickles, if the client does, and holds no key. Threads may share it.
    """

    kms: KmsClient | Mapping[str, str] = field(repr=False)
    _: KW_ONLY
    double_wrapping: bool = True
    internal: bool = True
    data_key_length: int = 16
    kek_length: int = 16
    kms_instance_id: str = "DEFAULT"
    kms_instance_url: str = "DEFAULT"
    cache_lifetime: float = 600.0
    wrapped_text: _WrappedText = "auto"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("data_key_length", "kek_length"):
            if getattr(self, name) not in KEY_NBYTES:
                raise ValueError(f"{name} is 16, 24 or 32 bytes, not {getattr(self, name)}")
        if not (self.kms_instance_id and self.kms_instance_url):
            raise ValueError("kms_instance_id and kms_instance_url are not empty: who has none says DEFAULT")
        if not self.cache_lifetime >= 0:
            raise ValueError(f"cache_lifetime is a number of seconds from 0, not {self.cache_lifetime}")
        if self.wrapped_text not in WRAPPED_TEXTS:
            raise ValueError(f"wrapped_text is {', '.join(WRAPPED_TEXTS)}, not {self.wrapped_text!r}")

    def encryption_keys(
        self, footer_key_id: str, column_keys: _ColumnKeys | None = None, *, path: str | os.PathLike[str] | None = None
    ) -> Keys:
        """Fresh keys for one new file, with their metadata: a footer key under the master key `footer_key_id`, and one
        for each column.

        column_keys: what `parse_column_keys` takes. Without any, the footer key is for all columns. In double wrapping,
        at most one call of the KMS for each master key; in single wrapping, one for each key.

        path: of the file that will be written, needed for external material, which is on the disk when this returns.
        FileExistsError if there is some for this path: a file may need it. Delete it if that file is gone.
        """
        from ags_fast.parquet import FOOTER_KEY, Keys

        check_key_id(footer_key_id)
        chosen = parse_column_keys(column_keys or {})
        place = None
        if not self.internal:
            if path is None:
                raise TypeError("external key material is kept beside the Parquet file: say its path")
            place = _Place(path, self.storage_options)
            place.check_new()
        wrapper = _Wrapper(self, _keks(self._lifetime))
        external: dict[str, str] = {}
        footer, footer_metadata = self._new_key(wrapper, footer_key_id, FOOTER, external)
        columns: dict[_Path, Any] = {}
        metadata: dict[_Path, bytes] = {}
        for column, key_id in chosen.items():
            if key_id is FOOTER_KEY:
                columns[column] = FOOTER_KEY
            else:
                reference = f"{COLUMN}{len(metadata)}"
                columns[column], metadata[column] = self._new_key(wrapper, key_id, reference, external)
        if place is not None:
            place.create(external)
        return Keys(footer, columns, footer_metadata=footer_metadata, column_metadata=metadata)

    def retriever(self, path: str | os.PathLike[str] | None = None) -> KeyRetriever:
        """A callable that finds keys by their metadata. path: of the Parquet file, for external material."""
        return KeyRetriever(self, path)

    @property
    def _lifetime(self) -> float:
        """What the factory says, and no longer than the KMS client does."""
        return min(self.cache_lifetime, self._client.cache_seconds)

    def _new_key(self, wrapper: _Wrapper, key_id: str, reference: str, external: dict[str, str]) -> tuple[bytes, bytes]:
        """A new DEK, and its metadata. External material goes into `external`."""
        material: dict[str, Any] = {"keyMaterialType": TYPE}
        if self.internal:
            material["internalStorage"] = True
        material["isFooterKey"] = reference == FOOTER
        if reference == FOOTER:
            material |= {"kmsInstanceID": self.kms_instance_id, "kmsInstanceURL": self.kms_instance_url}
        dek, wrapped = wrapper.new_key(key_id)
        material |= {"masterKeyID": key_id, **wrapped}
        if self.internal:
            return dek, _dumps(material).encode()
        external[reference] = _dumps(material)
        return dek, _dumps({"keyMaterialType": TYPE, "internalStorage": False, "keyReference": reference}).encode()

    def _dek(self, material: _Material) -> bytes:
        """The DEK that key material is of."""
        key_id, kek = material.master_key_id, material.kek
        if kek is None:
            dek = aes_key(_unwrap(self._client, _from_text(material.wrapped_dek, self.wrapped_text), key_id), key_id)
        else:
            sealed = _decoded("wrappedDEK", material.wrapped_dek)
            if len(sealed) - OVERHEAD_NBYTES not in KEY_NBYTES:  # before the KMS is asked for anything
                raise FormatError(f"{len(sealed)} bytes are no AES key that a KEK under {key_id!r} wrapped")
            wrapped_kek = _from_text(kek.wrapped, self.wrapped_text)
            key = _keks(self._lifetime).open(self._client, key_id, wrapped_kek)
            try:
                dek = key.open(sealed[:NONCE_NBYTES], sealed[NONCE_NBYTES:], _decoded("keyEncryptionKeyID", kek.id))
            except IntegrityError:
                raise IntegrityError(
                    f"a data key is not what the KEK of its key material, under the master key {key_id!r}, wrapped: "
                    "the material was changed"
                ) from None
        return dek

    @property
    def _client(self) -> KmsClient:
        return shared_client(self.kms) if isinstance(self.kms, Mapping) else as_kms(self.kms)


class KeyRetriever:
    """``key_metadata -> key``, both bytes, for the readers of this package. See `CryptoFactory.retriever`.

    External material is read once, with the first key that needs it. In double wrapping the KMS is called once for each
    KEK and cache lifetime, in single wrapping each time. It pickles, if the factory does.

    Raises FormatError for metadata that is not PKMT1 or impossible, KeyAccessError if the KMS refuses or the material
    is not there, IntegrityError if a wrapped key is not what was wrapped.
    """

    __slots__ = ("_external", "_factory", "_path")

    def __init__(self, factory: CryptoFactory, path: str | os.PathLike[str] | None = None) -> None:
        self._factory = factory
        self._path = path
        self._external: dict[str, str] | None = None

    def __call__(self, key_metadata: Buffer | None) -> bytes:
        if key_metadata is None:
            raise KeyAccessError("the file stores no key_metadata, so its keys are not of these tools: pass Keys")
        fields = _typed(_parse(bytes(bytes_view(key_metadata))))
        if not _flag(fields, "internalStorage"):
            fields = self._referred(_text(fields, "keyReference"))
        return self._factory._dek(_Material.of(fields))

    def _referred(self, reference: str) -> dict[str, Any]:
        if self._external is None:
            if self._path is None:
                raise KeyAccessError(
                    "the key material is in a file beside the Parquet file: say the Parquet file's path"
                )
            place = _Place(self._path, self._factory.storage_options)
            self._external = place.read()
        material = self._external.get(reference)
        if material is None:
            raise KeyAccessError(
                f"{material_path(self._path or '')} has no key {reprlib.repr(reference)}: it is another file's key "
                "material, or was changed"
            )
        return _typed(_parse(material))

    def __repr__(self) -> str:
        return f"KeyRetriever({self._factory!r}, {self._path!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyRetriever, (self._factory, self._path)


def resolve(
    key_metadata: Buffer,
    kms: KmsClient | Mapping[str, str],
    path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> bytes:
    """The key that `key_metadata` is of. path: of the Parquet file, for external material. options: of `CryptoFactory`.

    Raises what `KeyRetriever` does.
    """
    return CryptoFactory(kms, **options).retriever(path)(key_metadata)


def describe(key_metadata: Buffer) -> dict[str, bool | str] | None:
    """What key metadata says of its key, without any key and without asking anybody; None if it is not PKMT1.

    Names and values as in the JSON. Only fields that PKMT1 has, and values that they can have: keys are in it only
    wrapped. All of it is a claim.
    """
    try:
        fields = _typed(_parse(bytes(bytes_view(key_metadata))))
    except FormatError:
        return None
    shown: dict[str, bool | str] = {"keyMaterialType": TYPE}
    for read, names in ((_flag, FLAGS), (_text, TEXTS + KEK_TEXTS)):
        for name in names:
            try:
                value = read(fields, name)
            except FormatError:
                continue
            if isinstance(value, bool) or value.isprintable():
                shown[name] = value
    return shown


def parse_column_keys(column_keys: _ColumnKeys) -> dict[_Path, Any]:
    """Which master key is for a column: ``{column: id}``, or ``{column: FOOTER_KEY}``. It takes

    - text as parquet-java has it in ``parquet.encryption.column.keys``: ``"kc1:ssn,address.zip;kc2:salary"``. The last
      colon counts, since ids such as ARNs have some;
    - ``{"kc1": ["ssn", ("address", "zip")], "kc2": ["salary"]}``, as pyarrow does;
    - ``{"ssn": "kc1", ("address", "zip"): "kc1", "salary": "kc2"}``.

    A column is a path with dots, or a tuple of its parts, which may contain dots. ValueError for a column that is named
    twice.
    """
    from ags_fast.parquet import FOOTER_KEY

    found: dict[_Path, Any] = {}
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


def _pairs(column_keys: _ColumnKeys, footer_key: object) -> Iterator[tuple[Any, Any]]:
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
        elif isinstance(value, (list, set, frozenset)):  # of a tuple one cannot tell whether it is a path
            if not value:
                raise ValueError(f"the master key {name!r} has no columns")
            for column in value:
                yield column, name
        else:
            raise TypeError(f"{name!r} has {type(value).__name__}, where a master key's id or a list of columns is due")


# ---------------------------------------------------------------------------------------------------------- rotation


def rotate(
    path: str | os.PathLike[str],
    kms: KmsClient | Mapping[str, str],
    *,
    double_wrapping: bool | None = None,
    **options: Any,
) -> list[str]:
    """Wrap the keys in external material again, by the current versions of their master keys. Returns whose: the paths
    of the Parquet files.

    path: of a Parquet file, or of a folder: all that is in it and in its folders, except what Spark has in
    ``_temporary``. In double wrapping the data keys get new KEKs, one for each master key; in single wrapping the KMS
    wraps them again, itself if it can. double_wrapping: what all will be; None leaves each as it is. options: of
    `CryptoFactory`. Master key ids, key references and the Parquet files stay as they are.

    A material is replaced whole and on the disk: killed at any moment, the old one or the new one is there, and both
    open the file. PolicyError where the storage cannot do that. What Spark's local file system has as a checksum of
    the old one is removed. Of a folder all are tried, then the first error is raised; it can be repeated.
    ConcurrentChangeError if somebody else has changed a material meanwhile.
    """
    factory = CryptoFactory(kms, **options)
    for keks in list(_caches.values()):  # the master keys have new versions, and new files shall use them
        keks.renew()
    wrapper = _Wrapper(factory)
    text = os.fsdecode(path).rstrip("/")
    if folder_of(text) is not None and (one := _Place(text, factory.storage_options)).exists():
        one.rotate(factory, wrapper, double_wrapping)
        return [text]
    store = Store(text, factory.storage_options)
    try:
        names = sorted({name for entry in store.list() if (name := _parquet_name(entry.path)) is not None})
    except NotADirectoryError:
        names = []
    if not names:
        raise FileNotFoundError(errno.ENOENT, "no external key material of this file, nor in such a folder", text)
    errors: list[AgsError | OSError] = []
    for name in names:
        try:
            _Place(name, within=store).rotate(factory, wrapper, double_wrapping)
        except (AgsError, OSError) as error:
            errors.append(error)
    if errors:
        errors[0].add_note(f"{len(errors)} of {len(names)} key materials in {store!r} were not rotated, this one first")
        raise errors[0]
    return [store.full_path(name) for name in names]


def _rotated(factory: CryptoFactory, wrapper: _Wrapper, fields: dict[str, Any], double: bool | None) -> dict[str, Any]:
    """Key material with the same DEK, wrapped again. Fields that are not known here are kept."""
    material = _Material.of(fields)
    key_id, was_double = material.master_key_id, material.kek is not None
    if double is None:
        double = was_double
    if double or was_double:
        wrapped = wrapper.wrap(factory._dek(material), key_id, double)
    else:
        text, how, client = material.wrapped_dek, factory.wrapped_text, factory._client
        again = _asked(key_id, lambda: client.rewrap_key(_from_text(text, how), key_id))
        wrapped = {"wrappedDEK": _to_text(again, how, key_id), "doubleWrapping": False}
    return {name: value for name, value in fields.items() if name not in WRAPPED} | wrapped


def _parquet_name(path: str) -> str | None:
    """The path of the Parquet file that a file has the key material of; None if it is no key material."""
    folder, slash, name = path.rpartition("/")
    name = name.removeprefix(TEMPORARY)
    if not (name.startswith(PREFIX) and name.endswith(SUFFIX) and len(name) > len(PREFIX + SUFFIX)):
        return None
    return None if "_temporary" in folder.split("/") else folder + slash + name[len(PREFIX) : -len(SUFFIX)]


# ---------------------------------------------------------------------------------------------------------- places


def material_path(path: str | os.PathLike[str]) -> str:
    """The path, or URL, of the external key material of a Parquet file."""
    folder, slash, name = os.fsdecode(path).rpartition("/")
    return f"{folder}{slash}{PREFIX}{name}{SUFFIX}"


class _Place:
    """Where the external material of one Parquet file is: beside it.

    within: the store that `path` is relative to; None if it is a path or a URL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        within: Store | None = None,
    ) -> None:
        above, slash, name = os.fsdecode(path).rpartition("/")
        if within is None:
            folder = folder_of(os.fsdecode(path))
            if folder is None:
                raise ValueError(f"{os.fsdecode(path)!r} is no path of a file")
            within, above, slash = Store(folder, storage_options), "", ""
        self.store = within
        self.path = f"{above}{slash}{PREFIX}{name}{SUFFIX}"
        self.temporary = f"{above}{slash}{TEMPORARY}{PREFIX}{name}{SUFFIX}"
        self.sidecar = f"{above}{slash}.{PREFIX}{name}{SUFFIX}.crc"

    def exists(self) -> bool:
        return any(self.store.stat(path) is not None for path in (self.path, self.temporary))

    def check_new(self) -> None:
        if self.exists():
            said = "external key material is there already, and a Parquet file may need it"
            raise FileExistsError(errno.EEXIST, said, self.store.full_path(self.path))

    def create(self, external: Mapping[str, str]) -> None:
        """Exclusively, and on the disk."""
        self._delete_sidecar()
        self.store.create(self.path, _dumps(external).encode())

    def read(self) -> dict[str, str]:
        """``{key reference: JSON}``. KeyAccessError if there is none."""
        # parquet-java's rotation deletes the one before it renames the other, perhaps between two of these.
        for path in (self.path, self.temporary, self.path):
            try:
                data = self.store.read(path, EXTERNAL_MAX_NBYTES)
            except FileNotFoundError:
                continue
            external = _parse(data, f"the key material {self.store.full_path(path)}", EXTERNAL_MAX_NBYTES)
            if not all(isinstance(text, str) for text in external.values()):
                raise FormatError(f"the key material {self.store.full_path(path)} has a key whose material is no text")
            return external
        raise KeyAccessError(
            f"the key material {self.store.full_path(self.path)} is not there: it belongs beside its Parquet file"
        )

    def rotate(self, factory: CryptoFactory, wrapper: _Wrapper, double: bool | None) -> None:
        before = self.store.stat(self.path)
        with self.store.new(self.path, fsync=True) as new:
            if not new.atomic:
                raise PolicyError(
                    f"{self.store!r} cannot replace a file in one step: rotate its key material in a local folder "
                    "or in an object store"
                )
            try:
                external = {
                    reference: _dumps(_rotated(factory, wrapper, _typed(_parse(text)), double))
                    for reference, text in self.read().items()
                }
            except AgsError as error:
                error.add_note(f"in the key material {self.store.full_path(self.path)}")
                raise
            if self.store.stat(self.path) != before:
                raise ConcurrentChangeError(f"the key material {self.store.full_path(self.path)} was changed meanwhile")
            self._delete_sidecar()
            new.write(_dumps(external).encode())
            new.publish()

    def _delete_sidecar(self) -> None:
        if self.store.local:  # Hadoop's checksum of an older one. It goes first: without it the older one is readable
            self.store.delete(self.sidecar)


# ---------------------------------------------------------------------------------------------------------- JSON


class _WrappedKek(NamedTuple):
    """As text."""

    id: str
    wrapped: str


class _Material(NamedTuple):
    """What is needed of a key's material, to unwrap it."""

    master_key_id: str
    wrapped_dek: str
    kek: _WrappedKek | None  # None: single wrapping

    @classmethod
    def of(cls, fields: dict[str, Any]) -> _Material:
        """FormatError for a field that is missing or impossible."""
        key_id = _text(fields, "masterKeyID")
        try:
            check_key_id(key_id)
        except ValueError:
            raise FormatError("key material names a master key that cannot be") from None
        if len(key_id) > KEY_ID_MAX_LENGTH:
            raise FormatError(f"key material names a master key by {len(key_id)} characters")
        kek = None
        if _flag(fields, "doubleWrapping"):
            kek = _WrappedKek(_text(fields, "keyEncryptionKeyID"), _text(fields, "wrappedKEK"))
        return cls(key_id, _text(fields, "wrappedDEK"), kek)


def _parse(data: bytes | str, what: str = "key metadata", limit: int = MATERIAL_MAX_NBYTES) -> dict[str, Any]:
    """A JSON object, in UTF-8, that names nothing twice, else FormatError."""
    if len(data) > limit:
        raise FormatError(f"{what} has {len(data)} bytes, and such JSON may have {limit}")
    check_marks(data, what)
    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{what} is not the JSON of Parquet's key tools ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} is a JSON {type(value).__name__}, where an object is due")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):  # readers would not agree which one counts
        raise ValueError("a name is there twice")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    """The same, if it is of the type that is known here."""
    if fields.get("keyMaterialType") != TYPE:
        kind = reprlib.repr(fields.get("keyMaterialType"))
        raise FormatError(f"this is no key metadata or key material of type {TYPE}: its type is {kind}")
    return fields


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if isinstance(value, str):  # parquet-java's first versions wrote "true"
        value = {"true": True, "false": False}.get(value)
    if not isinstance(value, bool):
        raise FormatError(f"key material has no {name}, or one that is neither true nor false")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    try:
        if isinstance(value, str) and value.encode():
            return value
    except UnicodeEncodeError:
        pass
    raise FormatError(f"key material has no {name}, or one that is no text")


def _dumps(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _decoded(name: str, text: str) -> bytes:
    try:
        return unbase64(text)
    except ValueError:
        raise FormatError(f"{name} in key material is no base64") from None


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: str, how: _WrappedText) -> bytes:
    """What the KMS wrapped, of the text in key material."""
    if how == "base64":
        return _decoded("a wrapped key", text)
    if how == "auto":
        try:
            return unbase64(text)
        except ValueError:
            pass
    return text.encode()


def _to_text(wrapped: bytes, how: _WrappedText, key_id: str) -> str:
    """The inverse of `_from_text`. KeyAccessError if there is nothing, or no text where it must be."""
    if not wrapped:
        raise KeyAccessError(f"the KMS returned nothing for a key to wrap with {key_id!r}")
    if how == "base64":
        return _encoded(wrapped)
    try:
        text = wrapped.decode()
    except UnicodeDecodeError:
        if how == "plain":
            raise KeyAccessError(f"what the KMS wrapped with {key_id!r} is no text: wrapped_text is wrong") from None
        return _encoded(wrapped)
    if how == "plain" or (text.isprintable() and _from_text(text, how) == wrapped):
        return text
    return _encoded(wrapped)


# ---------------------------------------------------------------------------------------------------------- KEKs


class _Kek(NamedTuple):
    """A KEK that wraps new data keys. The key itself is only in caches, and while it is used."""

    id: bytes
    wrapped: bytes


class _Keks:
    """The KEKs of this process, for one cache lifetime in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._opened = KeyCache(seconds)
        self._lock = threading.Lock()
        self._current: dict[bytes, tuple[float, _Kek]] = {}

    def open(self, client: KmsClient, key_id: str, wrapped: bytes) -> Key:
        """A KEK that `key_id` wrapped: from the KMS, once in a lifetime, however many threads want it.

        It is found by who asks, the master key and the wrapped bytes, and not by the id that a file gives it.
        """

        def load() -> Key:
            return Key(aes_key(_unwrap(client, wrapped, key_id), key_id))

        return self._opened.get(_name(client.identity, key_id.encode(), wrapped), load)

    def current(self, client: KmsClient, key_id: str, nbytes: int) -> tuple[_Kek, Key]:
        """The KEK that wraps new data keys under `key_id`: a new one once in a lifetime."""
        name = _name(client.identity, key_id.encode(), bytes([nbytes]))
        with self._lock:
            now = time.monotonic()
            self._current = {other: found for other, found in self._current.items() if found[0] > now}
            if (held := self._current.get(name)) is None:
                kek, key = _new_kek(client, key_id, nbytes)
                self._opened.put(_name(client.identity, key_id.encode(), kek.wrapped), key)
                self._current[name] = now + self._seconds, kek
                return kek, key
        return held[1], self.open(client, key_id, held[1].wrapped)

    def renew(self) -> None:
        """Have new KEKs wrap from now on."""
        with self._lock:
            self._current.clear()


_caches: dict[float, _Keks] = {}
os.register_at_fork(after_in_child=_caches.clear)


def _keks(seconds: float) -> _Keks:
    return _caches.get(seconds) or _caches.setdefault(seconds, _Keks(seconds))


def clear_cache() -> None:
    """Drop all KEKs of this process and wipe them, as soon as no call uses them any more."""
    _caches.clear()


def _name(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


class _Wrapper:
    """Wraps the data keys of one file, or of one rotation.

    keks: those of the process; None: it makes its own.
    """

    def __init__(self, factory: CryptoFactory, keks: _Keks | None = None) -> None:
        self._factory, self._client, self._keks = factory, factory._client, keks
        self._mine: dict[str, tuple[_Kek, Key]] = {}

    def new_key(self, key_id: str) -> tuple[bytes, dict[str, Any]]:
        """A new DEK, and the fields of its material that `wrap` returns."""
        nbytes = self._factory.data_key_length
        if self._factory.double_wrapping:
            dek = secrets.token_bytes(nbytes)
            return dek, self.wrap(dek, key_id, True)
        dek, wrapped = _generated(self._client, key_id, nbytes)
        return dek, {"wrappedDEK": self._text(wrapped, key_id), "doubleWrapping": False}

    def wrap(self, dek: bytes, key_id: str, double: bool) -> dict[str, Any]:
        if not double:
            return {"wrappedDEK": self._text(self._client.wrap_key(dek, key_id), key_id), "doubleWrapping": False}
        found = self._mine.get(key_id)
        if found is None:
            nbytes = self._factory.kek_length
            if self._keks is None:
                found = _new_kek(self._client, key_id, nbytes)
            else:
                found = self._keks.current(self._client, key_id, nbytes)
            self._mine[key_id] = found
        kek, key = found
        nonce = os.urandom(NONCE_NBYTES)
        return {
            "wrappedDEK": _encoded(nonce + key.seal(nonce, dek, kek.id)),
            "doubleWrapping": True,
            "keyEncryptionKeyID": _encoded(kek.id),
            "wrappedKEK": self._text(kek.wrapped, key_id),
        }

    def _text(self, wrapped: bytes, key_id: str) -> str:
        return _to_text(wrapped, self._factory.wrapped_text, key_id)


def _new_kek(client: KmsClient, key_id: str, nbytes: int) -> tuple[_Kek, Key]:
    key, wrapped = _generated(client, key_id, nbytes)
    return _Kek(os.urandom(KEK_ID_NBYTES), wrapped), Key(key)


def _generated(client: KmsClient, key_id: str, nbytes: int) -> tuple[bytes, bytes]:
    """A new key, and the same wrapped: one call of the KMS."""
    if client.supports_key_generation:
        return client.generate_key(key_id, nbytes)
    key = secrets.token_bytes(nbytes)
    return key, client.wrap_key(key, key_id)


def _unwrap(client: KmsClient, wrapped: bytes, key_id: str) -> bytes:
    return _asked(key_id, lambda: client.unwrap_key(wrapped, key_id))


def _asked(key_id: str, call: Callable[[], bytes]) -> bytes:
    """What the KMS returns. Its complaints about a wrapped key say under which master key it should be."""
    try:
        return call()
    except (FormatError, IntegrityError) as error:
        raise type(error)(f"key material says that the master key {key_id!r} wrapped a key: {error}") from None
