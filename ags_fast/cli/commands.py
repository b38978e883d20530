"""The commands and their help. The module of a command, and what it works with, is imported when the command runs."""

from __future__ import annotations

GROUPS = {
    "stream": "one AES GCM Stream (AGS1) file",
    "keys": "keys of datasets, and master keys in a local keystore",
    "iceberg": "encrypted Iceberg tables",
    "parquet": "Parquet files and their own encryption",
}
DATASET_COMMANDS = {
    "encrypt": "Encrypt the files under SRC into DATASET, a folder or a URL. These are skipped and reported: hidden "
    "files (names with a leading . or _, checksums x.crc), links that lead out of SRC, pipes, sockets, devices, and "
    "empty folders. Names, content, permission bits and times are kept; owners, ACLs, extended attributes, hard "
    "links and holes are not.",
    "decrypt": "Decrypt DATASET into the folder DST. Files get the permission bits and times of their sources.",
    "verify": "Check every tag of every file of DATASET, and that no file is missing.",
    "rekey": "Encrypt the files of DATASET again, under new data keys.",
    "sweep": "Remove what dead jobs left in DATASET; with a KMS also their plans and files.",
    "rm": "Commit a version of DATASET without some files. Expire older versions to erase the files.",
    "compact": "Merge the manifests of DATASET, so that a lookup reads one. Commits keep them few anyway.",
    "ls": "List the files of DATASET.",
    "cat": "Decrypt one file of DATASET to standard output.",
    "mount": "Show the plaintext of DATASET at DIR by FUSE, read-only, until Ctrl-C or `fusermount -u DIR`.",
    "inspect": "Show versions, keys and open jobs of DATASET; without a KMS, unauthenticated.",
}
