"""Names of files: what a URL means on this machine, what a path in a store may be, names of files in the making."""

from __future__ import annotations

import os
import sys

from ags_fast.errors import PolicyError

__all__ = ["SUFFIX", "absolute_path", "check_path", "check_tag", "folder_of", "in_store", "local_path", "on_disk"]
__all__ += ["split_chain", "temporary_name", "temporary_tag"]

CACHES = ("simplecache", "filecache", "blockcache", "cached")  # of fsspec: they have the paths of what they keep
CHAINED = (*CACHES, "zip", "tar", "dir", "libarchive", "reference")  # what may stand before "::"
UTF8 = sys.getfilesystemencoding() == "utf-8"
SUFFIX = ".agstmp"  # of every temporary name: .<name>.<tag>.<16 hex digits>.agstmp


def absolute_path(url: str) -> str | None:
    """Return the absolute path that a path or a URL means, or None if the URL is not of this machine."""
    scheme, _, rest = url.partition(":")
    if scheme in ("file", "local") and rest.startswith("/"):
        if rest.startswith("//"):
            host, slash, rest = rest[2:].partition("/")
            if host not in ("", "localhost"):
                raise ValueError(f"{url!r} names the host {host!r}: a path has three slashes, as in file:///folder")
            rest = slash + rest
        return os.path.abspath(rest)
    chained = rest.startswith(":") and ("://" in rest or scheme in CHAINED)  # else the name of a file has two colons
    if scheme[:1].isalpha() and scheme.replace("+", "").isalnum() and (rest.startswith("//") or chained):
        return None
    return os.path.abspath(url)


def local_path(url: str | os.PathLike[str]) -> str | None:
    """Return the path that a URL means, a path as it is given, and None for a URL that is not of this machine."""
    text = os.fsdecode(url)
    path = absolute_path(text)
    return text if path == os.path.abspath(text) else path


def folder_of(path: str) -> str | None:
    """Return the folder, or the URL of the folder, that a file is in; None if no file can have this path."""
    folder, slash, name = path.rpartition("/")
    if not name or folder.endswith(":/"):  # "s3://bucket"
        return None
    if not folder or folder.endswith("://"):
        folder += slash  # a root is nothing but this slash
    return folder or "."


def split_chain(url: str) -> tuple[str, str]:
    """Split a URL behind the path in it. A chained URL of fsspec has the path in its first part that is no cache."""
    if absolute_path(url) is not None:
        return url, ""
    first, colons, rest = url.partition("::")
    if colons and first.removesuffix("://") in CACHES:
        path, below = split_chain(rest)
        return first + colons + path, below
    return f"{first}://" if colons and first.isalnum() else first, colons + rest


def on_disk(path: str) -> str:
    """Return a path of a store as `os` takes it. The names of a store are UTF-8, also where the locale is another."""
    return path if UTF8 else os.fsdecode(path.encode("utf-8", "surrogateescape"))


def in_store(path: str) -> str:
    """Return a path that `os` gave as a path of a store."""
    return path if UTF8 else os.fsencode(path).decode("utf-8", "surrogateescape")


def check_path(path: str) -> str:
    """Return the path of a file in a store. PolicyError if it may lead out of the store."""
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise PolicyError(f"{path!r} is not a plain relative path of a file: it may lead out of the folder")
    return path


def check_tag(tag: str) -> str:
    """Return the tag of a temporary name. ValueError if it has other characters than a tag may have."""
    if tag and not (len(tag) <= 64 and tag.isascii() and tag.replace("-", "").replace("_", "").isalnum()):
        raise ValueError(f"a tag has 1 to 64 letters, digits, - and _, unlike {tag!r}")
    return tag


def temporary_name(name: str, tag: str) -> str:
    """Return a new temporary name for the file `name`."""
    shown = name[: 100 if name.isascii() else 25]  # a name has up to 255 bytes, and a character up to four
    return f".{shown}.{tag}.{os.urandom(8).hex()}{SUFFIX}"


def temporary_tag(name: str) -> str | None:
    """Return the tag in a temporary name, or None if this is not a temporary name."""
    if not (name.endswith(SUFFIX) and name.startswith(".")):
        return None
    rest, _, random = name[1 : -len(SUFFIX)].rpartition(".")
    return rest.rpartition(".")[2] if len(random) == 16 and set(random) <= set("0123456789abcdef") else None
