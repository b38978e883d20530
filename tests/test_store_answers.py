"""What each object store makes of every answer that is not the one that is due: see also test_answers.py."""

from __future__ import annotations

import errno
import json
import re
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import pytest
from servers.bad_http import Answers
from support import pattern

from ags_fast.fs import Store, objects
from ags_fast.fs.answers import AGAIN, FOREIGN, MISSING, REFUSED, meaning
from ags_fast.fs.objects import ATTEMPTS, CHANGED, DENIED, LACKING, OUTSIDE, PART_NBYTES, STATUSES, ObjectStore, ranged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}
# A code of a service may end in such a word; none that these tests answer does.
CLASS_NAME = re.compile(r"\b[A-Z]\w*(Error|Exception|Redirects|Timeout)\b|NoneType|Traceback")
ELSEWHERE = "https://elsewhere.example.com/log-in"
DATE = formatdate(1e9, usegmt=True)
GENERATION = "17"
XML = {"Content-Type": "application/xml"}


class Peer:
    """A store, and what answers it."""

    def __init__(self, name: str, server: Answers, waits: list[float]) -> None:
        self.name, self.server, self.waits = name, server, waits
        if name == "s3":
            options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": server.url}
            url = "s3://bucket/folder"
        elif name == "gcs":
            options, url = {"endpoint_url": server.url, "token": "anon", "project": "p"}, "gs://bucket/folder"
        else:
            parts = {"DefaultEndpointsProtocol": "http", "AccountName": "a", "AccountKey": "QUJD"}
            parts["BlobEndpoint"] = f"{server.url}/a"
            options, url = (
                {"connection_string": ";".join(f"{k}={v}" for k, v in parts.items())},
                "az://container/folder",
            )
        store = Store(url, options)
        assert isinstance(store, ObjectStore)
        self.store = store

    def error(self, code: str = "Odd") -> tuple[dict[str, str], bytes]:
        """An error in the form of the service's."""
        if self.name == "gcs":
            inner = {"code": 400, "message": "odd", "errors": [{"reason": code}]}
            return {}, json.dumps({"error": inner}).encode()
        head = {"x-ms-error-code": code} if self.name == "azure" else {}
        return {**XML, **head}, f"<Error><Code>{code}</Code><Message>odd</Message></Error>".encode()

    def answers(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.server.first.clear()
        self.server.always = status, headers, body
        self.server.asked.clear()
        self.waits.clear()

    def fails(self, call: Callable[[Store], object]) -> OSError:
        with pytest.raises(OSError) as caught:  # noqa: PT011 (each test looks at what it says)
            call(self.store)
        said = str(caught.value)
        assert not CLASS_NAME.search(said), said
        return caught.value

    def count(self) -> int:
        """The requests that were made, without those of botocore for the region of a bucket."""
        return sum((method, path.strip("/")) != ("HEAD", "bucket") for method, path, _ in self.server.asked)

    def kind(self, status: int) -> str:
        if (self.name, status) == ("s3", 409):
            return AGAIN
        return STATUSES.get(status, meaning(status))


@pytest.fixture(params=PACKAGES)
def peer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    pytest.importorskip(PACKAGES[request.param])
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(objects, "pause", pause)
    server = Answers()
    try:
        yield Peer(request.param, server, waits)
    finally:
        server.shutdown()
        server.server_close()


def listing(store: Store) -> object:
    return list(store.list())


def upload(store: Store) -> None:
    with store.begin("a") as new:
        new.write(pattern(PART_NBYTES + 1))
        new.publish()


CALLS: dict[str, Callable[[Any], object]] = {
    "stat": lambda store: store.stat("a"),
    "list": listing,
    "get": lambda store: store.read_small("a", 10),
    "put": lambda store: store.write_small("a", b"x"),
    "create": lambda store: store.create_exclusive("a", b"x"),
    "delete": lambda store: store.delete("a"),
}
SAID = {
    AGAIN: rf"stayed busy in {ATTEMPTS} attempts",
    FOREIGN: r"(127\.0\.0\.1 redirects to elsewhere\.example\.com.*this is not|127\.0\.0\.1 does not answer like) .*"
    r"[Cc]heck (endpoint_url|the account)",
    DENIED: "credentials",
}
ERRNO = {MISSING: errno.ENOENT, DENIED: errno.EACCES, LACKING: errno.ENOSYS}


# ---------------------------------------------------------------- statuses


def asks_whose(kind: str, what: str) -> bool:
    """Whether the answer to the first of two attempts may have been lost, so that a look shows whose the object is."""
    return (kind == MISSING and what in ("put", "create")) or (kind == CHANGED and what == "create")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", CALLS)
def test_every_status(peer: Peer, what: str) -> None:
    for status in range(300, 600):
        if (peer.name, what, status) == ("azure", "get", 416):  # its package asks again for an empty blob
            continue
        headers, body = peer.error()
        peer.answers(status, {**headers, "Location": ELSEWHERE}, body)
        kind = peer.kind(status)
        if kind == MISSING and what in ("stat", "delete"):
            assert CALLS[what](peer.store) is None
            continue
        if kind == OUTSIDE and what == "get":
            assert peer.store.read_small("a", 10) == b""
            continue
        error = peer.fails(CALLS[what])
        wanted = ERRNO.get(kind, errno.EIO)
        if kind == CHANGED and what == "create":  # only this one has a condition
            wanted = errno.EEXIST
        assert error.errno == wanted, (status, error)
        assert re.search(SAID.get(kind, ""), str(error)), (status, error)
        assert peer.count() == (ATTEMPTS if kind == AGAIN else 1 + asks_whose(kind, what)), status
        assert kind != AGAIN or len(peer.waits) == ATTEMPTS - 1


@pytest.mark.parametrize("what", ["list", "get", "put"])
def test_pages_of_others(peer: Peer, what: str) -> None:
    """HTML, and JSON that is no error of the service: only that somebody is busy is believed."""
    for status in [*range(300, 310), 400, 401, 403, 404, 407, 409, 412, 416, 421, 429, 451, 500, 501, 502, 503, 511]:
        for kind, body in (("text/html", b"<html>log in</html>"), ("application/json", b'{"login": "here"}')):
            peer.answers(status, {"Content-Type": kind}, body)
            error = peer.fails(CALLS[what])
            assert error.errno == errno.EIO, (status, error)
            busy = meaning(status) == AGAIN
            assert re.search(SAID[AGAIN] if busy else SAID[FOREIGN], str(error)), (status, error)
            assert peer.count() == (ATTEMPTS if busy else 1), (status, peer.server.asked)


def test_waits_as_told(peer: Peer) -> None:
    headers, body = peer.error()
    peer.answers(503, {**headers, "Retry-After": "7"}, body)
    peer.fails(listing)
    assert peer.waits[:3] == [7, 7, 7]
    assert len(peer.waits) == ATTEMPTS - 1
    peer.answers(429, {**headers, "Retry-After": formatdate(time.time() + 50, usegmt=True)}, body)
    peer.fails(listing)
    assert all(40 < wait <= 50 for wait in peer.waits)
    peer.answers(503, headers, body)
    peer.fails(listing)
    assert all(0.05 * 3**i <= wait <= 0.1 * 3**i for i, wait in enumerate(peer.waits))
    peer.answers(503, {**headers, "Retry-After": "3600"}, body)
    assert re.search("asks to wait 3600 s.* at most 60 s", str(peer.fails(listing)))
    assert (peer.waits, peer.count()) == ([], 1)


def test_busy_at_first(peer: Peer) -> None:
    """Whatever the request, its last attempt counts."""
    headers, body = peer.error()
    for call, wanted in ((listing, []), (lambda store: store.stat("a"), None)):
        peer.answers(404 if wanted is None else 200, *empty(peer, wanted is None))
        peer.server.first = [(503, headers, body), (500, headers, body), (429, headers, body)]
        assert call(peer.store) == wanted
        assert peer.count() == 4


def empty(peer: Peer, missing: bool) -> tuple[dict[str, str], bytes]:
    if missing:
        return peer.error()
    return page(peer, [], None)


def page(peer: Peer, names: list[str], token: str | None) -> tuple[dict[str, str], bytes]:
    """A page of a listing."""
    if peer.name == "gcs":
        entries = [{"name": name, "size": "3", "generation": "1", "updated": "2026-01-01T00:00:00Z"} for name in names]
        more = {"nextPageToken": token} if token else {}
        return {}, json.dumps({"kind": "storage#objects", "items": entries, **more}).encode()
    if peer.name == "s3":
        inner = "".join(
            f"<Contents><Key>{name}</Key><Size>3</Size><ETag>e</ETag><LastModified>2026-01-01T00:00:00Z</LastModified>"
            "</Contents>"
            for name in names
        )
        next_one = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        truncated = str(token is not None).lower()
        return XML, (
            f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{next_one}{inner}</ListBucketResult>".encode()
        )
    inner = "".join(
        f"<Blob><Name>{name}</Name><Properties><Content-Length>3</Content-Length><Etag>e</Etag>"
        f"<Last-Modified>{DATE}</Last-Modified><BlobType>BlockBlob</BlobType></Properties></Blob>"
        for name in names
    )
    return XML, (
        '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="x" ContainerName="container">'
        f"<Blobs>{inner}</Blobs><NextMarker>{token or ''}</NextMarker></EnumerationResults>"
    ).encode()


# ---------------------------------------------------------------- bodies


def malformed(right: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "a page": b"<html>log in</html>",
        "a page that is no XML": b"<!DOCTYPE html><html><br>log in",
        "no fields": b"{}",
        "a list": b"[]",
        "null": b"null",
        "a text": b"welcome",
        "cut": right[: len(right) * 2 // 3],
        "other JSON": b'{"access_token": "x", "items": 17}',
        "other XML": b"<Other><Contents>x</Contents><Blobs>y</Blobs></Other>",
        "not UTF-8": b"\xff\xfe{}<",
        "nested": b"[" * 100_000,
    }


def test_malformed_listings(peer: Peer) -> None:
    headers, right = page(peer, ["folder/a"], None)
    peer.answers(200, headers, right)
    assert [entry.path for entry in peer.store.list()] == ["a"]
    for what, body in malformed(right).items():
        for call in (listing, lambda store: store.exists()):
            for more in (headers, {"Content-Type": "text/html"}):
                peer.answers(200, more, body)
                error = peer.fails(call)
                assert error.errno == errno.EIO, (what, error)
                assert re.search(SAID[FOREIGN], str(error)), (what, error)
                assert peer.count() == 1, what


WORDS = {
    "s3": ["Key", "Size", "ETag", "LastModified", "IsTruncated"],
    "gcs": ["name", "size", "generation", "updated"],
    "azure": ["Content-Length", "Etag", "Last-Modified"],
}


def test_fields_that_are_not_there(peer: Peer) -> None:
    headers, right = page(peer, ["folder/a"], None)
    for word in WORDS[peer.name]:
        peer.answers(200, headers, right.replace(word.encode(), b"X" + word.encode()))
        error = peer.fails(listing)
        assert re.search(SAID[FOREIGN], str(error)), (word, error)
        for odd in (b"\xc3\xa4", b"{}", b"x"):
            pattern = (rb'("%s": )[^,}]*' if peer.name == "gcs" else rb"(<%s>)[^<]*") % word.encode()
            if word.lower() in ("key", "name", "etag", "generation") or (word, odd) == ("IsTruncated", b"x"):
                continue  # any text is one
            peer.answers(200, headers, re.sub(pattern, rb'\1"%s"' % odd if peer.name == "gcs" else rb"\1" + odd, right))
            if word == "IsTruncated":
                continue
            assert re.search(SAID[FOREIGN], str(peer.fails(listing))), (word, odd)


@pytest.mark.parametrize("what", ["stat", "get", "put", "create"])
def test_successes_of_others(peer: Peer, what: str) -> None:
    """A proxy answers 200 to everything. An object's bytes may be any, so its headers show that it is one."""
    for status in (200, 201, 202, 206):
        for body in malformed(b"{}").values():
            for headers in ({}, {"Content-Type": "text/html"}):
                peer.answers(status, headers, body)
                error = peer.fails(CALLS[what])
                assert error.errno == errno.EIO, error
                assert re.search(SAID[FOREIGN], str(error)), (status, body[:20], error)
                assert peer.count() == 1


def test_a_delete_that_a_page_answers(peer: Peer) -> None:
    for status in (200, 201, 203, 206):
        peer.answers(status, {"Content-Type": "text/html"}, b"<html>log in</html>")
        assert re.search(SAID[FOREIGN], str(peer.fails(CALLS["delete"]))), status


@pytest.mark.timeout(120)
def test_uploads_in_parts(peer: Peer) -> None:
    for status, headers, body in (
        (200, {}, b""),
        (200, {"Content-Type": "text/html"}, b"<html>log in</html>"),
        (200, {}, b"{}"),
        (200, {"Location": f"{peer.server.url}/session", "x-goog-generation": "1"}, b"{}"),
        (201, {}, b""),
        (308, {"Location": ELSEWHERE}, b""),
        (302, {"Location": ELSEWHERE}, b""),
    ):
        peer.answers(status, headers, body)
        error = peer.fails(upload)
        assert re.search(SAID[FOREIGN], str(error)), (status, error)
    peer.answers(503, *peer.error())
    assert re.search(SAID[AGAIN], str(peer.fails(upload)))


# ---------------------------------------------------------------- ranges


def data_headers(peer: Peer, content_range: str | None) -> dict[str, str]:
    more = {} if content_range is None else {"Content-Range": content_range}
    if peer.name == "gcs":
        return {**more, "X-Goog-Generation": GENERATION, "Last-Modified": DATE}
    return {**more, "ETag": '"17"', "Last-Modified": DATE, "x-ms-blob-type": "BlockBlob"}


def test_another_range(peer: Peer) -> None:
    """Each read asks for the bytes from 10 to 19."""
    data = pattern(100)
    stamp = '"17"' if peer.name == "s3" else GENERATION

    def read(store: Any) -> bytes:
        return bytes(store._request_range("a", stamp, 10, 20).result())  # noqa: SLF001 (readers ask for more)

    peer.answers(206, data_headers(peer, "bytes 10-19/100"), data[10:20])
    assert read(peer.store) == data[10:20]
    peer.answers(206, data_headers(peer, "bytes 10-14/15"), data[10:15])
    assert read(peer.store) == data[10:15]
    for told, body in (
        ("bytes 0-9/100", data[:10]),
        ("bytes 9-18/100", data[9:19]),
        ("bytes 10-20/100", data[10:21]),
        ("bytes 10-14/100", data[10:15]),
        ("bytes 10-19/100", data[10:19]),
        ("bytes 10-19/100", data[10:21]),
        ("bytes 10-19/15", data[10:20]),
        ("bytes 10-19/*", data[10:20]),
        ("bytes */100", data[10:20]),
        ("bytes 10-19", data[10:20]),
        ("10-19/100", data[10:20]),
        ("nonsense", data[10:20]),
        ("", data[10:20]),
        (None, data[10:20]),
        (None, data),
    ):
        for status in (206, 200):
            peer.answers(status, data_headers(peer, told), body)
            error = peer.fails(read)
            assert error.errno == errno.EIO
            assert re.search("another range|does not answer like", str(error)), (told, error)
            assert peer.count() <= 1 + (peer.name == "azure"), told  # its package asks for what is left, as it was told


def test_a_server_without_ranges() -> None:
    data = pattern(100)
    assert ranged(0, 10, None, data, "a") == (0, 100, data[:10])
    assert ranged(0, 200, None, data, "a") == (0, 100, data)
    assert ranged(-10, 10, None, data, "a") == (90, 100, data[90:])
    assert ranged(-200, 200, None, data, "a") == (0, 100, data)
    assert ranged(0, 200, None, b"", "a") == (0, 0, b"")
    assert ranged(-10, 10, "bytes 90-99/100", data[90:], "a") == (90, 100, data[90:])
    for told, body in (
        ("bytes 0-9/100", data[:10]),
        ("bytes 80-89/100", data[80:90]),
        ("bytes 90-98/100", data[90:99]),
    ):
        with pytest.raises(OSError, match="another range"):
            ranged(-10, 10, told, body, "a")


# ---------------------------------------------------------------- listings and uploads that do not advance


@pytest.mark.timeout(60)
def test_a_listing_that_does_not_end(peer: Peer) -> None:
    peer.answers(200, *page(peer, ["folder/a"], "again"))
    assert re.search("comes back to where it was", str(peer.fails(listing)))
    assert peer.count() <= 3
    peer.server.first = [(200, *page(peer, ["folder/a"], token)) for token in ("1", "2", "3", "1")]
    assert re.search("comes back to where it was", str(peer.fails(listing)))
    if peer.name == "s3":
        names = [f"n{i}" for i in range(5000)]
        peer.answers(200, *page(peer, ["folder/a"], "again"))
        assert re.search("comes back to where it was", str(peer.fails(lambda store: store.existing(names))))
        peer.answers(200, *page(peer, [], "again"))
        assert re.search("comes back to where it was", str(peer.fails(lambda store: store.existing(names))))
        headers, body = page(peer, ["folder/a"], "x")
        body = body.replace(b"<NextContinuationToken>x</NextContinuationToken>", b"")
        peer.answers(200, headers, body)
        assert re.search("NextContinuationToken is missing", str(peer.fails(listing)))
        body = b"<R><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u"
        body += b"</NextUploadIdMarker></R>"
        peer.answers(200, XML, body)
        assert re.search("comes back", str(peer.fails(lambda store: store.sweep(older_than=0))))
        peer.answers(200, XML, b"<R><IsTruncated>true</IsTruncated></R>")
        assert re.search("NextKeyMarker is missing", str(peer.fails(lambda store: store.sweep(older_than=0))))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kept", [None, "bytes=0-99", "bytes=0-99999999999", "bytes=x", "nonsense"])
def test_an_upload_that_does_not_advance(peer: Peer, kept: str | None) -> None:
    if peer.name != "gcs":
        pytest.skip("only an upload to Google says how far it is")
    peer.answers(308, {} if kept is None else {"Range": kept}, b"")
    start = (200, {"Location": f"{peer.server.url}/session"}, b"{}")
    peer.server.first = [start]
    error = peer.fails(upload)
    assert error.errno == errno.EIO
    assert peer.count() <= ATTEMPTS + 4


# ---------------------------------------------------------------- conditions, and answers that were lost


def entry_of(peer: Peer) -> Any:
    peer.answers(200, *page(peer, ["folder/a"], None))
    (entry,) = peer.store.list()
    return entry


def test_a_delete_has_its_condition(peer: Peer) -> None:
    entry = entry_of(peer)
    done = 202 if peer.name == "azure" else 204
    peer.answers(done, {}, b"")
    peer.store.delete_read(entry)
    ((method, path, headers),) = peer.server.asked
    assert method == "DELETE"
    found = path if peer.name == "gcs" else headers["If-Match"]
    assert entry.stamp in found
    peer.answers(412, *peer.error("ConditionNotMet" if peer.name == "azure" else "PreconditionFailed"))
    assert peer.fails(lambda store: store.delete_read(entry)).errno in (errno.ESTALE, errno.EIO)
    peer.answers(404, *peer.error("NotThere"))
    peer.store.delete_read(entry)
    # The answer to the first was lost: what is not there any more was deleted.
    code = "ConditionNotMet" if peer.name == "azure" else "PreconditionFailed"
    peer.answers(404, *peer.error("NotThere"))
    peer.server.first = [(503, *peer.error()), (412, *peer.error(code))]
    peer.store.delete_read(entry)
    assert len(peer.server.asked) == 3
    there: tuple[int, dict[str, str], bytes] = (200, data_headers(peer, None), b"")
    if peer.name == "gcs":
        there = (200, {}, b'{"name": "a", "size": "1", "generation": "9", "updated": "2026-01-01T00:00:00Z"}')
    peer.answers(*there)
    peer.server.first = [(412, *peer.error(code))]
    assert peer.fails(lambda store: store.delete_read(entry)).errno == errno.ESTALE


def test_a_server_without_conditional_deletes(peer: Peer) -> None:
    if peer.name != "s3":
        pytest.skip("the others have always had them")
    entry = entry_of(peer)
    peer.answers(204, {}, b"")
    peer.server.first = [(501, *peer.error("NotImplemented"))]
    peer.store.delete_read(entry)
    assert [("If-Match" in headers) for _, _, headers in peer.server.asked] == [True, False]


def test_a_conflict_is_tried_again(peer: Peer) -> None:
    """S3: somebody else writes the object at this moment. The others say with 409 that something is wrong."""
    if peer.name != "s3":
        pytest.skip("S3's")
    peer.answers(200, {"ETag": '"x"'}, b"")
    peer.server.first = [(409, *peer.error("ConditionalRequestConflict"))] * 2
    peer.store.create_exclusive("a", b"x")
    assert [headers.get("If-None-Match") for *_, headers in peer.server.asked] == ["*"] * 3
    for code in ("RequestTimeout", "IncompleteBody"):
        peer.answers(200, {"ETag": '"x"'}, b"")
        peer.server.first = [(400, *peer.error(code))]
        peer.store.create_exclusive("a", b"x")
        assert peer.count() == 2


def test_another_region(peer: Peer) -> None:
    """S3 names the region of a bucket: botocore asks there. If that fails, too, the error says what to set."""
    if peer.name != "s3":
        pytest.skip("only S3 has them")
    region = {**XML, "x-amz-bucket-region": "eu-west-3"}
    body = b"<Error><Code>PermanentRedirect</Code><Endpoint>bucket.s3.example.com</Endpoint></Error>"
    peer.answers(200, *page(peer, ["folder/a"], None))
    peer.server.first = [(301, region, body)]
    assert [entry.path for entry in peer.store.list()] == ["a"]
    signed = [
        re.findall(r"Credential=k/\d+/([\w-]+)/", headers["Authorization"])[0] for *_, headers in peer.server.asked
    ]
    assert signed[-1] == "eu-west-3" != signed[0]
    peer.answers(301, region, body)
    said = str(peer.fails(listing))
    assert "the region eu-west-3" in said
    assert "region_name" in said


def test_no_redirect_is_followed(peer: Peer) -> None:
    other = Answers()
    try:
        for status in (301, 302, 303, 307, 308):
            peer.answers(status, {"Location": f"{other.url}/x"}, b"")
            for call in CALLS.values():
                assert "redirects to 127.0.0.1" in str(peer.fails(call))
            assert other.asked == []
    finally:
        other.shutdown()
        other.server_close()


def test_nobody_answers(peer: Peer) -> None:
    peer.server.shutdown()
    peer.server.server_close()
    for call in CALLS.values():
        peer.waits.clear()
        error = peer.fails(call)
        assert re.search(f"was not reached in {ATTEMPTS} attempts: .*[Cc]onnection refused", str(error))
        assert len(peer.waits) == ATTEMPTS - 1


# ---------------------------------------------------------------- names of the packages


def names_of(*modules: str) -> set[str]:
    import importlib

    return {name for module in modules for name in vars(importlib.import_module(module))}


def test_names_of_s3() -> None:
    pytest.importorskip("s3fs")
    import botocore.session
    from s3fs.errors import ERROR_CODE_TO_EXCEPTION

    from ags_fast.fs import s3

    model = botocore.session.Session().get_service_model("s3")
    known = {shape.name for shape in model.error_shapes} | set(ERROR_CODE_TO_EXCEPTION)
    known |= {"XAmzContentSHA256Mismatch"}  # docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
    assert {code for code in s3.CODES if isinstance(code, str)} - known == set()
    for request, fields in s3.NEEDED.items():
        (operation,) = [name for name in model.operation_names if name.lower() == request.replace("_", "")]
        assert set(fields) <= set(model.operation_model(operation).output_shape.members), request


def test_names_of_google() -> None:
    pytest.importorskip("gcsfs")
    from ags_fast.fs import gcs

    # No package lists the reasons: docs.cloud.google.com/storage/docs/json_api/v1/status-codes
    assert set(gcs.CODES) == {"rateLimitExceeded", "userRateLimitExceeded", "backendError"}


def test_names_of_azure() -> None:
    pytest.importorskip("adlfs")
    from azure.storage.blob import StorageErrorCode

    from ags_fast.fs import azure

    known = {code.value for code in StorageErrorCode}
    known |= {"InvalidBlockList", "InvalidBlobOrBlock"}
    assert set(azure.CODES) - known == set()


def test_names_of_exceptions() -> None:
    for package in PACKAGES.values():
        pytest.importorskip(package)
    known = names_of("botocore.exceptions", "aiohttp", "google.auth.exceptions", "azure.core.exceptions")
    assert (objects.LOST | objects.UNKNOWN) - known == set()


def test_kinds_have_one_table() -> None:
    assert set(STATUSES.values()) | {AGAIN, FOREIGN, MISSING, REFUSED} >= {
        meaning(status) for status in range(300, 600)
    }
