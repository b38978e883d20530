"""Encrypted tables for tests: a KMS, a SQL catalog in a folder, and rows."""

from __future__ import annotations

import base64
import http.client
import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from pyiceberg.types import LongType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ags_fast.iceberg.manifests import Known

MASTER = "master"
LONG = LongType()
KEY_ID = "encryption.key-id"
SEALS = "encryption.metadata-seal"
REQUIRE = {SEALS: "require", "encryption.allowed-key-ids": MASTER}  # of a catalog that reads what is sealed only
MIXED = {"encryption.plaintext-tables": "write"}  # of a catalog that has tables in plaintext, too
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def sql_catalog(folder: Path, kms: Mapping[str, str] | None, **properties: Any) -> Any:
    """Return the encrypted SQL catalog of a folder, with the namespace ``ns``."""
    from ags_fast.iceberg import load_catalog

    catalog = load_catalog(
        "tests",
        kms=kms,
        **{"type": "sql", "uri": f"sqlite:///{folder}/catalog.db?timeout=60", "warehouse": f"file://{folder}/wh"}
        | properties,
    )
    catalog.create_namespace_if_not_exists("ns")
    return catalog


def new_table(catalog: Any, name: str = "t", *, schema: Any = SCHEMA, namespace: str = "ns", **properties: str) -> Any:
    """Create an encrypted table. Underscores in names of properties stand for dots."""
    more = {key.replace("_", "."): value for key, value in properties.items()}
    return catalog.create_table(f"{namespace}.{name}", schema=schema, properties={KEY_ID: MASTER, **more})


def forget_encrypted() -> None:
    """Forget that tables were encrypted, as a new process has: for tests that set a folder back."""
    from ags_fast.iceberg import session

    session._encrypted.clear()  # noqa: SLF001


def rows(first: int, last: int) -> pa.Table:
    """Rows whose ids are from `first` up to `last`."""
    ids = range(first, last)
    return pa.table({"id": list(ids), "name": [f"name {i}" for i in ids]}, schema=SCHEMA)


def ids(table: Any, **scan: Any) -> list[int]:
    """The ids of a table's rows, sorted."""
    found: list[int] = table.scan(**scan).to_arrow()["id"].to_pylist()
    return sorted(found)


def open_whole(known: Known, inner: Any) -> bytes:
    """The plaintext of a file that a list or manifest names."""
    from ags_fast.iceberg.reading import Node, open_node

    node = Node(known)
    open_node(node, inner)
    return node.plain


def table_keys(table: Any) -> set[bytes]:
    """The keys of a table's files and lists in all snapshots, and its KEKs."""
    from ags_fast.iceberg import files
    from ags_fast.iceberg.commit import raw_metadata, table_io

    raw = raw_metadata(table)
    keys = {
        bytes(one.key_metadata.encryption_key)
        for snapshot in raw["snapshots"]
        for one in files(table, snapshot_id=snapshot["snapshot-id"])
        if one.key_metadata is not None
    }
    kms, master = table_io(table).session.kms, raw["properties"][KEY_ID]
    for one in raw["encryption-keys"]:
        if one["encrypted-by-id"] == master:
            keys.add(kms.unwrap_key(base64.b64decode(one["encrypted-key-metadata"]), master))
    return keys


def forms_of_key(key: bytes) -> set[bytes]:
    """How a key may look in text, in a binary file, or as part of a longer text in base64."""
    encoded = {base64.b64encode(bytes(shift) + key)[shift and 4 : -4] for shift in range(3)}
    texts = (key.hex(), repr(key)[2:-1], repr(list(key))[1:-1], ", ".join(map(hex, key)))
    return {key, *encoded, *(text.encode() for text in texts)}


def key_forms(table: Any) -> set[str]:
    """How the keys of a table's files, lists and KEKs may look in text."""
    forms = {form for key in table_keys(table) for form in forms_of_key(key) if form != key}
    return {form.decode() for form in forms}


class S3Proxy:
    """Passes requests on to an S3 server, and counts them, and the bytes of bodies that are got, by path."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._got: list[tuple[str, int]] = []
        self.requests = 0  # of all kinds
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                outer.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                to = http.client.HTTPConnection(str(outer._target.hostname), outer._target.port)
                try:
                    # The signature covers the header Host, which moto does not check.
                    to.request(self.command, self.path, body, dict(self.headers))
                    answer = to.getresponse()
                    data = answer.read()
                finally:
                    to.close()
                if self.command == "GET":
                    outer._got.append((self.path, len(data)))
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> S3Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def counts(self, suffix: str) -> tuple[int, int]:
        """The bytes and the number of GETs of objects whose names end so."""
        sizes = [nbytes for path, nbytes in self._got if urlsplit(path).path.endswith(suffix)]
        return sum(sizes), len(sizes)


def local(location: str) -> str:
    """Return the path of a file of a `sql_catalog`."""
    return location.removeprefix("file://")


def point(folder: Path, location: str) -> None:
    """Let the SQL catalog of a folder name another metadata file of its table `t`, as who can write to the catalog."""
    with sqlite3.connect(folder / "catalog.db") as database:
        database.execute("update iceberg_tables set metadata_location = ? where table_name = 't'", (location,))


def change(location: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a metadata file in its place."""
    with open(local(location)) as file:
        raw = json.load(file)
    change(raw)
    with open(local(location), "w") as file:
        json.dump(raw, file)


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what only this process knows."""
    from ags_fast.iceberg import session
    from ags_fast.keys import clear_cache

    monkeypatch.setattr(session, "_encrypted", {})
    monkeypatch.setattr(session, "_keks", {})
    monkeypatch.setattr(session, "_masters", set())
    clear_cache()
