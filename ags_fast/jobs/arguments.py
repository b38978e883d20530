"""The arguments by which every function of jobs reaches its dataset."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Required, TypedDict, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ags_fast.dataset.access import KeyPlace
    from ags_fast.keys.kms import KmsClient

P = ParamSpec("P")
T = TypeVar("T")


class Reach(TypedDict, total=False):
    """How a dataset is reached: keyword arguments of the functions of jobs, `kms` required.

    Attributes:
        kms: The properties of a KMS, or a client. Workers make clients of their own from the client's properties.
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

    kms: Required[KmsClient | Mapping[str, str]]
    min_version: int | None
    pin: str | None
    key_store: KeyPlace
    storage_options: Mapping[str, Any] | None


def reaching(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function show the arguments of `Reach` by their names, and refuse wrong ones in its own name."""
    signature = _expanded(inspect.signature(function))

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        try:
            signature.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(*args, **options)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _expanded(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the arguments of `Reach` in place of ``**at``."""
    own = [each for each in signature.parameters.values() if each.annotation != "Unpack[Reach]"]
    if len(own) == len(signature.parameters):
        return signature
    hints = {name: hint.__forward_arg__ for name, hint in Reach.__annotations__.items()}
    at = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if hint.startswith("Required[") else None,
            annotation=hint,
        )
        for name, hint in hints.items()
    ]
    return signature.replace(parameters=sorted([*at, *own], key=lambda each: each.kind))
