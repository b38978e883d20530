"""Encrypt bytes, upload them to S3 with boto3, and decrypt what comes back. The data key is wrapped by a KMS.

python examples/boto3_upload.py BUCKET   (boto3 finds the credentials; AWS_ENDPOINT_URL names another server)
"""

from __future__ import annotations

import os
import sys
import tempfile
from base64 import b64decode, b64encode
from pathlib import Path

import boto3
from example_kms import MASTER_KEY, local_kms

from ags_fast import AgsCodec
from ags_fast.keys import StandardKeyMetadata, load_kms


def main() -> None:
    """Upload one object, and download it."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    bucket, name = sys.argv[1], "reports/2026.csv"
    s3 = boto3.client("s3")
    with tempfile.TemporaryDirectory() as folder, load_kms(local_kms(Path(folder))) as kms:
        # The name as AAD prefix: the object passes under this name only.
        codec = AgsCodec(key := os.urandom(16), aad_prefix=name.encode())
        sealed = codec.encrypt(b"id,name\n1,Ada\n")
        # Wrapped with the key: the length, so that an object that was cut off does not pass.
        metadata = StandardKeyMetadata(key, name.encode(), len(sealed))
        wrapped = b64encode(kms.wrap_key(metadata.encode(), MASTER_KEY)).decode()
        s3.put_object(Bucket=bucket, Key=name, Body=sealed, Metadata={"wrapped-key": wrapped})

        answer = s3.get_object(Bucket=bucket, Key=name)
        opened = StandardKeyMetadata.decode(kms.unwrap_key(b64decode(answer["Metadata"]["wrapped-key"]), MASTER_KEY))
        codec = AgsCodec(opened.encryption_key, aad_prefix=opened.aad_prefix)
        print(codec.decrypt(answer["Body"].read(), length=opened.file_length).decode(), end="")


if __name__ == "__main__":
    main()
