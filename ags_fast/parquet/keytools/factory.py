"""CryptoFactory and KeyRetriever: keys for new Parquet files, and the keys of existing ones, over a KmsClient."""

from __future__ import annotations

import hashlib
import os
import reprlib
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._core import NONCE_NBYTES, OVERHEAD_NBYTES, Key
from ags_fast.ags1 import KeyBytes, bytes_view
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.cache import KeyCache
from ags_fast.keys.kek import KEY_NBYTES
from ags_fast.keys.kms import Kms, KmsClient, aes_key, check_key_id, shared_client
from ags_fast.parquet.keys import FOOTER_KEY, Keys
from ags_fast.parquet.keytools.material import (
    TYPE,
    Material,
    Place,
    decoded,
    dumps,
    encoded,
    flag_field,
    from_text,
    material_path,
    parse_column_keys,
    parse_json,
    text_field,
    to_text,
    typed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast._types import Buffer, FilePath, WrappedText
    from ags_fast.parquet.keytools.material import ColumnKeys, Path

__all__ = ["CryptoFactory", "KeyRetriever", "Wrapper", "asked", "clear_cache", "renew_keks", "resolve"]

FOOTER = "footerKey"  # key references in external material
COLUMN = "columnKey"
KEK_ID_NBYTES = 16
WRAPPED_TEXTS = ("auto", "base64", "plain")


@dataclass(frozen=True, slots=True, eq=False)
class CryptoFactory:
    """Makes keys with key metadata for new Parquet files, and finds the keys of existing ones.

    Arguments tell how new keys are wrapped; files are read however they were written. A factory pickles if its client
    does, and holds no key. Threads may share it.

    Args:
        kms: A client, or its properties.
        double_wrapping: Whether a KEK wraps data keys, and the KMS the KEK. Else the KMS wraps each data key.
        internal: Whether key material is in the Parquet file. Else it is in a file beside it, where it can be rotated.
        data_key_length: Of data keys, in bytes: 16, 24 or 32.
        kek_length: Of KEKs, in bytes: 16, 24 or 32.
        kms_instance_id: What new files claim about their KMS, for parquet-java. Nothing here reads it.
        kms_instance_url: As `kms_instance_id`.
        cache_lifetime: How many seconds this process keeps a KEK, to open data keys and to wrap new ones.
        wrapped_text: How wrapped keys become text: "auto", "base64" or "plain". See `ags_fast.parquet.keytools`.
        storage_options: Options for fsspec, for external material.
    """

    kms: Kms = field(repr=False)
    _: KW_ONLY
    double_wrapping: bool = True
    internal: bool = True
    data_key_length: int = 16
    kek_length: int = 16
    kms_instance_id: str = "DEFAULT"
    kms_instance_url: str = "DEFAULT"
    cache_lifetime: float = 600.0
    wrapped_text: WrappedText = "auto"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("data_key_length", "kek_length"):
            if getattr(self, name) not in KEY_NBYTES:
                raise ValueError(f"{name} is 16, 24 or 32 bytes, not {getattr(self, name)}")
        if not (self.kms_instance_id and self.kms_instance_url):
            raise ValueError("kms_instance_id and kms_instance_url must not be empty: pass DEFAULT if there are none")
        if not self.cache_lifetime >= 0:
            raise ValueError(f"cache_lifetime is a number of seconds from 0, not {self.cache_lifetime}")
        if self.wrapped_text not in WRAPPED_TEXTS:
            raise ValueError(f"wrapped_text is {', '.join(WRAPPED_TEXTS)}, not {self.wrapped_text!r}")

    def encryption_keys(
        self, footer_key_id: str, column_keys: ColumnKeys | None = None, *, path: FilePath | None = None
    ) -> Keys:
        """Make keys for one new file, with their metadata.

        In double wrapping, the KMS is called at most once for each master key; in single wrapping, once for each key.

        Args:
            footer_key_id: The id of the master key for the footer key.
            column_keys: What `parse_column_keys` takes. None seals all columns with the footer key.
            path: Of the file that will be written. Required for external material, which is on the disk when this
                returns.

        Raises:
            FileExistsError: There is external material for `path`, which a file may need. Delete it if that file is
                gone.
        """
        check_key_id(footer_key_id)
        chosen = parse_column_keys(column_keys or {})
        place = None
        if not self.internal:
            if path is None:
                raise TypeError("external key material is kept beside the Parquet file: pass its path")
            place = Place(path, self.storage_options)
            place.check_new()
        wrapper = Wrapper(self, keks_of(self._lifetime))
        external: dict[str, str] = {}
        footer, footer_metadata = self._new_key(wrapper, footer_key_id, FOOTER, external)
        columns: dict[Path, Any] = {}
        metadata: dict[Path, bytes] = {}
        for column, key_id in chosen.items():
            if key_id is FOOTER_KEY:
                columns[column] = FOOTER_KEY
            else:
                reference = f"{COLUMN}{len(metadata)}"
                columns[column], metadata[column] = self._new_key(wrapper, key_id, reference, external)
        if place is not None:
            place.create(external)
        return Keys(footer, columns, footer_metadata=footer_metadata, column_metadata=metadata)

    def retriever(self, path: FilePath | None = None) -> KeyRetriever:
        """Return a function that finds keys by their metadata. `path` is the Parquet file's, for external material."""
        return KeyRetriever(self, path)

    @property
    def _lifetime(self) -> float:
        """Seconds that a KEK is kept: what the factory allows, and no longer than the KMS client does."""
        return min(self.cache_lifetime, self.client.cache_seconds)

    def _new_key(self, wrapper: Wrapper, key_id: str, reference: str, external: dict[str, str]) -> tuple[bytes, bytes]:
        """Make a DEK, and its metadata. External material goes into `external`."""
        material: dict[str, Any] = {"keyMaterialType": TYPE}
        if self.internal:
            material["internalStorage"] = True
        material["isFooterKey"] = reference == FOOTER
        if reference == FOOTER:
            material |= {"kmsInstanceID": self.kms_instance_id, "kmsInstanceURL": self.kms_instance_url}
        dek, wrapped = wrapper.new_key(key_id)
        material |= {"masterKeyID": key_id, **wrapped}
        if self.internal:
            return dek, dumps(material).encode()
        external[reference] = dumps(material)
        return dek, dumps({"keyMaterialType": TYPE, "internalStorage": False, "keyReference": reference}).encode()

    def unwrap(self, material: Material) -> bytes:
        """Unwrap the data key of key material."""
        key_id, kek = material.master_key_id, material.kek
        if kek is None:
            dek = aes_key(_unwrap(self.client, from_text(material.wrapped_dek, self.wrapped_text), key_id), key_id)
        else:
            sealed = decoded("wrappedDEK", material.wrapped_dek)
            if len(sealed) - OVERHEAD_NBYTES not in KEY_NBYTES:  # before the KMS is called
                raise FormatError(f"{len(sealed)} bytes cannot be an AES key that a KEK under {key_id!r} wrapped")
            wrapped_kek = from_text(kek.wrapped, self.wrapped_text)
            key = keks_of(self._lifetime).open(self.client, key_id, wrapped_kek)
            try:
                dek = key.open(sealed[:NONCE_NBYTES], sealed[NONCE_NBYTES:], decoded("keyEncryptionKeyID", kek.id))
            except IntegrityError:
                raise IntegrityError(
                    f"a data key was not wrapped by the KEK of its key material, under the master key {key_id!r}: "
                    "the material was changed"
                ) from None
        return KeyBytes(dek)

    @property
    def client(self) -> KmsClient:
        """The KMS client."""
        return shared_client(self.kms)


class KeyRetriever:
    """A function from a key_metadata to its key, both bytes. `CryptoFactory.retriever` makes it.

    External material is read once, with the first key that needs it. In double wrapping the KMS is called once for each
    KEK and cache lifetime, in single wrapping each time. A retriever pickles if its factory does.

    Args:
        factory: Unwraps the keys.
        path: Of the Parquet file, for external material.

    Raises:
        FormatError: The metadata is not PKMT1, or is impossible.
        IntegrityError: A wrapped key is not what was wrapped.
        KeyAccessError: The KMS refuses, or there is no external material.
    """

    __slots__ = ("_external", "_factory", "_path")

    def __init__(self, factory: CryptoFactory, path: FilePath | None = None) -> None:
        self._factory = factory
        self._path = path
        self._external: dict[str, str] | None = None

    def __call__(self, key_metadata: Buffer | None) -> bytes:
        """Return the key of a key_metadata."""
        if key_metadata is None:
            raise KeyAccessError("the file stores no key_metadata, so these tools cannot find its keys: pass Keys")
        fields = typed(parse_json(bytes(bytes_view(key_metadata))))
        if not flag_field(fields, "internalStorage"):
            fields = self._referred(text_field(fields, "keyReference"))
        return self._factory.unwrap(Material.of(fields))

    def _referred(self, reference: str) -> dict[str, Any]:
        if self._external is None:
            if self._path is None:
                raise KeyAccessError(
                    "the key material is in a file beside the Parquet file: pass the Parquet file's path"
                )
            place = Place(self._path, self._factory.storage_options)
            self._external = place.read()
        material = self._external.get(reference)
        if material is None:
            raise KeyAccessError(
                f"{material_path(self._path or '')} has no key {reprlib.repr(reference)}: it belongs to another "
                "file, or was changed"
            )
        return typed(parse_json(material))

    def __repr__(self) -> str:
        return f"KeyRetriever({self._factory!r}, {self._path!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyRetriever, (self._factory, self._path)


def resolve(
    key_metadata: Buffer,
    kms: Kms,
    path: FilePath | None = None,
    **options: Any,
) -> bytes:
    """Find the key of a key_metadata.

    Args:
        key_metadata: As the Parquet file stores it.
        kms: A client, or its properties.
        path: Of the Parquet file, for external material.
        **options: Of `CryptoFactory`.

    Raises:
        FormatError: As `KeyRetriever`.
        IntegrityError: As `KeyRetriever`.
        KeyAccessError: As `KeyRetriever`.
    """
    return CryptoFactory(kms, **options).retriever(path)(key_metadata)


class _Kek(NamedTuple):
    """A KEK that wraps new data keys. The key itself is only in caches, and in use."""

    id: bytes
    wrapped: bytes


class Keks:
    """The KEKs of this process that are kept for the same number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._opened = KeyCache(seconds)
        self._lock = threading.Lock()
        self._current: dict[bytes, tuple[float, _Kek]] = {}

    def open(self, client: KmsClient, key_id: str, wrapped: bytes) -> Key:
        """Unwrap a KEK: by the KMS once in a lifetime, however many threads want it.

        The cache finds it by the client, the master key and the wrapped bytes, not by the id that a file gives it.
        """

        def load() -> Key:
            return Key(aes_key(_unwrap(client, wrapped, key_id), key_id))

        return self._opened.get(_name(client.identity, key_id.encode(), wrapped), load)

    def current(self, client: KmsClient, key_id: str, nbytes: int) -> tuple[_Kek, Key]:
        """Return the KEK that wraps new data keys under `key_id`: a new one once in a lifetime."""
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
        """Use new KEKs from now on."""
        with self._lock:
            self._current.clear()


_caches: dict[float, Keks] = {}
os.register_at_fork(after_in_child=_caches.clear)


def keks_of(seconds: float) -> Keks:
    return _caches.get(seconds) or _caches.setdefault(seconds, Keks(seconds))


def clear_cache() -> None:
    """Drop all KEKs of this process. Each is wiped as soon as no call uses it."""
    _caches.clear()


def renew_keks() -> None:
    """Use new KEKs from now on: the master keys have new versions."""
    for keks in list(_caches.values()):
        keks.renew()


def _name(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


class Wrapper:
    """Wraps the data keys of one file, or of one rotation.

    Args:
        factory: Tells how.
        keks: The process's KEKs; None makes new ones.
    """

    def __init__(self, factory: CryptoFactory, keks: Keks | None = None) -> None:
        self._factory, self.client, self.keks_of = factory, factory.client, keks
        self._mine: dict[str, tuple[_Kek, Key]] = {}

    def new_key(self, key_id: str) -> tuple[bytes, dict[str, Any]]:
        """Return a new DEK, and the fields of its material that `wrap` returns."""
        nbytes = self._factory.data_key_length
        if self._factory.double_wrapping:
            dek: bytes = KeyBytes(secrets.token_bytes(nbytes))
            return dek, self.wrap(dek, key_id, True)
        dek, wrapped = _generated(self.client, key_id, nbytes)
        return dek, {"wrappedDEK": self._text(wrapped, key_id), "doubleWrapping": False}

    def wrap(self, dek: bytes, key_id: str, double: bool) -> dict[str, Any]:
        """Wrap a DEK. Returns the fields of its material that rotation changes."""
        if not double:
            return {"wrappedDEK": self._text(self.client.wrap_key(dek, key_id), key_id), "doubleWrapping": False}
        found = self._mine.get(key_id)
        if found is None:
            nbytes = self._factory.kek_length
            if self.keks_of is None:
                found = _new_kek(self.client, key_id, nbytes)
            else:
                found = self.keks_of.current(self.client, key_id, nbytes)
            self._mine[key_id] = found
        kek, key = found
        nonce = os.urandom(NONCE_NBYTES)
        return {
            "wrappedDEK": encoded(nonce + key.seal(nonce, dek, kek.id)),
            "doubleWrapping": True,
            "keyEncryptionKeyID": encoded(kek.id),
            "wrappedKEK": self._text(kek.wrapped, key_id),
        }

    def _text(self, wrapped: bytes, key_id: str) -> str:
        return to_text(wrapped, self._factory.wrapped_text, key_id)


def _new_kek(client: KmsClient, key_id: str, nbytes: int) -> tuple[_Kek, Key]:
    key, wrapped = _generated(client, key_id, nbytes)
    return _Kek(os.urandom(KEK_ID_NBYTES), wrapped), Key(key)


def _generated(client: KmsClient, key_id: str, nbytes: int) -> tuple[bytes, bytes]:
    """Return a new key, and the same key wrapped, in one call of the KMS."""
    if client.supports_key_generation:
        return client.generate_key(key_id, nbytes)
    key = KeyBytes(secrets.token_bytes(nbytes))
    return key, client.wrap_key(key, key_id)


def _unwrap(client: KmsClient, wrapped: bytes, key_id: str) -> bytes:
    return asked(key_id, lambda: client.unwrap_key(wrapped, key_id))


def asked(key_id: str, call: Callable[[], bytes]) -> bytes:
    """Call the KMS. Its errors about a wrapped key then name the master key."""
    try:
        return call()
    except (FormatError, IntegrityError) as error:
        raise type(error)(f"key material claims that the master key {key_id!r} wrapped a key: {error}") from None
