"""Sealed documents: JSON that anyone can read, and that only a holder of its key can have written.

A document is two lines. The first one is the header; the second one is the body. The header has a fresh key, wrapped
under a KEK of the dataset, the *sealer*, and bound to the dataset and the path; and the tag of AES-GCM over no
plaintext with the body as AAD. The header repeats the sealer as the master key has wrapped it, so that whoever may ask
the KMS can open the document, and nobody else can make one.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from ags_fast._core import NONCE_NBYTES, TAG_NBYTES, Key
from ags_fast.ags1 import KeyBytes
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.fs import NotAFileError
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.envelope import Envelope, binding
from ags_fast.keys.kms import KmsClient

if TYPE_CHECKING:
    from ags_fast.fs import Store

HEADER_NBYTES = 256 << 10  # which are parsed before anything is authentic; some KMS wrap to 50 kB
KEY_NBYTES = 32
Body = TypeVar("Body")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a document."""

    ags: Annotated[int, Meta(ge=3, le=3)]
    dataset_id: str
    sealer: KeyEntry
    wrapped: bytes
    nonce: Annotated[bytes, Meta(min_length=NONCE_NBYTES, max_length=NONCE_NBYTES)]
    tag: Annotated[bytes, Meta(min_length=TAG_NBYTES, max_length=TAG_NBYTES)]


def seal(envelope: Envelope, sealer: KeyEntry, dataset_id: str, path: str, body: object) -> bytes:
    """Seal a document, a struct of msgspec, for one path of a dataset, by a KEK of the envelope."""
    text = msgspec.json.encode(body)
    key, nonce = KeyBytes(secrets.token_bytes(KEY_NBYTES)), os.urandom(NONCE_NBYTES)
    wrapped = envelope.wrap(sealer.key_id, key, binding(dataset_id, "document", path))
    header = Header(3, dataset_id, sealer, wrapped, nonce, Key(key).seal(nonce, b"", text))
    return msgspec.json.encode(header) + b"\n" + text


@dataclass(frozen=True)
class Document:
    """A document as it was read: nothing of it is authentic until `opened` has returned."""

    path: str
    header: Header
    text: bytes

    @classmethod
    def parse(cls, data: bytes, path: str) -> Document:
        """Read a document. FormatError: it is none."""
        line, _, text = data.partition(b"\n")
        if len(line) > HEADER_NBYTES:
            raise FormatError(f"{path} is not a document of ags_fast: its first line is too long")
        header = decoded(line, Header, path)
        if msgspec.json.encode(header) != line:  # there is one way to write a header
            raise FormatError(f"{path} is not a document of ags_fast, or was damaged")
        return cls(path, header, text)

    def opened(self, kms: KmsClient, kind: type[Body], sealer: KeyEntry | None = None) -> Body:
        """Return the body.

        Args:
            kms: Unwraps the sealer.
            kind: The struct that the body is.
            sealer: The sealer as the head of the log has it; None: as the document itself has it.

        Raises:
            IntegrityError: The document is not what was written for this path of its dataset.
            FormatError: The body is not of this kind.
            KeyAccessError: The KMS refuses.
        """
        header = self.header
        sealer = sealer or header.sealer
        envelope = Envelope(kms.for_dataset(header.dataset_id), {sealer.key_id: sealer})
        try:
            envelope.prepare(sealer.key_id)
        except IntegrityError as error:
            raise IntegrityError(f"{self.path} names a key that does not open: {error}") from None
        try:
            bound = binding(header.dataset_id, "document", self.path)
            key = envelope.unwrap(sealer.key_id, header.wrapped, bound)
            if sealer.key_id != header.sealer.key_id or len(key) != KEY_NBYTES:
                raise IntegrityError("another key")
            Key(key).open(header.nonce, header.tag, self.text)
        except (IntegrityError, ValueError):
            raise IntegrityError(
                f"the document {self.path} is not what was written for it: it was changed, moved here, or is another "
                "dataset's"
            ) from None
        return decoded(self.text, kind, self.path)


def read_object(store: Store, path: str, limit: int) -> bytes:
    """Read an object that a dataset is made of.

    Args:
        store: The folder of the dataset.
        path: The object.
        limit: The most bytes that it may have.

    Raises:
        FileNotFoundError: It is missing.
        FormatError: It has more bytes.
        IntegrityError: Something that is no file is in its place.
    """
    try:
        return store.read_small(path, limit)
    except NotAFileError:
        raise IntegrityError(f"{path} is not a regular file, but an object of a dataset has this name") from None


def decoded(data: bytes, kind: type[Body], path: str) -> Body:
    """Parse JSON as a struct. FormatError, which names the path: it is not one."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{path} is malformed: {error}") from None
