"""The commands and their help. The module of a command, and what it works with, is imported when the command runs."""

from __future__ import annotations

PROGRAM, ABOUT = "ags-fast", "Client-side encryption of lakehouse files."
TASKS = {
    "Begin": {
        "config": "Write, show and check profiles: what commands use unless options say otherwise.",
        "help": "Show the help of a command, such as `ags-fast help keys rotate`.",
    },
    "Files of a dataset": {
        "encrypt": "Encrypt the files under SRC into DATASET, as a new version. Skipped and reported are hidden files "
        "(names with a leading . or _, checksums x.crc), links that lead out of SRC, pipes, sockets, devices and empty "
        "folders. Names, content, permission bits and times are kept; owners, ACLs, extended attributes, hard links "
        "and holes are not. Files that are gone from SRC stay in DATASET, unless --delete is given.",
        "decrypt": "Decrypt DATASET into the folder DST. Files get the permission bits and times of their sources.",
        "verify": "Check every tag of every file of DATASET, or of a share of them, and that no file is missing.",
        "ls": "List the files of DATASET.",
        "cat": "Decrypt one file of DATASET to standard output. If the command exits with 3, discard the output.",
        "cp": "Copy files into a dataset, as one new version, or out of it. DATASET:PATH is a file of a dataset, and - "
        "is standard input or output: if the command exits with 3, discard that output.",
        "rm": "Commit a version of DATASET without some files. Expire older versions to erase the files.",
        "stat": "Show what DATASET knows of one file: lengths, time, keys and the version that added the file.",
        "du": "Sum up the bytes of DATASET by folder.",
        "mount": "Show the plaintext of DATASET at DIR by FUSE, read-only, until Ctrl-C or `fusermount -u DIR`.",
    },
    "Versions of a dataset": {
        "log": "List the versions of DATASET, the newest first: when, what, by which job, and the pin to keep.",
        "diff": "Show which files of DATASET were added, removed, moved, changed or rekeyed between versions A and B.",
        "pin": "Print the pin of DATASET, to keep where nobody who writes to the storage can write.",
        "restore": "Commit a version of DATASET with the files of an older one. No file is written.",
        "expire": "Remove old versions of DATASET, and the keys and files that only they need. This cannot be undone.",
    },
    "Keys and upkeep": {
        "keys": "Keys of datasets, and master keys in a local keystore.",
        "rekey": "Encrypt the files of DATASET again, under new data keys.",
        "maintain": "Do the upkeep of DATASET, such as every day: end dead jobs, replace worn KEKs, remove what the "
        "policy does not keep, and verify a share of the files.",
        "sweep": "Remove what dead jobs left in DATASET; with a KMS also their plans and files.",
        "compact": "Merge the tables of DATASET, so that a lookup reads one. Commits keep them few anyway.",
        "inspect": "Show what the log of DATASET says, without a KMS: none of it is authenticated.",
    },
    "Single files and tables": {
        "stream": "One AES GCM Stream (AGS1) file.",
        "parquet": "Parquet files and their own encryption.",
        "iceberg": "Encrypted Iceberg tables.",
    },
    "Shell": {
        "completion": "Print the script with which bash, zsh or fish completes words of ags-fast.",
    },
}
TEXTS = {name: text for task in TASKS.values() for name, text in task.items()}
ALONE = ("expire",)  # not an operation of the group whose module has it
GROUPS = ("config", "keys", "stream", "parquet", "iceberg")
MODULES = {name: name for name in GROUPS} | {"completion": "completion", "cp": "taking"}
MODULES |= dict.fromkeys(("ls", "log", "pin", "diff", "stat", "du"), "looking")
MODULES |= dict.fromkeys(ALONE, "keys")
MODULES |= dict.fromkeys(TEXTS.keys() - MODULES.keys() - {"help"}, "dataset")
# Operations that print nothing with --quiet when all went well. The others are there to show something.
SILENT = {
    *("encrypt", "decrypt", "verify", "rekey", "reencrypt", "rotate", "expire", "restore", "sweep"),
    *("maintain", "rm", "compact"),
    *("init", "create", "enable", "disable", "destroy", "check", "cp", "keygen"),
}
