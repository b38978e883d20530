"""The fsspec filesystem over open_plain. This module imports fsspec, `_view.filesystem` imports this module."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ags_fast.parquet._view import PlainView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from ags_fast.parquet._file import Keys, _Retriever

__all__ = ["PlainFileSystem", "Settings"]


class Settings:
    """What a filesystem was made with: one object, since fsspec shows, hashes and serialises arguments."""

    def __init__(
        self,
        keys: Keys | _Retriever | None,
        keys_for: Callable[[str], Keys | _Retriever] | None,
        fs: Any,
        target_protocol: str,
        target_options: Mapping[str, Any] | None,
        aad_prefix: bytes | Callable[[str], bytes | None] | None,
        plain: str,
        options: dict[str, Any],
    ) -> None:
        if (keys is None) == (keys_for is None):
            raise TypeError("either keys or keys_for is required")
        if plain not in ("refuse", "allow"):
            raise ValueError(f"plain is one of 'refuse', 'allow', not {plain!r}")
        self.fs = fs if fs is not None else fsspec.filesystem(target_protocol, **(target_options or {}))
        self._keys = keys
        self._keys_for = keys_for
        self._aad_prefix = aad_prefix
        self._options = {**options, "plain": plain == "allow"}

    def __reduce__(self) -> NoReturn:
        raise TypeError("a filesystem that holds keys is never pickled: make one where it is used")

    def open(self, path: str, source: Any) -> PlainView:
        keys = self._keys if self._keys_for is None else self._keys_for(path)
        prefix = self._aad_prefix(path) if callable(self._aad_prefix) else self._aad_prefix
        return PlainView(source, keys, aad_prefix=prefix, **self._options)  # type: ignore[arg-type]  # never both None


class PlainFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Encrypted Parquet files of another filesystem as plain ones; read-only. See `filesystem`."""

    protocol = "ags-parquet"
    cachable = False  # an instance for other keys must not be found under the same arguments
    root_marker = ""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.fs = settings.fs
        self._settings = settings
        # A class method elsewhere, but which paths there are is up to the target.
        self._strip_protocol = self._target_path
        self._sizes: dict[str, tuple[str, int]] = {}  # of views: the file's version, bytes

    def __reduce__(self) -> NoReturn:
        self._settings.__reduce__()

    def __repr__(self) -> str:
        return f"<ags_fast filesystem of plain views over {self.fs.protocol!r}>"

    def to_dict(self, *, include_password: bool = True) -> NoReturn:
        self._settings.__reduce__()

    def _target_path(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._target_path(one) for one in path]
        return self.fs._strip_protocol(os.fspath(path).removeprefix(f"{self.protocol}://"))

    @property
    def fsid(self) -> str:
        return f"{self.protocol}_{id(self._settings)}"

    # ---- what there is

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        found = self.fs.ls(self._strip_protocol(path), detail=True, **kwargs)
        return [_shown(entry) for entry in found] if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        entry = self.fs.info(path, **kwargs)
        if entry["type"] != "file":
            return _shown(entry)
        version = self.fs.ukey(path)
        known = self._sizes.get(path)
        if known is None or known[0] != version:
            with self.open(path) as file:
                known = self._sizes[path] = version, file.size
        return {**_shown(entry), "size": known[1]}

    def exists(self, path: str, **kwargs: Any) -> bool:
        return bool(self.fs.exists(self._strip_protocol(path), **kwargs))

    def isfile(self, path: str) -> bool:
        return bool(self.fs.isfile(self._strip_protocol(path)))

    def isdir(self, path: str) -> bool:
        return bool(self.fs.isdir(self._strip_protocol(path)))

    def ukey(self, path: str) -> Any:
        return self.fs.ukey(self._strip_protocol(path))

    def created(self, path: str) -> Any:
        return self.fs.created(self._strip_protocol(path))

    def modified(self, path: str) -> Any:
        return self.fs.modified(self._strip_protocol(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        self._sizes.clear()
        self.fs.invalidate_cache(path if path is None else self._strip_protocol(path))

    # ---- files

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> PlainFile:
        if mode != "rb":
            raise PermissionError(f"views of encrypted Parquet files are read-only: {mode!r}")
        return PlainFile(self, path, self._settings)


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry as it is listed: a file's size is not its view's, and to find that out takes its footer."""
    return {**entry, "size": None} if entry["type"] == "file" else dict(entry)


class PlainFile(AbstractBufferedFile):  # type: ignore[misc]
    """A view with the methods of fsspec's files. It is not buffered twice: the view keeps the pages that it opened."""

    def __init__(self, fs: PlainFileSystem, path: str, settings: Settings) -> None:
        local = isinstance(settings.fs, LocalFileSystem)
        self._source = path if local else settings.fs.open(path, "rb")
        try:
            self.view = settings.open(path, self._source)
        except BaseException:
            self._close_source()
            raise
        super().__init__(fs, path, "rb", cache_type="none", size=self.view.size)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a view holds keys and is never pickled: open it where it is read")

    def _close_source(self) -> None:
        if not isinstance(self._source, str):
            self._source.close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.view.read_at(start, end - start)

    def readinto(self, buffer: Any) -> int:
        """Fill a writable buffer; fewer bytes only at the end. After an error they are all zero."""
        done = self.view.readinto_at(self.loc, buffer)
        self.loc += done
        return done

    def close(self) -> None:
        view = getattr(self, "view", None)  # none if it could not be opened
        if view is not None and not view.closed:
            view.close()
            self._close_source()
        super().close()
