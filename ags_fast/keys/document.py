"""Documents of a dataset: JSON that anyone can read and only a holder of its key could have written.

docs/dataset-format.md, "Documents", has every byte.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import TYPE_CHECKING, Any

from ags_fast._core import NONCE_NBYTES, TAG_NBYTES, Key
from ags_fast._json import marks, marks_taken
from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.keys.encoding import dumps, parse_object, to_base64, unbase64
from ags_fast.keys.entry import UnknownKeyError
from ags_fast.keys.envelope import Envelope, binding
from ags_fast.keys.kek import KEY_NBYTES
from ags_fast.keys.kms import check_key_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import KmsClient

__all__ = [
    "DOCUMENT_NBYTES",
    "KEYS_FORMAT",
    "KIND_NBYTES",
    "Document",
    "document_nbytes",
    "open_document",
    "seal_document",
    "taken",
]

DOCUMENT = 1
AUTH_FIELDS = ("key_id", "wrapped_key", "nonce", "tag")
TO_BODY, END = ',"body":\n', b"\n}\n"
HEADER_NBYTES = 256 << 10  # of a document's first line, which is parsed before its tag is checked
DOCUMENT_NBYTES = 64 << 20  # of a document: the plan of a rotation of some 10**5 KEKs
KEYS_FORMAT = "ags-keys"  # of documents that list the key that seals them
KIND_NBYTES = {
    KEYS_FORMAT: 8 << 20,  # 500 entries of 16 KiB each
    "ags-version": 16 << 20,  # some 5 * 10**8 files
}


def seal_document(
    envelope: Envelope, key_id: str, dataset_id: str, path: str, body: Mapping[str, Any], *, length: int = 32
) -> bytes:
    """Seal `body` as a document for one path of a dataset. It is authentic, not secret.

    The document has three lines: ``{"ags":1,"dataset_id":…,"auth":{"key_id","wrapped_key","nonce","tag"},"body":`` with
    bytes in base64, the body's JSON, and ``}``. A fresh key is wrapped under `key_id`, bound to the dataset,
    ``document`` and the path. The tag is AES-GCM's over no plaintext, with the bytes of the second line as AAD. A body
    of the format ``ags-keys`` lists the key `key_id` itself, and the first line repeats that entry as ``sealer``.

    Args:
        envelope: Has the key `key_id`.
        key_id: The KEK that seals the document.
        dataset_id: The dataset; `body` names it, too.
        path: The document's path in the dataset.
        body: JSON.
        length: Bytes of the fresh key.

    Raises:
        PolicyError: The first line would be longer than readers accept.
    """
    if body.get("dataset_id") != dataset_id:
        raise ValueError("a document's body names the dataset_id that the document is for")
    text = dumps(body).encode()
    key = secrets.token_bytes(length)
    nonce = os.urandom(NONCE_NBYTES)
    auth = {
        "key_id": key_id,
        "wrapped_key": to_base64(envelope.wrap(key_id, key, binding(dataset_id, "document", path))),
        "nonce": to_base64(nonce),
        "tag": to_base64(Key(key).seal(nonce, b"", text)),
    }
    sealer = _sealer_in(body, key_id)
    header = _line({"ags": DOCUMENT, "dataset_id": dataset_id, "auth": auth} | ({"sealer": sealer} if sealer else {}))
    if len(header) > HEADER_NBYTES:
        raise PolicyError(
            f"the document {path} would begin with {len(header)} bytes about the key {key_id!r}, and readers accept "
            f"{HEADER_NBYTES}: its properties are too long"
        )
    return header + text + END


def taken(data: bytes, kind: str, path: str) -> bytes:
    """Return a document of the format `kind` if readers accept its size. PolicyError otherwise."""
    if len(data) > (most := document_nbytes(kind)) or marks(data) > marks_taken(data):
        raise PolicyError(
            f"the document {path} would have {len(data)} bytes and {marks(data)} values, and readers accept {most} and "
            f"{marks_taken(data)}: divide the dataset"
        )
    return data


def document_nbytes(kind: str) -> int:
    """Return the most bytes that a document of this format may have."""
    return KIND_NBYTES.get(kind, DOCUMENT_NBYTES)


def _sealer_in(body: Mapping[str, Any], key_id: str) -> Any:
    """Return a key document's own entry of the key that seals it; None for any other document."""
    if body.get("format") != KEYS_FORMAT:
        return None
    keys = body.get("keys", [body.get("sealer")])
    found = (key for key in keys if isinstance(key, dict) and key.get("key-id") == key_id)
    return next(found, None)


def open_document(
    data: bytes,
    dataset_id: str | None,
    path: str,
    resolve: Envelope | Callable[[str], KeyEntry],
    kms: KmsClient | Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the body of a document that `seal_document` made for this dataset and path.

    Args:
        data: The document.
        dataset_id: The dataset; None accepts the one that the document names.
        path: The document's path in the dataset.
        resolve: An envelope that has the key, or a function that finds a key's entry.
        kms: The client, or its properties, that unwraps the entry found by a function.

    Raises:
        FormatError: It is not such a document.
        IntegrityError: It is another document, or was changed.
        KeyAccessError: As `Envelope.unwrap` raises it.
    """
    document = Document(data, path)
    if not isinstance(resolve, Envelope):
        if kms is None:
            raise TypeError("a function that finds entries needs the kms, too")
        resolve = Envelope(kms, {document.key_id: resolve(document.key_id)})
    return document.authentic(resolve, dataset_id)


class Document:
    """A document as it was read. `authentic` checks its tag before it parses the body.

    `key_id` is the key that seals it, `dataset_id` the dataset that it names, `sealer` the JSON of that key's entry in
    a document of keys. They come from the first line, and are claims until `authentic` has returned.

    Args:
        data: The document.
        path: Its path in the dataset.

    Raises:
        FormatError: It is not a document.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.path = path
        begin = data.find(b"\n", 0, HEADER_NBYTES) + 1
        self._body = memoryview(data)[begin : -len(END)]
        try:
            header = json.loads(str(data[:begin], "utf-8").removesuffix(TO_BODY) + "}")
            fields = {"ags", "dataset_id", "auth"}
            if not fields <= header.keys() <= fields | {"sealer"} or tuple(header["auth"]) != AUTH_FIELDS:
                raise ValueError("other fields")
            if header["ags"] != DOCUMENT or type(header["ags"]) is not int:
                raise FormatError(f"the document {path} has version {header['ags']!r}; only {DOCUMENT} is known")
            auth = header["auth"]
            self.key_id: str = check_key_id(auth["key_id"])
            self.dataset_id: str = header["dataset_id"]
            self.sealer: Any = header.get("sealer")
            self._wrapped, self._nonce, self._tag = (unbase64(auth[name]) for name in AUTH_FIELDS[1:])
            if (len(self._nonce), len(self._tag)) != (NONCE_NBYTES, TAG_NBYTES):
                raise ValueError("a nonce or a tag of another size")
            if not isinstance(self.dataset_id, str) or ("sealer" in header and not isinstance(self.sealer, dict)):
                raise ValueError("not text, or not an object")
            # There is one way to write a header, so nothing that the tag does not cover can differ.
            if _line(header) != data[:begin] or not data.endswith(END, begin):
                raise ValueError("other bytes than a document has")
        except FormatError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(
                f"{path} is not a document of ags_fast, or was damaged ({type(error).__name__})"
            ) from None

    @property
    def wrapped_key(self) -> bytes:
        """The document's own key, wrapped."""
        return self._wrapped

    def claimed(self) -> dict[str, Any]:
        """Return the body, which is not authenticated."""
        return parse_object(self._body.tobytes(), self.path)

    def authentic(self, envelope: Envelope, dataset_id: str | None) -> dict[str, Any]:
        """Return the body, if the document is authentic for this path of this dataset."""
        if self.key_id not in envelope.entries:
            raise UnknownKeyError(
                f"the document {self.path} is sealed with the key {self.key_id!r}, which is not among the dataset's in "
                "_ags/keys: it was changed, or they are older than it"
            )
        try:
            envelope.prepare(self.key_id)
        except IntegrityError as error:  # the KMS's, about its key
            raise IntegrityError(f"the key of the document {self.path} does not open: {error}") from None
        try:
            if dataset_id not in (None, self.dataset_id):
                raise IntegrityError("another dataset's")
            key = envelope.unwrap(self.key_id, self._wrapped, _bound(self.dataset_id, self.path))
            if len(key) not in KEY_NBYTES:
                raise IntegrityError("not an AES key")
            Key(key).open(self._nonce, self._tag, self._body)
        except IntegrityError:
            raise IntegrityError(
                f"the document {self.path} is not what was written for it: it was changed, moved here, or is another "
                "dataset's"
            ) from None
        body = self.claimed()
        if body.get("dataset_id") != self.dataset_id or dumps(_sealer_in(body, self.key_id)) != dumps(self.sealer):
            raise IntegrityError(f"the first line and the body of the document {self.path} contradict each other")
        return body


def _bound(dataset_id: str, path: str) -> bytes:
    try:
        return binding(dataset_id, "document", path)
    except ValueError:
        raise FormatError(f"the document {path} names an impossible dataset") from None


def _line(header: Mapping[str, Any]) -> bytes:
    return (dumps(header)[:-1] + TO_BODY).encode()
