"""fsspec's protocol "ags": an encrypted dataset as a file system. To import this package imports fsspec."""

from ags_fast._extras import explaining

with explaining("ags_fast.filesystem"):
    from ags_fast.filesystem.system import AgsFileSystem

__all__ = ["AgsFileSystem"]
