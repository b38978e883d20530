"""moto's server, with a KMS as strict as AWS's: disabled keys refuse, and a rotation makes new key material.

usage: strict_moto.py PORT (0: any). Prints ``READY <url>`` when it listens, on loopback only. Moreover
``POST /_strict/fail?code=ThrottlingException&times=3`` makes the next 3 KMS requests fail, ``GET /_strict/calls`` lists
what the KMS was asked since the last time: operations and the names of their arguments, and ``GET /_strict/last`` says
of the last request what it was asked, without keys, and by whom.
"""

from __future__ import annotations

import hashlib
import json
import sys
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs

from moto.core.exceptions import JsonRESTError
from moto.kms import utils
from moto.kms.models import KmsBackend
from moto.kms.responses import KmsResponse
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class RefusedError(JsonRESTError):
    code = 400


_encrypt, _rotate = KmsBackend.encrypt, KmsBackend.rotate_key_on_demand
_re_encrypt, _deserialize = KmsResponse.re_encrypt, utils._deserialize_ciphertext_blob


def deserialized(ciphertext_blob: bytes) -> Any:
    """moto's blobs have no room for the ids of its multi-region keys. These have, and shorter ids are filled up."""
    found = _deserialize(ciphertext_blob)
    return found._replace(key_id=found.key_id.rstrip("\0"))


def usable(key: Any) -> Any:
    if key.key_state == "Disabled":
        raise RefusedError("DisabledException", f"{key.arn} is disabled.")
    if key.key_state in ("PendingDeletion", "PendingImport"):
        raise RefusedError("KMSInvalidStateException", f"{key.arn} is pending deletion.")
    return key


def encrypt(self: Any, key_id: str, plaintext: bytes, encryption_context: Any) -> Any:
    usable(self.keys[self.any_id_to_key_id(key_id)])
    return _encrypt(self, key_id, plaintext, encryption_context)


def decrypt(self: Any, ciphertext_blob: bytes, encryption_context: Any, key_id: str | None = None, **_: Any) -> Any:
    try:
        key = self.keys[utils._deserialize_ciphertext_blob(ciphertext_blob=ciphertext_blob).key_id]
    except Exception:
        raise RefusedError("InvalidCiphertextException", "") from None
    if key_id and self.any_id_to_key_id(key_id) != key.id:
        raise RefusedError(
            "IncorrectKeyException",
            "The key ID in the request does not identify a CMK that can perform this operation.",
        )
    usable(key)
    current = key.key_material
    try:
        for material in (current, *getattr(key, "_older", ())):  # what was wrapped before a rotation stays readable
            key.key_material = material
            try:
                plaintext, found = utils.decrypt(
                    master_keys=self.keys, ciphertext_blob=ciphertext_blob, encryption_context=encryption_context
                )
            except Exception:  # moto has several for a tag that is wrong
                continue
            return plaintext, self.keys[found].arn
    finally:
        key.key_material = current
    raise RefusedError("InvalidCiphertextException", "")


def rotate(self: Any, key_id: str) -> Any:
    key = usable(self.keys[self.any_id_to_key_id(key_id)])
    answer = _rotate(self, key_id)
    key.__dict__.setdefault("_older", []).insert(0, key.key_material)
    key.key_material = utils.generate_master_key()
    return answer


def re_encrypt(self: Any) -> Any:
    """moto does not look at SourceKeyId."""
    if source := self._get_param("SourceKeyId"):
        blob = self._get_param("CiphertextBlob")
        self.kms_backend.decrypt(blob, self._get_param("SourceEncryptionContext", {}), key_id=source)
    return _re_encrypt(self)


def material_id(material: bytes) -> str:
    return hashlib.sha256(material).hexdigest()


def tell(backend: Any, called: str, answer: dict[str, Any]) -> None:
    """The ids of key material, which AWS tells and moto does not know."""
    if called == "DescribeKey":
        told = answer["KeyMetadata"]
        told["CurrentKeyMaterialId"] = material_id(backend.keys[told["KeyId"]].key_material)
    elif called == "GenerateDataKey":
        answer["KeyMaterialId"] = material_id(backend.keys[backend.get_key_id(answer["KeyId"])].key_material)
    elif called == "ReEncrypt":
        key = backend.keys[backend.get_key_id(answer["KeyId"])]
        answer["DestinationKeyMaterialId"] = material_id(key.key_material)
    elif called == "ListKeyRotations":
        for one in answer["Rotations"]:
            key = backend.keys[one["KeyId"]]
            made = [*reversed(key.__dict__.get("_older", [])), key.key_material]
            one["KeyMaterialId"] = material_id(made[1 + answer["Rotations"].index(one)])


def telling(name: str, called: str) -> None:
    method = getattr(KmsResponse, name)

    def answered(self: Any) -> Any:
        answer = json.loads(method(self))
        tell(self.kms_backend, called, answer)
        return json.dumps(answer)

    setattr(KmsResponse, name, answered)


class Server:
    """The WSGI application: moto's, behind a door that counts and fails as told."""

    def __init__(self) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.calls: list[tuple[str, list[str]]] = []
        self.failures: list[str] = []
        self.last: dict[str, Any] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if path == "/_strict/fail":
            asked = parse_qs(environ["QUERY_STRING"])
            self.failures = asked["code"] * int(asked["times"][0])
            return self.answer(start_response, "200 OK", {})
        if path == "/_strict/last":
            return self.answer(start_response, "200 OK", self.last)
        if path == "/_strict/calls":
            calls, self.calls = self.calls, []
            return self.answer(start_response, "200 OK", calls)
        if target.startswith("TrentService."):
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = BytesIO(body)
            asked = json.loads(body)
            self.calls.append((target.partition(".")[2], sorted(asked)))
            self.last = {name: value for name, value in asked.items() if name not in ("Plaintext", "CiphertextBlob")}
            self.last["Authorization"] = environ.get("HTTP_AUTHORIZATION", "")
            if self.failures:
                return self.answer(
                    start_response, "400 Bad Request", {"__type": self.failures.pop(), "message": "told to"}
                )
        return self.moto(environ, start_response)

    @staticmethod
    def answer(start_response: Any, status: str, value: Any) -> list[bytes]:
        start_response(status, [("Content-Type", "application/x-amz-json-1.1")])
        return [json.dumps(value).encode()]


def main() -> None:
    KmsBackend.encrypt, KmsBackend.decrypt, KmsBackend.rotate_key_on_demand = encrypt, decrypt, rotate  # type: ignore[method-assign]
    KmsResponse.re_encrypt = re_encrypt  # type: ignore[method-assign]
    telling("describe_key", "DescribeKey")
    telling("generate_data_key", "GenerateDataKey")
    telling("re_encrypt", "ReEncrypt")
    telling("list_key_rotations", "ListKeyRotations")
    utils.KEY_ID_LEN = 40
    utils.CIPHERTEXT_HEADER_FORMAT = f">{utils.KEY_ID_LEN}s{utils.IV_LEN}s{utils.TAG_LEN}s"
    utils.HEADER_LEN = utils.KEY_ID_LEN + utils.IV_LEN + utils.TAG_LEN
    utils._deserialize_ciphertext_blob = deserialized
    WSGIRequestHandler.disable_nagle_algorithm = True  # a body need not wait until its head is acknowledged
    server = make_server("127.0.0.1", int(sys.argv[1]), Server(), threaded=True)
    print(f"READY http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
