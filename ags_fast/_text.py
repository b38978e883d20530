"""Text on its way to a file that exists when it is complete, and text from strangers on its way to people."""

from __future__ import annotations

import io

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["TextWriter", "printable"]


def printable(text: str) -> str:
    r"""Return `text` in one printable line: file names and messages may contain anything.

    Control characters, line ends, marks that change the direction of text, and bytes that are not UTF-8 (surrogates in
    Python) become escapes such as ``\x1b``. A backslash is not escaped: only JSON is exact.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    number = ord(char)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a name
        return f"\\x{number - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


class TextWriter(io.TextIOWrapper):
    """Text that is written to `buffer`, a file at its beginning, and closed with it.

    The file is discarded if an exception leaves a ``with`` block, or if nothing closes the text.
    """

    buffer: Any  # an AgsWriter, or a file of a file system

    def __init__(self, file: Any, discard: Callable[[], object], **options: Any) -> None:
        self._discard = discard
        file.seekable = lambda: True  # else TextIOWrapper leaves out the mark of the byte order
        try:
            super().__init__(file, **options)
        finally:
            del file.seekable

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is None:
            self.close()
        else:
            self._discard()

    def __del__(self) -> None:
        """Do not close the file, because that would complete it. Its own ``__del__`` discards it."""

    def close(self) -> None:
        """Write what is left, and complete the file. May be called again."""
        try:
            if not self.closed:
                self.flush()
        except BaseException:
            self._discard()
            raise
        super().close()
