"""What goes between PyIceberg and a REST server, translated: facades to one side, version 3 to the other.

What the server sends is shown as its facade, and commits for the facade become commits of version 3. The server sees no
key but those that are wrapped.
"""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyiceberg.exceptions import CommitFailedException
from requests import Response
from requests.adapters import BaseAdapter

from ags_fast.errors import FormatError, PolicyError, UnsupportedChangeError
from ags_fast.iceberg import metadata, policy, properties
from ags_fast.iceberg.rest.prediction import check_made, predicted
from ags_fast.iceberg.session import KMS_PREFIXES, committing, shown
from ags_fast.iceberg.writing import seal_lists
from ags_fast.metadata import updates
from ags_fast.metadata.outcome import Attempt, attempted
from ags_fast.metadata.shape import check_shape
from ags_fast.seals.state import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import NoReturn

    from requests import PreparedRequest

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Base, Session

__all__ = ["Translator", "shown_config"]

OWN_CLASSES = ("pyiceberg.io.pyarrow.PyArrowFileIO", "pyiceberg.io.fsspec.FsspecFileIO")
NOT_THE_SERVERS = (*KMS_PREFIXES, "kms-", "encryption.", "ags_fast.")
TABLE = re.compile(r"/namespaces/[^/]+/tables/[^/]+$")
TABLES = re.compile(r"/namespaces/[^/]+/tables$")
VIEW = re.compile(r"/namespaces/[^/]+/(views(/[^/]+)?|register-view)$")
# What a server sends goes into the paths of requests, by which they are told apart here.
IN_PATHS = {"prefix": {*"?#"}, "uri": {*"?#"}, "namespace-separator": {*"/?#"}}
# With these words a server says that another commit came first, and some servers say so with the status 400.
STALE = ("Cannot add snapshot with sequence number", "first-row-id is behind")
# An edit with no other update may be made again, after it was made.
KEYS_ALONE = ("add-encryption-key", "remove-encryption-key", "set-properties", "remove-properties")


def shown_config(config: Any, whose: str) -> dict[str, Any]:
    """Return what PyIceberg is shown of a configuration that a server sends: of the storage, and of requests.

    PolicyError if it chooses code, the encryption or the KMS, or would hide a table's answer from this client.
    """
    for name, value in (config or {}).items():
        low = name.lower()
        own = low == "py-io-impl" and value in OWN_CLASSES  # PyIceberg's, which FileIO chooses by a file's scheme
        if low.startswith(NOT_THE_SERVERS) or (properties.names_code(name) and not own):
            raise PolicyError(
                f"{whose} sends the setting {name}, which is this client's to choose: it would run code, lose the "
                "keys, or ask another KMS. Have the server's configuration changed"
            )
        if low in IN_PATHS and set(unquote(str(value))) & IN_PATHS[low]:
            raise PolicyError(f"{whose} sends {name}={value!r}, so that paths of requests would not be what they name")
    return properties.shown(config, properties.SERVER)


class Translator(BaseAdapter):
    """An adapter of `requests`, between PyIceberg and a server: PyIceberg sees facades, the server version 3.

    `inner` sends requests, after they are translated: it may sign them.
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
        if request.method == "POST" and TABLES.search(path):
            body = _body(request)
            asked = body.get("properties") if body.get("stage-create") else None
            return self._shown(self._ask(_with_body(request, self._creation(body)), *args, **named), asked or ())
        if request.method == "POST" and TABLE.search(path):
            return self._commit(request, *args, **named)
        return self._shown(self._ask(request, *args, **named), view=VIEW.search(path) is not None)

    def _ask(self, request: PreparedRequest, *args: Any, **named: Any) -> Response:
        """Send a request. PolicyError if the server redirects: the answer of another path would pass for this one's."""
        answer = self._inner.send(request, *args, **named)
        if answer.is_redirect:
            raise PolicyError(f"the server redirects to {answer.headers['Location']}: give its own address as uri=")
        return answer

    # ---------------------------------------------------------------------------------------------------- responses

    def _shown(self, answer: Response, asked: Iterable[str] = (), *, view: bool = False) -> Response:
        """Return a response as PyIceberg may see it, whatever it answers. PolicyError if it is refused.

        asked: properties of a table that a transaction creates: they are the client's, which sends them again. view:
        its metadata are those of a view, from which nothing is opened.
        """
        body = _json(answer)
        if body is None:
            return answer
        made = dict(body)
        for name, whose in (("defaults", "the server"), ("overrides", "the server"), ("config", "the table's server")):
            if name in body:
                made[name] = shown_config(body[name], whose)
        if "storage-credentials" in body:
            made["storage-credentials"] = [
                {**one, "config": shown_config(one.get("config"), "the table's server")}
                for one in body["storage-credentials"] or ()
            ]
        raw, location = body.get("metadata"), body.get("metadata-location")
        if raw is not None and not view:
            location = location if isinstance(location, str) else ""
            check_shape(raw, location or "the server's answer")
            self._encryption.check_metadata(raw, location or "the server's answer")
            if location:
                self._encryption.remember(raw, location)
            shown.set((self._encryption, location, raw))
            sealed = self._encryption.guard.requires()
            seen = metadata.facade(raw, sealed=sealed) if policy.is_encrypted(raw) else raw
            told = {
                name: value
                for name, value in _properties(raw).items()
                if name in asked or properties.is_shown(name, properties.TABLE)
            }
            made["metadata"] = {**seen, "properties": told}
        return _answer(answer, made)

    # ----------------------------------------------------------------------------------------------------- requests

    def _creation(self, body: Raw) -> Raw:
        properties = body.get("properties") or {}
        if policy.KEY_ID in properties:
            self._encryption.check_writes()
            body["properties"] = {**properties, "format-version": "3"}
        else:
            self._encryption.check_plaintext_table(str(body.get("name")))
        return body

    def _commit(self, request: PreparedRequest, *args: Any, **named: Any) -> Response:
        body = _body(request)
        base = committing.get()
        if base is None:
            raise PolicyError("commit through RestCatalog.commit_table: keys are lost otherwise")
        body["updates"] = _with_removals(body["updates"])
        mark = _mark(body["updates"])
        if mark is not None:
            return self._edit(request, body, base, mark, *args, **named)
        made, state = self._encrypted(body, base)
        if base.raw is not None:
            new = [one["snapshot"] for one in made["updates"] if one["action"] == "add-snapshot"]
            grown = {**base.raw, "snapshots": [*(base.raw.get("snapshots") or ()), *new]}
            attempted.set(Attempt(base.raw, state or grown))
        answer = self._asked(_with_body(request, made), *args, **named)
        if answer.ok and made is not body:
            self._check_stored(made["updates"], answer, state)
        return self._shown(answer)

    def _asked(self, request: PreparedRequest, *args: Any, **named: Any) -> Response:
        """Send a commit. If the server has made it, whatever goes wrong afterwards is not about that."""
        answer = _conflict(self._ask(request, *args, **named))
        if answer.ok:
            attempted.set(None)
        return answer

    def _encrypted(self, body: Raw, base: Base) -> tuple[Raw, Raw | None]:
        """Return a commit for the facade, as one of version 3, and what the server makes of it, if that is sealed.

        It is `body` itself if the table is in plaintext.
        """
        raw = base.raw or {"properties": {}, "next-row-id": 0}
        properties = _properties_after(_properties(raw), body["updates"])
        if not policy.is_encrypted({"properties": properties}) and not policy.is_encrypted(raw):
            self._encryption.check_plaintext_table("the table")
            return body, None
        self._encryption.check_writes()
        policy.check_change(base.raw, properties, {})
        for one in body["updates"]:
            if one["action"] == "add-schema":
                schema = {**one["schema"], "schema-id": 0}
                policy.check_change(base.raw, properties, {"schemas": [schema], "current-schema-id": 0})
        guard, at = self._encryption.guard, base.location
        sealed = base.raw is not None and guard.seals(guard.see_base(raw, at), at)
        after = {**raw, "properties": properties, "next-row-id": raw.get("next-row-id") or 0}
        sent = [_of_version_3(one) for one in body["updates"]]
        new = [one["snapshot"] for one in sent if one["action"] == "add-snapshot"]
        refs, ids = raw.get("refs") or {}, {one["snapshot-id"] for one in new}
        for one in sent:
            if one["action"] == "set-snapshot-ref":
                one.update(metadata.set_ref(one["ref-name"], refs.get(one["ref-name"], {}), one, ids))
        if new:
            seal_lists(base.io.table, after, new, base.io.inner(new[0]["manifest-list"]))
        state, requirements = after, _requirements(body, base.raw)
        fence: list[Raw] = []
        if sealed:
            told = {name: after.get(name) for name in ("properties", updates.KEYS, "next-row-id")}
            state, fence = self._sealed(base, predicted(raw, body["updates"], told, new), sent)
            requirements = _with_others(requirements, updates.requirements(raw, sent))
            sent.append({"action": "set-properties", "updates": {PROPERTY: state["properties"][PROPERTY]}})
        keys = updates.updates_of_keys(updates.entries(raw), updates.entries(state))
        first = next((i for i, one in enumerate(sent) if one["action"] == "add-snapshot"), len(sent))
        sent[first:first] = keys
        return {**body, "updates": [*fence, *sent], "requirements": requirements}, state if sealed else None

    def _sealed(self, base: Base, made: Raw, sent: list[Raw]) -> tuple[Raw, list[Raw]]:
        """Return what a server makes of updates, sealed if its base was, and the fence that goes before them."""
        raw, state = base.raw or {}, dict(made)
        if not policy.is_encrypted(made):
            return made, []
        fence = updates.fence(raw, sent)
        if fence:
            number = fence[0]["snapshot"]["sequence-number"]
            state["last-sequence-number"] = max(number, made.get("last-sequence-number") or 0)
        self._encryption.guard.seal(raw if policy.is_encrypted(raw) else None, base.location, state, None)
        return state, fence

    def _edit(self, request: PreparedRequest, body: Raw, base: Base, mark: str, *args: Any, **named: Any) -> Response:
        """Send an edit of the raw metadata, and see that its keys are what the server stores."""
        if base.raw is None:
            raise UnsupportedChangeError("an edit changes a table that is there")
        made = self._encryption.edit(mark)(base.raw)
        if policy.is_encrypted(made):
            base.io.table.remember(made, "", own=True)
        changes = updates.differences(base.raw, made)
        state, fence = self._sealed(base, made, changes)
        changes = updates.differences(base.raw, state)
        first = 1 if changes and changes[0]["action"] == "upgrade-format-version" else 0
        sent = [*changes[:first], *fence, *changes[first:]]
        body = {**body, "updates": sent, "requirements": updates.requirements(base.raw, changes)}
        attempted.set(Attempt(base.raw, state))
        answer = self._asked(_with_body(request, body), *args, **named)
        if not answer.ok:
            return answer
        stored = answer.json()["metadata"]
        lost = updates.lost_keys(stored, {**updates.entries(base.raw), **updates.entries(made)})
        if lost:
            # A commit came between, on a server that saw no conflict: its keys need those that were removed.
            again = [{"action": "add-encryption-key", "encryption-key": one} for one in lost]
            repair = {**body, "updates": again, "requirements": body["requirements"][:1]}
            answer = self._ask(_with_body(request, repair), *args, **named)
            answer.raise_for_status()
        if all(one["action"] in KEYS_ALONE for one in changes):
            _check_keys(stored, state, lost)
        # It is made: what an edit does with its files when it comes again must not happen.
        sealed = _properties(state).get(PROPERTY) != _properties(base.raw).get(PROPERTY)
        self._check_stored(changes, answer, state if sealed else None)
        return self._shown(answer)

    def _check_stored(self, sent: list[Raw], answer: Response, state: Raw | None) -> None:
        """See that a server has stored what opens new snapshots, and the state that was sealed, if one was."""
        stored = answer.json()["metadata"]
        _check_opens(sent, stored)
        if state is not None:
            check_made(stored, state, requires=self._encryption.guard.requires())


# ------------------------------------------------------------------------------------------------------------- bodies


def _body(request: PreparedRequest) -> Raw:
    sent: Any = request.body or b"{}"
    return json.loads(sent)  # type: ignore[no-any-return]


def _with_body(request: PreparedRequest, body: Raw) -> PreparedRequest:
    """Return a request with another body. Requests are sent again after a refusal, so this one stays as it is."""
    made = request.copy()
    made.prepare_body(json.dumps(body, separators=(",", ":")).encode(), None)
    return made


def _answer(answer: Response, body: Raw, status: int | None = None) -> Response:
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


def _json(answer: Response) -> Raw | None:
    """Return the JSON object of a response that tells of success; None if it is something else."""
    if not answer.ok or not (text := answer.text.lstrip()).startswith("{"):  # as PyIceberg decodes it
        return None
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        raise FormatError("the answer of the server is not JSON, or nested too deeply") from None


def _with_removals(sent: Iterable[Raw]) -> list[Raw]:
    """Return the updates of a commit, in which properties that the facade marks as gone are removed."""
    made: list[Raw] = []
    for one in sent:
        if one["action"] == "set-properties":
            gone = [name for name, value in one["updates"].items() if value == properties.GONE]
            kept = {name: value for name, value in one["updates"].items() if name not in gone}
            made += [{**one, "updates": kept}] if kept else []
            made += [{"action": "remove-properties", "removals": gone}] if gone else []
        else:
            made.append(one)
    return made


def _mark(sent: list[Raw]) -> str | None:
    """Return the mark of an edit, if a commit carries one."""
    marks = (one["updates"].get(metadata.MARK) for one in sent if one["action"] == "set-properties")
    return next((mark for mark in marks if mark is not None), None)


def _properties(raw: Mapping[str, Any]) -> Mapping[str, str]:
    return raw.get("properties") or {}


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
            at = refs.get(name, {}).get("snapshot-id")
            made.append({"type": "assert-ref-snapshot-id", "ref": name, "snapshot-id": at})
    return made


def _with_others(made: list[Raw], more: Iterable[Raw]) -> list[Raw]:
    """Return requirements with those of others that they do not have."""
    has = {(one["type"], one.get("ref")) for one in made}
    return [*made, *(one for one in more if (one["type"], one.get("ref")) not in has)]


def _check_keys(stored: Raw, made: Raw, lost: list[Raw]) -> None:
    """See that a server stores the keys of an edit that only turns them."""
    if lost or updates.entries(stored).keys() != updates.entries(made).keys():
        raise CommitFailedException("another commit came between: the keys are turned again")
    if updates.entries(stored) != updates.entries(made):
        raise PolicyError("the server did not replace the table's encryption-keys: it keeps the old ones")


def _check_opens(sent: list[Raw], stored: Raw) -> None:
    """See that a server has stored what opens new snapshots."""
    snapshots = {one["snapshot-id"]: one for one in stored.get("snapshots") or ()}
    keys = updates.entries(stored)
    for one in sent:
        snapshot = one.get("snapshot") or {}
        found = snapshots.get(snapshot.get("snapshot-id"))
        if one["action"] == "add-snapshot" and found is not None:
            key_id = snapshot["key-id"]
            if found.get("key-id") != key_id or keys.get(key_id, {}).get("encrypted-by-id") not in keys:
                raise PolicyError(
                    f"the server has stored snapshot {found['snapshot-id']} without its key: it does not know of "
                    "Iceberg's table encryption. Roll the table back, and use a server that does"
                )
