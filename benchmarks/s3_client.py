"""A folder's files to a bucket through AWS's S3 Encryption Client, or back: s3_client.py put|get FOLDER BUCKET.

tools.py runs this as a process of its own, with the client's packages: they are not those of ags_fast. The environment
has KEY_ARN, AWS's variables for the KMS, and S3_URL, S3_KEY and S3_SECRET for the server.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

THREADS = 2


def client() -> Any:
    import boto3
    from s3_encryption import S3EncryptionClient, S3EncryptionClientConfig  # type: ignore[import-not-found]
    from s3_encryption.materials.kms_keyring import KmsKeyring  # type: ignore[import-not-found]

    s3 = boto3.client(
        "s3",
        endpoint_url=os.environ["S3_URL"],
        aws_access_key_id=os.environ["S3_KEY"],
        aws_secret_access_key=os.environ["S3_SECRET"],
    )
    return S3EncryptionClient(s3, S3EncryptionClientConfig(KmsKeyring(boto3.client("kms"), os.environ["KEY_ARN"])))


def main(what: str, folder: Path, bucket: str) -> None:
    """Move all files. Raises the first error, after the others were tried."""
    encrypting = client()

    def put(path: Path) -> None:
        encrypting.put_object(Bucket=bucket, Key=path.name, Body=path.read_bytes())

    def get(path: Path) -> None:
        (folder / path.name).write_bytes(encrypting.get_object(Bucket=bucket, Key=path.name)["Body"].read())

    with ThreadPoolExecutor(THREADS) as pool:
        work, source = (put, folder) if what == "put" else (get, Path(bucket))  # which is a folder on this machine
        moved = [pool.submit(work, path) for path in source.iterdir() if path.is_file()]
    for one in moved:
        one.result()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
