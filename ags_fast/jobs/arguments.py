"""The arguments by which every function of jobs reaches its dataset."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

from ags_fast.parquet.reading import sharing
from ags_fast.profiles import reached

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ags_fast.dataset.access import KeyPlace
    from ags_fast.keys.kms import Kms


class Reach(TypedDict, total=False):
    """How a dataset is reached: keyword arguments of the functions of jobs.

    Attributes:
        kms: The properties of a KMS, or a client. Workers make clients of their own from the client's properties. None:
            the KMS of the default profile (`ags-fast config init` writes it), with its key store and storage options.
        min_version: Refuse a dataset whose newest version is older. Storage alone does not show that somebody removed
            newer versions.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names, whatever its number.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Raises:
        FileNotFoundError: There is no dataset.
        PolicyError: The dataset is older than `min_version`. Nothing is written or deleted.
        IntegrityError: Something in the dataset was changed, or the dataset does not descend from the pin. Then nothing
            is written or deleted.
        KeyAccessError: The KMS refuses.
        TypeError: `kms` is a client without properties, and the engine is not ``LocalEngine(0)``.
        ValueError: The pin is malformed.
    """

    kms: Kms | None
    min_version: int | None
    pin: str | None
    key_store: KeyPlace
    storage_options: Mapping[str, Any] | None


reaching = sharing(Reach, reached)


def milliseconds(name: str, age: timedelta | None) -> int | None:
    """Return the argument `name` in milliseconds, if it is given. TypeError for a number, ValueError if negative."""
    if age is None:
        return None
    if not isinstance(age, timedelta):
        raise TypeError(f"{name} is a timedelta, such as timedelta(days=7), not {age!r}")
    if age < timedelta(0):
        raise ValueError(f"{name} must not be negative")
    return age // timedelta(milliseconds=1)
