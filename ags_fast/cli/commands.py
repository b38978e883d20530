"""The commands and their help. The module of a command, and what it works with, is imported when the command runs."""

from __future__ import annotations

GROUPS = {
    "config": "profiles: what commands use unless options say otherwise",
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
    "maintain": "Do the upkeep of DATASET, such as every day: end dead jobs, replace worn KEKs, remove what the policy "
    "does not keep, and verify a share of the files.",
    "rm": "Commit a version of DATASET without some files. Expire older versions to erase the files.",
    "restore": "Commit a version of DATASET with the files of an older one. No file is written.",
    "compact": "Merge the tables of DATASET, so that a lookup reads one. Commits keep them few anyway.",
    "cat": "Decrypt one file of DATASET to standard output.",
    "mount": "Show the plaintext of DATASET at DIR by FUSE, read-only, until Ctrl-C or `fusermount -u DIR`.",
    "inspect": "Show versions, keys and open jobs of DATASET; without a KMS, unauthenticated.",
}
TAKE_COMMANDS = {
    "cp": "Copy files into a dataset, as one new version, or out of it. DATASET:PATH is a file of a dataset."
}
LOOK_COMMANDS = {
    "ls": "List the files of DATASET.",
    "log": "List the versions of DATASET, the newest first: when, what, by which job, and the pin to keep.",
    "pin": "Print the pin of DATASET, to keep where nobody who writes to the storage can write.",
    "diff": "Show which files of DATASET were added, removed, moved, changed or rekeyed between versions A and B.",
    "stat": "Show what DATASET knows of one file: lengths, time, keys and the version that added the file.",
    "du": "Sum up the bytes of DATASET by folder.",
}
SHELL_COMMANDS = {
    "completion": "Print the script with which bash, zsh or fish completes words of ags-fast.",
    "man": "Write manual pages of all commands into DIR, such as ~/.local/share/man/man1.",
}
TEXTS = GROUPS | DATASET_COMMANDS | TAKE_COMMANDS | LOOK_COMMANDS | SHELL_COMMANDS
MODULES = dict(zip(GROUPS, GROUPS, strict=True)) | {"completion": "completion", "man": "manual"}
MODULES |= dict.fromkeys(DATASET_COMMANDS, "dataset") | dict.fromkeys(TAKE_COMMANDS, "taking")
MODULES |= dict.fromkeys(LOOK_COMMANDS, "looking")
# Operations that print nothing with --quiet when all went well. The others are there to show something.
SILENT = {
    *("encrypt", "decrypt", "verify", "rekey", "reencrypt", "rotate", "expire", "restore", "sweep"),
    *("maintain", "rm", "compact"),
    *("init", "create", "enable", "disable", "destroy", "check", "cp", "man"),
}
