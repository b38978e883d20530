"""rotate: external key material, wrapped again by the current versions of its master keys."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from ags_fast.errors import AgsError, ConcurrentChangeError, PolicyError
from ags_fast.fs import Store, folder_of
from ags_fast.parquet.keytools.factory import CryptoFactory, Wrapper, asked, renew_keks
from ags_fast.parquet.keytools.material import (
    KEK_TEXTS,
    Material,
    Place,
    dumps,
    from_text,
    parquet_name,
    parse_json,
    to_text,
    typed,
)

if TYPE_CHECKING:
    from ags_fast._types import FilePath
    from ags_fast.keys.kms import Kms

__all__ = ["rotate"]

WRAPPED = ("wrappedDEK", "doubleWrapping", *KEK_TEXTS)  # what rotation changes


def rotate(
    path: FilePath,
    kms: Kms,
    *,
    double_wrapping: bool | None = None,
    **options: Any,
) -> list[str]:
    """Wrap the keys in external material again, by the current versions of their master keys.

    Master key ids, key references and the Parquet files stay as they are. Each material is replaced whole and on the
    disk: killed at any moment, either the old or the new material is there, and both open the file. A checksum of the
    old material, as Spark's local file system writes it, is removed. All materials of a folder are tried before the
    first error is raised; the call can be repeated.

    Args:
        path: Of a Parquet file, or of a folder: then of all files in it and in its folders, except Spark's
            ``_temporary``.
        kms: A client, or its properties.
        double_wrapping: Whether the data keys get new KEKs, one for each master key. False has the KMS wrap each data
            key again, itself if it can. None keeps each material's way.
        **options: Of `CryptoFactory`.

    Returns:
        The paths of the Parquet files.

    Raises:
        ConcurrentChangeError: Somebody else changed a material meanwhile.
        FileNotFoundError: There is no external material.
        PolicyError: The storage cannot replace a file in one step.
    """
    factory = CryptoFactory(kms, **options)
    renew_keks()
    wrapper = Wrapper(factory)
    text = os.fsdecode(path).rstrip("/")
    if folder_of(text) is not None and (one := Place(text, factory.storage_options)).exists():
        _rotate_at(one, factory, wrapper, double_wrapping)
        return [text]
    store = Store(text, factory.storage_options)
    try:
        names = sorted({name for entry in store.list() if (name := parquet_name(entry.path)) is not None})
    except NotADirectoryError:
        names = []
    if not names:
        raise FileNotFoundError(
            errno.ENOENT, "there is no external key material of such a file, or in such a folder", text
        )
    errors: list[AgsError | OSError] = []
    for name in names:
        try:
            _rotate_at(Place(name, within=store), factory, wrapper, double_wrapping)
        except (AgsError, OSError) as error:
            errors.append(error)
    if errors:
        errors[0].add_note(f"{len(errors)} of {len(names)} key materials in {store!r} were not rotated, this one first")
        raise errors[0]
    return [store.full_path(name) for name in names]


def _rotated(factory: CryptoFactory, wrapper: Wrapper, fields: dict[str, Any], double: bool | None) -> dict[str, Any]:
    """Return key material with the same DEK, wrapped again. Unknown fields are kept."""
    material = Material.of(fields)
    key_id, was_double = material.master_key_id, material.kek is not None
    if double is None:
        double = was_double
    if double or was_double:
        wrapped = wrapper.wrap(factory.unwrap(material), key_id, double)
    else:
        text, how, client = material.wrapped_dek, factory.wrapped_text, factory.client
        again = asked(key_id, lambda: client.rewrap_key(from_text(text, how), key_id))
        wrapped = {"wrappedDEK": to_text(again, how, key_id), "doubleWrapping": False}
    return {name: value for name, value in fields.items() if name not in WRAPPED} | wrapped


def _rotate_at(place: Place, factory: CryptoFactory, wrapper: Wrapper, double: bool | None) -> None:
    """Rotate the material of one Parquet file."""
    store = place.store
    before = store.stat(place.path)
    with store.begin(place.path, fsync=True) as new:
        if not new.atomic:
            raise PolicyError(
                f"{store!r} cannot replace a file in one step: rotate its key material in a local folder or in an "
                "object store"
            )
        try:
            external = {
                reference: dumps(_rotated(factory, wrapper, typed(parse_json(text)), double))
                for reference, text in place.read().items()
            }
        except AgsError as error:
            error.add_note(f"in the key material {store.full_path(place.path)}")
            raise
        if store.stat(place.path) != before:
            raise ConcurrentChangeError(f"the key material {store.full_path(place.path)} was changed meanwhile")
        place.replace(new, external)
