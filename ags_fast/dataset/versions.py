"""Versions: the content of their documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.dataset.names import VERSIONS
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.tables import TableRef, whole
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.fs.numbered import Numbered
from ags_fast.keys.chain import Chain, Pin
from ags_fast.keys.entry import LATEST_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ags_fast.fs import Store
    from ags_fast.keys.stores import KeyResolver

STREAMS = 64  # whose last batch a version records


class KeysAt(NamedTuple):
    """The version of the key store that a version of the dataset names."""

    version: int
    sha256: str | None  # hex; None: the store has no digests, so only the number is compared

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KeysAt:
        """Read it from a JSON object. A malformed object raises KeyError, TypeError or ValueError."""
        digest = value["sha256"]
        return cls(whole(value["version"]), None if digest is None else str(digest))


class Batch(NamedTuple):
    """The last batch of a stream that was committed to a dataset."""

    stream: str  # the id of the stream
    batch: int
    time_ms: int  # when it was committed, in milliseconds since the epoch

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Batch:
        """Read it from a JSON object. A malformed object raises KeyError, TypeError or ValueError."""
        return cls(str(value["stream"]), whole(value["batch"]), whole(value["time_ms"], LATEST_MS))


def with_batch(streams: Iterable[Batch], last: Batch) -> tuple[Batch, ...]:
    """Return the last batches of streams, with a new one at the end. Of more than STREAMS, the oldest are forgotten."""
    return (*(one for one in streams if one.stream != last.stream), last)[-STREAMS:]


def runs_of(refs: Iterable[TableRef]) -> list[list[TableRef]]:
    """Group manifests by run. A run is one manifest, or several manifests that have a list."""
    runs: dict[str, list[TableRef]] = {}
    for ref in refs:
        runs.setdefault(ref.run or ref.path, []).append(ref)
    return list(runs.values())


class Version(NamedTuple):
    """A version of a dataset: the content of ``_ags/versions/00000001.json``."""

    number: int
    parent: int | None
    operation: str
    job_id: str
    time_ms: int
    files: int
    plain_length: int  # bytes of all its files, decrypted
    manifests: tuple[TableRef, ...]
    policy: Policy = Policy()
    key_id: str = ""  # the key that seals its document
    chain: Chain = Chain(1)  # the digests of earlier versions
    keys: KeysAt = KeysAt(0, None)  # the version of the key store that it was made on
    sha256: str = ""  # hex, of its document as stored
    lists: tuple[str, ...] = ()  # the names of the lists of its runs of several manifests
    streams: tuple[Batch, ...] = ()  # the last batch of each stream, that of the latest commit last

    @classmethod
    def from_json(
        cls, body: Mapping[str, Any], number: int, path: str, listed: Callable[[Sequence[str]], Iterable[TableRef]]
    ) -> Version:
        """Read the document of a version.

        Args:
            body: The document.
            number: The number that the document must have.
            path: The path of the document.
            listed: Reads the manifests of lists.

        Raises:
            FormatError: The document is malformed.
            IntegrityError: The document is of another version.
        """
        try:
            if whole(body["version"]) != number:
                raise IntegrityError(f"{path} holds the version {body['version']!r}")
            names = tuple(map(str, body["lists"]))
            version = cls(
                number,
                None if body["parent"] is None else whole(body["parent"], number - 1, 1),
                str(body["operation"]),
                str(body["job_id"]),
                whole(body["time_ms"], LATEST_MS),
                whole(body["files"]),
                whole(body["plain_length"]),
                (*listed(names), *(TableRef.from_json(ref) for ref in body["manifests"])),
                Policy.from_json(body.get("policy", {})),
                chain=Chain.from_json(body, number, path),
                keys=KeysAt.from_json(body["key_store"]),
                lists=names,
                streams=tuple(map(Batch.from_json, body.get("streams", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path} lacks or garbles {error}") from None
        if version.files != (count := sum(ref.entries for ref in version.manifests)):
            raise FormatError(f"{path} says that it has {version.files} files, and names manifests with {count}")
        return version

    def has_batch(self, stream: str, batch: int) -> bool:
        """Return whether this batch of a stream, or a later one, is in this version or was in an earlier one."""
        return any(one.stream == stream and one.batch >= batch for one in self.streams)

    @property
    def pin(self) -> str:
        """The text to keep outside of the storage: see `ags_fast.jobs.JobResult.pin`."""
        return str(Pin(self.number, self.sha256))


def key_store_digest(keys: KeyResolver, version: int) -> str | None:
    """Return the SHA-256 (hex) of a version of the key store; None if the key store has no digests."""
    tell: Callable[[int], str | None] | None = getattr(keys, "digest", None)
    return None if tell is None else tell(version)


def version_numbers(store: Store) -> list[int]:
    """Return the numbers of the stored versions, the lowest first."""
    return Numbered(store, VERSIONS).numbers()
