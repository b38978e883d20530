"""Which dataset a file system shows: its arguments in a form without keys, and the handle, opened when it is needed."""

from __future__ import annotations

import copy
import difflib
import itertools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ags_fast.dataset.dataset import Dataset
from ags_fast.fs import local_path
from ags_fast.keys.kms import KmsClient, check_travels

if TYPE_CHECKING:
    from ags_fast.dataset.transaction import Transaction

__all__ = ["Handle", "Place", "plain_arguments"]

# Arguments that fsspec takes for every file system. A dataset needs none of them.
FSSPEC_ARGUMENTS = frozenset(
    ("asynchronous", "loop", "listings_expiry_time", "max_paths", "skip_instance_cache", "use_listings_cache")
)


def plain_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a file system by name, as text and dictionaries.

    fsspec keeps arguments, makes the token of its cache of their repr, and pickles them. So a KMS client becomes its
    properties, and the path of a local folder becomes absolute.

    Raises:
        TypeError: An argument is of another type, or a KMS client was not made from properties.
    """
    if len(args) > 2:
        raise TypeError(f"a file system of protocol 'ags' takes dataset and kms by position, not {len(args)} arguments")
    plain = dict(kwargs)
    for name, value in zip(("dataset", "kms"), args, strict=False):
        if name in plain:
            raise TypeError(f"the argument {name!r} is given twice")
        plain[name] = value
    for name in ("dataset", "key_store"):
        if plain.get(name) is not None:
            plain[name] = _absolute(name, plain[name])
    if isinstance(kms := plain.get("kms"), KmsClient):
        check_travels(kms)
        kms = kms.properties
    if kms is not None:
        plain["kms"] = _dictionary("kms", kms)
    for name in ("storage_options", "target_options", "write_options"):
        if plain.get(name) is not None:
            plain[name] = _dictionary(name, plain[name])
    return plain


def _absolute(name: str, place: Any) -> str:
    if not isinstance(place, (str, os.PathLike)):
        raise TypeError(f"{name} is the path or URL of a folder, not {type(place).__name__!r}")
    url = os.fsdecode(place)
    path = local_path(url)
    return url if path is None else os.path.abspath(path)


def _dictionary(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a mapping, not {type(value).__name__!r}")
    return dict(value)


def check_no_others(others: Mapping[str, Any], known: list[str]) -> None:
    """Raise TypeError for an argument that neither this file system nor every file system of fsspec has."""
    for name in sorted(others.keys() - FSSPEC_ARGUMENTS):
        near = difflib.get_close_matches(name, known, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"the protocol 'ags' has no argument {name!r}{hint}")


def chained_url(fo: str, protocol: str | None) -> str:
    """Return the URL of the dataset in a chained URL, from what fsspec makes of its last parts."""
    if protocol in (None, "file", "local") or "://" in fo:
        return fo
    return f"{protocol}://{fo.lstrip('/')}"


@dataclass(frozen=True)
class Place:
    """How to open a dataset. Holds no key. `options` are those of `Dataset.open`."""

    url: str
    kms: Mapping[str, str] = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    wrapping_key_id: str | None

    def open(self, *, create: bool = False) -> Dataset:
        """Open the dataset.

        Args:
            create: Create a dataset that does not exist, if there is a `wrapping_key_id`.
        """
        try:
            return Dataset.open(self.url, kms=self.kms, **self.options)
        except FileNotFoundError as error:
            if not create or self.options.get("version") is not None:
                raise
            if self.wrapping_key_id is None:
                raise FileNotFoundError(f"{error}. To make one by writing to it, give wrapping_key_id") from None
        same = {name: self.options[name] for name in ("key_store", "storage_options") if name in self.options}
        try:
            return Dataset.create(self.url, kms=self.kms, wrapping_key_id=self.wrapping_key_id, **same)
        except FileExistsError:  # made by another process meanwhile
            return Dataset.open(self.url, kms=self.kms, **self.options)


class Handle:
    """The dataset at a place, opened when it is first needed. Threads may share it, and a fork's child may use it.

    After a version that any handle of this process has made, all handles of the dataset go to the newest version: file
    systems with different arguments see each other's files. While the transaction of `begin` runs, the handle stays at
    its version. A fork's child has no part in that transaction.
    """

    _ticks = itertools.count(1)
    _made: ClassVar[dict[str, int]] = {}  # by URL: when this process made its last version

    def __init__(self, place: Place) -> None:
        self.place = place
        self._dataset: Dataset | None = None
        self._stale = False
        self._seen = 0  # the tick of the last version of this process that it shows
        self._shared: Transaction | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._begins = threading.Lock()

    def _own(self) -> None:
        """In a fork's child, replace what the child does not share: a thread that it does not have may hold locks."""
        if self._pid != os.getpid():
            self._lock, self._begins, self._shared = threading.Lock(), threading.Lock(), None
            self._dataset = copy.copy(self._dataset)
            self._pid = os.getpid()

    def get(self) -> Dataset:
        """Return the dataset, at the newest version if `renew` was called and no transaction runs."""
        self._own()
        stay, dataset, made = self._shared is not None, self._dataset, self._made.get(self.place.url, 0)
        if dataset is not None and (stay or not (self._stale or made > self._seen)):
            return dataset
        with self._lock:
            self._stale = False
            if self._dataset is None:
                self._dataset = self.place.open()
            elif not stay:
                try:
                    self._dataset.refresh()
                except BaseException:
                    self._stale = True
                    raise
            self._seen = max(self._seen, made)
            return self._dataset

    def renew(self) -> None:
        """Go to the newest version at the next `get`."""
        self._stale = True

    def changes(self, **options: Any) -> Transaction:
        """Return a transaction of the dataset at its newest version. A dataset that does not exist is made.

        Args:
            options: The arguments of `Dataset.transaction`.
        """
        self.renew()
        try:
            dataset = self.get()
        except FileNotFoundError:
            with self._lock:
                dataset = self._dataset = self.place.open(create=True)
        return dataset.transaction(**options)

    @property
    def running(self) -> Transaction | None:
        """The transaction that `begin` has begun in this process."""
        self._own()
        return self._shared

    def begin(self, **options: Any) -> None:
        """Begin the transaction that all threads share. ValueError if it runs already, or the version is fixed.

        Args:
            options: The arguments of `Dataset.transaction`.
        """
        self._own()
        with self._begins:
            if self._shared is not None:
                raise ValueError("this file system is in a transaction already: end it first")
            changes = self.changes(**options)
            changes.__enter__()
            self._shared = changes

    def finish(self, commit: bool) -> None:
        """Commit the transaction of `begin`, or drop all of it. Does nothing if none runs in this process."""
        self._own()
        with self._begins:
            changes, self._shared = self._shared, None
        if changes is not None:
            self.end(changes, commit)

    def end(self, changes: Transaction, commit: bool) -> None:
        """Commit a transaction of the dataset, or drop all of it."""
        changes.__exit__(*((None, None, None) if commit else (BaseException, None, None)))
        if changes.version is not None:
            url, made = self.place.url, next(self._ticks)
            if self._made.get(url, 0) == self._seen:
                self._seen = made  # the dataset's handle shows its own version at once
            self._made[url] = made
