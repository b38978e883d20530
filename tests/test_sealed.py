"""Sealed documents: what is in them, what they are bound to, and what is done with those that somebody has changed."""

from __future__ import annotations

import base64
import json
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kms_clients import keystore
from support import flip

pytest.importorskip("msgspec")

import msgspec

from ags_fast.dataset import sealed
from ags_fast.dataset.sealed import HEADER_NBYTES, Document, seal
from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError
from ags_fast.keys import Envelope, KeyEntry, clear_cache, load_kms, new_kek
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from pathlib import Path

PATH = "_ags/x"
CANARY = b"canary-key-16-by"


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the documents hold."""

    number: int
    text: str
    more: list[list[int]] = []


BODY = Body(1, 'ключ \u2028 "quoted" \\ \x01')


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    clear_cache()
    return keystore(tmp_path, "m", "n")


def sealed_by(kms: Any, kek: KeyEntry, body: Any = BODY, path: str = PATH) -> bytes:
    return seal(Envelope(kms, {kek.key_id: kek}), kek, "dataset", path, body)


def opened(kms: Any, data: bytes, path: str = PATH, sealer: KeyEntry | None = None) -> Body:
    return Document.parse(data, path).opened(load_kms(kms), Body, sealer)


def test_documents(kms: dict[str, str]) -> None:
    kek = new_kek(kms, "m")
    data = sealed_by(kms, kek)
    assert opened(kms, data) == opened(kms, data, PATH, kek) == BODY
    with pytest.raises(IntegrityError, match="moved here, or is another dataset's"):
        opened(kms, data, "_ags/y")
    with pytest.raises(IntegrityError):
        opened(kms, data, PATH, new_kek(kms, "m"))
    with pytest.raises(KeyAccessError):
        opened({**kms, "encryption.allowed-key-ids": "n"}, data)
    large = Body(1, "n" * (10 << 20))
    assert opened(kms, sealed_by(kms, kek, large)) == large


def test_documents_of_another_reader(kms: dict[str, str]) -> None:
    """What docs say of the format is enough to check one."""
    kek = new_kek(kms, "m")
    line, text = sealed_by(kms, kek).split(b"\n", 1)
    header = json.loads(line)
    assert (header["ags"], header["dataset_id"], header["sealer"]["key_id"]) == (3, "dataset", kek.key_id)
    wrapped, nonce, tag, kek_wrap = (
        base64.b64decode(text)
        for text in (header["wrapped"], header["nonce"], header["tag"], header["sealer"]["wrapped"])
    )
    key = AESGCM(load_kms(kms).unwrap_key(kek_wrap, header["sealer"]["wrapping_key_id"]))
    fresh = key.decrypt(wrapped[:12], wrapped[12:], b"ags_fast\0document\0dataset\0_ags/x")
    assert AESGCM(fresh).decrypt(nonce, tag, text) == b""
    assert json.loads(text) == {"number": 1, "text": BODY.text, "more": []}


def test_every_bit_of_a_document(kms: dict[str, str]) -> None:
    """But what the header says of the sealer beside its wrap: the log compares that with the body."""
    data = sealed_by(kms, new_kek(kms, "m"))
    whole, accepted = Document.parse(data, PATH).header, 0
    for changed in [flip(data, bit) for bit in range(8 * len(data))] + [data[:n] for n in range(len(data))]:
        try:
            assert opened(kms, changed) == BODY
        except (FormatError, IntegrityError, KeyAccessError):
            continue
        header, accepted = Document.parse(changed, PATH).header, accepted + 1
        assert msgspec.structs.replace(header, sealer=whole.sealer) == whole
        assert (header.sealer.wrapped, header.sealer.wrapping_key_id) == (whole.sealer.wrapped, "m")
    assert accepted < 1000


def test_odd_documents(kms: dict[str, str]) -> None:
    kek = new_kek(kms, "m")
    data = sealed_by(kms, kek)
    line, text = data.split(b"\n", 1)
    header = json.loads(line)

    def written(**changes: Any) -> bytes:
        changed = {name: value for name, value in (header | changes).items() if value is not ...}
        return json.dumps(changed, separators=(",", ":")).encode() + b"\n" + text

    assert written() == data
    odd = [
        b"",
        b"null",
        b"5",
        b"\n",
        b"[" * 100_000,
        b"[" * 200_000 + b"\n" + text,
        b"\xff\xfe" + data.decode().encode("utf-16-le"),
        b" " + data,
        b"\n" + data,
        json.dumps(header).encode() + b"\n" + text,
        data.replace(b'"ags":3', b'"ags":3,"ags":3'),
        data.replace(b"\n", b"\r\n", 1),
        written(ags=1),
        written(ags=4),
        written(ags=True),
        written(ags=3.0),
        written(more=1),
        written(dataset_id=5),
        written(sealer=...),
        written(sealer=None),
        written(sealer={**header["sealer"], "key_id": ""}),
        written(sealer={**header["sealer"], "state": "unknown"}),
        written(sealer={**header["sealer"], "uses": -1}),
        written(nonce="AAAA"),
        written(tag=header["tag"][:-4]),
        written(dataset_id="d" * HEADER_NBYTES),
        json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode() + b"\n" + text,
    ]
    for changed in odd:
        with pytest.raises(FormatError, match=PATH):
            opened(kms, changed)
    other_line, other_text = sealed_by(kms, kek, Body(2, "other")).split(b"\n", 1)
    other = json.loads(other_line)
    lies = [
        data + b"\n",
        data[:-1],
        line + b"\n",
        line + b"\n\n" + text,
        line + b"\n" + other_text,
        other_line + b"\n" + text,
        written(dataset_id="another"),
        *(written(**{name: other[name]}) for name in ("wrapped", "nonce", "tag")),
        sealed_by(kms, kek, BODY, "_ags/y"),
    ]
    for changed in lies:
        with pytest.raises(IntegrityError, match=PATH):
            opened(kms, changed)


def test_bodies_of_who_has_the_key(kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has the KEK could put in: a body that is none of ours, under a tag that is right."""
    kek, encode = new_kek(kms, "m"), msgspec.json.encode
    for body in (
        b"[" * 100_000,
        b"[]",
        b"5",
        b'{"number":1}',
        b'{"number":1,"text":"x","unknown":1}',
        b'{"number":NaN,"text":"x"}',
        b'{"number":1e999,"text":"x"}',
        b'{"number":' + b"9" * 10_000 + b',"text":"x"}',
        b'{"number":"1","text":"x"}',
        b'{"number":1,"text":"\xff"}',
        b'{"number":1,"text":"x","more":' + b"[" * 100_000,
    ):
        with monkeypatch.context() as patch:
            patch.setattr("msgspec.json.encode", lambda value, body=body: body if value is BODY else encode(value))
            data = sealed_by(kms, kek)
        with pytest.raises(FormatError, match=f"{PATH} is malformed"):
            opened(kms, data)


def test_nothing_is_parsed_before_its_tag(kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = sealed_by(kms, new_kek(kms, "m"))
    document = Document.parse(data[:-1] + b" }", PATH)
    monkeypatch.setattr(sealed, "decoded", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(IntegrityError):
        document.opened(load_kms(kms), Body)


def test_the_sealer_that_a_document_claims(kms: dict[str, str]) -> None:
    """Of the first line only the wrapped KEK is believed: who asks the KMS for it has the KEK that has sealed."""
    kek = new_kek(kms, "m")
    data = sealed_by(kms, kek)
    line, text = data.split(b"\n", 1)
    header = json.loads(line)
    for change in ({"wrapping_key_id": "n"}, {"wrapped": base64.b64encode(new_kek(kms, "m").wrapped or b"").decode()}):
        lie = {**header, "sealer": header["sealer"] | change}
        with pytest.raises((IntegrityError, KeyAccessError)):
            opened(kms, json.dumps(lie, separators=(",", ":")).encode() + b"\n" + text)


def test_keys_never_show(kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ags_fast.dataset.sealed.secrets.token_bytes", lambda size: (CANARY * 2)[:size])
    monkeypatch.setattr(local.secrets, "token_bytes", lambda size: (CANARY * 2)[:size])  # type: ignore[attr-defined]
    local.create_key(kms, "canary")
    data = sealed_by(kms, new_kek(kms, "canary"))
    document = Document.parse(data, PATH)
    texts = [repr(document), data.decode()]
    for path, changed in (("_ags/y", data), (PATH, data[:-1]), (PATH, flip(data, 8 * len(data) - 1))):
        with pytest.raises(AgsError) as caught:
            opened(kms, changed, path)
        texts += [*traceback.format_exception(caught.value), repr(vars(caught.value))]
    everything = "\n".join(texts).encode()
    for form in (CANARY, CANARY.hex().encode(), base64.b64encode(CANARY).rstrip(b"=")):
        assert form not in everything
