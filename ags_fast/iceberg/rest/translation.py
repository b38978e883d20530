"""What goes between PyIceberg and a REST server, translated: facades to one side, version 3 to the other.

What the server sends is shown as its facade, and commits for the facade become commits of version 3. The server sees no
key but those that are wrapped.
"""

from __future__ import annotations

import io
import json
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from pyiceberg.exceptions import CommitFailedException
from requests import Response
from requests.adapters import BaseAdapter

from ags_fast.errors import PolicyError, UnsupportedChangeError
from ags_fast.iceberg import metadata, policy
from ags_fast.iceberg.rest import updates
from ags_fast.iceberg.session import KMS_PREFIXES
from ags_fast.iceberg.writing import seal_lists

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import NoReturn

    from requests import PreparedRequest

    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Session

__all__ = ["Base", "Translator", "check_config", "committing"]

OWN_CLASSES = ("pyiceberg.io.pyarrow.PyArrowFileIO", "pyiceberg.io.fsspec.FsspecFileIO")
NOT_THE_SERVERS = (*KMS_PREFIXES, "kms-", "encryption.", "ags_fast.")
TABLE = re.compile(r"/namespaces/[^/]+/tables/[^/]+$")
TABLES = re.compile(r"/namespaces/[^/]+/tables$")
REGISTER = re.compile(r"/namespaces/[^/]+/register$")
CREDENTIALS = re.compile(r"/namespaces/[^/]+/tables/[^/]+/credentials$")
# With these words a server says that another commit came first, and some servers say so with the status 400.
STALE = ("Cannot add snapshot with sequence number", "first-row-id is behind")


# An edit with no other update may be made again, after it was made.
KEYS_ALONE = ("add-encryption-key", "remove-encryption-key", "set-properties", "remove-properties")


class Base(NamedTuple):
    """What a commit in progress changes: None for a new table."""

    raw: Raw | None
    io: FileIO


committing: ContextVar[Base] = ContextVar("committing")  # what the commit of this thread changes


def check_config(config: Iterable[str], whose: str) -> None:
    """Refuse a configuration that a server sends, if it chooses what a client alone chooses.

    Credentials for the storage and its endpoint are a server's to send.

    Args:
        config: Names of properties.
        whose: Whose they are, for the error.

    Raises:
        PolicyError: One of them is the class that opens files, or one of the encryption or the KMS.
    """
    for name in config:
        low = name.lower()
        if low in policy.CLASSES or low.startswith(NOT_THE_SERVERS):
            raise PolicyError(
                f"{whose} sends the setting {name}, which is this client's to choose: it would lose the keys, or ask "
                "another KMS. Have the server's configuration changed"
            )


class Translator(BaseAdapter):
    """An adapter of `requests`, between PyIceberg and a server: PyIceberg sees facades, the server version 3.

    Args:
        session: What the catalog knows.
        inner: Sends requests, after they are translated: it may sign them.
    """

    def __init__(self, session: Session, inner: BaseAdapter) -> None:
        super().__init__()
        self._encryption = session
        self._inner = inner

    def __reduce__(self) -> NoReturn:
        raise TypeError("a catalog's connection is never pickled: load the catalog where it is used")

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def send(self, request: PreparedRequest, *args: Any, **named: Any) -> Response:
        """Send a request, translated, and return the translated response."""
        path = urlsplit(request.url or "").path
        if request.method == "GET" and TABLE.search(path):
            return self._shown(self._inner.send(request, *args, **named))
        if request.method == "GET" and CREDENTIALS.search(path):
            answer = self._inner.send(request, *args, **named)
            if answer.ok:
                _check_answer(answer.json())
            return answer
        if request.method == "POST" and TABLES.search(path):
            return self._shown(self._inner.send(_with_body(request, self._creation(_body(request))), *args, **named))
        if request.method == "POST" and REGISTER.search(path):
            return self._shown(self._inner.send(request, *args, **named))
        if request.method == "POST" and TABLE.search(path):
            return self._commit(request, *args, **named)
        return self._inner.send(request, *args, **named)

    # ---------------------------------------------------------------------------------------------------- responses

    def _shown(self, answer: Response) -> Response:
        """Return a response with a table's metadata, as PyIceberg may see it."""
        if not answer.ok:
            return answer
        body = answer.json()
        _check_answer(body)
        raw, location = body.get("metadata"), body.get("metadata-location")
        if not isinstance(raw, dict):
            return answer
        self._encryption.check_metadata(raw, location or "the server's answer")
        if location:
            self._encryption.remember(raw, location)
        if not policy.is_encrypted(raw):
            return answer
        return _answer(answer, {**body, "metadata": metadata.facade(raw), "config": _without_class(body.get("config"))})

    # ----------------------------------------------------------------------------------------------------- requests

    def _creation(self, body: Raw) -> Raw:
        properties = body.get("properties") or {}
        if policy.KEY_ID in properties:
            self._encryption.check_writes()
            body["properties"] = {**properties, "format-version": "3"}
        return body

    def _commit(self, request: PreparedRequest, *args: Any, **named: Any) -> Response:
        body = _body(request)
        base = committing.get(None)
        if base is None:
            raise PolicyError("commit through RestCatalog.commit_table: keys are lost otherwise")
        mark = _mark(body["updates"])
        if mark is not None:
            return self._edit(request, body, base, mark, *args, **named)
        made = self._sealed(body, base)
        answer = _conflict(self._inner.send(_with_body(request, made), *args, **named))
        if answer.ok and made is not body:
            _check_stored(made["updates"], answer.json())
        return self._shown(answer)

    def _sealed(self, body: Raw, base: Base) -> Raw:
        """Return a commit for the facade, as one of version 3; `body` itself if the table is in plaintext."""
        raw = base.raw or {"properties": {}, "next-row-id": 0}
        properties = _properties_after(raw.get("properties") or {}, body["updates"])
        if not policy.is_encrypted({"properties": properties}) and not policy.is_encrypted(raw):
            return body
        self._encryption.check_writes()
        policy.check_change(base.raw, properties, {})
        for one in body["updates"]:
            if one["action"] == "add-schema":
                schema = {**one["schema"], "schema-id": 0}
                policy.check_change(base.raw, properties, {"schemas": [schema], "current-schema-id": 0})
        after = {**raw, "properties": properties, "next-row-id": raw.get("next-row-id") or 0}
        sent = [_of_version_3(one) for one in body["updates"]]
        new = [one["snapshot"] for one in sent if one["action"] == "add-snapshot"]
        if new:
            seal_lists(self._encryption, after, new, base.io.inner(new[0]["manifest-list"]))
        keys = updates.updates_of_keys(updates.entries(raw), updates.entries(after))
        first = next((i for i, one in enumerate(sent) if one["action"] == "add-snapshot"), len(sent))
        sent[first:first] = keys
        return {**body, "updates": sent, "requirements": _requirements(body, base.raw)}

    def _edit(self, request: PreparedRequest, body: Raw, base: Base, mark: str, *args: Any, **named: Any) -> Response:
        """Send an edit of the raw metadata, and see that its keys are what the server stores."""
        if base.raw is None:
            raise UnsupportedChangeError("an edit changes a table that is there")
        made = self._encryption.edit(mark)(base.raw)
        changes = updates.differences(base.raw, made)
        before = updates.fence(base.raw) if updates.needs_fence(base.raw, changes) else []
        body = {**body, "updates": [*before, *changes], "requirements": updates.requirements(base.raw)}
        answer = _conflict(self._inner.send(_with_body(request, body), *args, **named))
        if not answer.ok:
            return answer
        stored = answer.json()["metadata"]
        lost = updates.lost_keys(stored, {**updates.entries(base.raw), **updates.entries(made)})
        if lost:
            # A commit came between, on a server that saw no conflict: its keys need those that were removed.
            again = [{"action": "add-encryption-key", "encryption-key": one} for one in lost]
            repair = {**body, "updates": again, "requirements": body["requirements"][:1]}
            answer = self._inner.send(_with_body(request, repair), *args, **named)
            answer.raise_for_status()
        if all(one["action"] in KEYS_ALONE for one in changes):
            _check_keys(stored, made, lost)
        else:  # it is made: what an edit does with its files when it comes again must not happen
            _check_stored(changes, answer.json())
        return self._shown(answer)


# ------------------------------------------------------------------------------------------------------------- bodies


def _body(request: PreparedRequest) -> Raw:
    sent: Any = request.body or b"{}"
    body: Raw = json.loads(sent)
    return body


def _with_body(request: PreparedRequest, body: Raw) -> PreparedRequest:
    """Return a request with another body. Requests are sent again after a refusal, so this one stays as it is."""
    made = request.copy()
    made.prepare_body(json.dumps(body, separators=(",", ":")).encode(), None)
    return made


def _answer(answer: Response, body: Raw, status: int | None = None) -> Response:
    """Return a response with another body."""
    made = Response()
    made.status_code = answer.status_code if status is None else status
    made.headers, made.url, made.reason = answer.headers.copy(), answer.url, answer.reason
    made.request, made.history, made.encoding = answer.request, answer.history, "utf-8"
    made.headers.pop("Content-Encoding", None)
    made.raw = io.BytesIO(json.dumps(body, separators=(",", ":")).encode())
    return made


def _conflict(answer: Response) -> Response:
    """Return a response, as a conflict if the server refused numbers that another commit has taken."""
    if answer.status_code == 400 and any(words in answer.text for words in STALE):
        return _answer(answer, {"error": {"message": answer.text, "type": "CommitFailedException", "code": 409}}, 409)
    return answer


def _check_answer(body: Any) -> None:
    """Refuse a response whose configuration would choose more than where and how files are stored."""
    if isinstance(body, dict):
        for config in (body.get("config"), *(one.get("config") for one in body.get("storage-credentials") or ())):
            check_config(_without_class(config), "the table's server")


def _without_class(config: Mapping[str, str] | None) -> dict[str, str]:
    """Return a table's configuration without a class of PyIceberg's own, which FileIO chooses by a file's scheme."""
    return {
        name: value
        for name, value in (config or {}).items()
        if not (name.lower() == "py-io-impl" and value in OWN_CLASSES)
    }


def _mark(sent: list[Raw]) -> str | None:
    """Return the mark of an edit, if a commit carries one."""
    marks = (one["updates"].get(metadata.MARK) for one in sent if one["action"] == "set-properties")
    return next((mark for mark in marks if mark is not None), None)


def _properties_after(properties: Mapping[str, str], sent: Iterable[Raw]) -> dict[str, str]:
    after = dict(properties)
    for one in sent:
        if one["action"] == "set-properties":
            after.update(one["updates"])
        elif one["action"] == "remove-properties":
            after = {name: value for name, value in after.items() if name not in one["removals"]}
    return after


def _of_version_3(update: Raw) -> Raw:
    if update["action"] == "upgrade-format-version":
        return {**update, "format-version": 3}
    if update["action"] == "add-snapshot":
        return {**update, "snapshot": dict(update["snapshot"])}
    return update


def _requirements(body: Raw, base: Raw | None) -> list[Raw]:
    """Return a commit's requirements, and those it lacks: the same table, and where the branches that move are."""
    made = list(body.get("requirements") or ())
    if base is None:
        return made
    if not any(one["type"] == "assert-table-uuid" for one in made):
        made.append({"type": "assert-table-uuid", "uuid": base["table-uuid"]})
    asserted = {one["ref"] for one in made if one["type"] == "assert-ref-snapshot-id"}
    refs = base.get("refs") or {}
    for one in body["updates"]:
        name = one.get("ref-name")
        if one["action"] == "set-snapshot-ref" and name not in asserted:
            asserted.add(name)
            made.append(
                {"type": "assert-ref-snapshot-id", "ref": name, "snapshot-id": refs.get(name, {}).get("snapshot-id")}
            )
    return made


def _check_keys(stored: Raw, made: Raw, lost: list[Raw]) -> None:
    """See that a server stores the keys of an edit that only turns them.

    Raises:
        CommitFailedException: Another commit came between, so the keys are turned again.
        PolicyError: The server keeps the old ones.
    """
    if lost or updates.entries(stored).keys() != updates.entries(made).keys():
        raise CommitFailedException("another commit came between: the keys are turned again")
    if updates.entries(stored) != updates.entries(made):
        raise PolicyError("the server did not replace the table's encryption-keys: it keeps the old ones")


def _check_stored(sent: list[Raw], body: Raw) -> None:
    """Tell whether a server has stored what opens new snapshots.

    Raises:
        PolicyError: It has not.
    """
    stored = {one["snapshot-id"]: one for one in body["metadata"].get("snapshots") or ()}
    keys = updates.entries(body["metadata"])
    for one in sent:
        snapshot = one.get("snapshot") or {}
        found = stored.get(snapshot.get("snapshot-id"))
        if one["action"] == "add-snapshot" and found is not None:
            key_id = snapshot["key-id"]
            if found.get("key-id") != key_id or keys.get(key_id, {}).get("encrypted-by-id") not in keys:
                raise PolicyError(
                    f"the server has stored snapshot {found['snapshot-id']} without its key: it does not know of "
                    "Iceberg's table encryption. Roll the table back, and use a server that does"
                )
