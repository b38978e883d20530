"""How far a job is: a bar on a terminal, lines in a log file. tqdm is imported when something is shown."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["LINE_SECONDS", "Hidden", "Lines", "make_bar"]

LINE_SECONDS = 30.0  # between two lines


class Hidden:
    """Shows nothing."""

    n = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, n: int = 1, files: int = 0) -> None:
        """Count nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines(Hidden):
    """A line on standard error every `seconds`, also while nothing is counted; none for a job that ends before.

    total: what `update` will have counted at the end, in `unit`; bytes are shown in kB, MB and so on.
    """

    def __init__(
        self, desc: str, total: int, files: int | None = None, unit: str = "B", seconds: float = LINE_SECONDS
    ) -> None:
        self.n = 0
        self._desc, self._total, self._unit = desc, total, unit
        self._files, self._files_done = files, 0
        self._begun = time.monotonic()
        self._seconds = seconds
        self._ended = threading.Event()
        threading.Thread(target=self._print, name="ags_fast-progress", daemon=True).start()

    def update(self, n: int = 1, files: int = 0) -> None:
        """Count `n` more, and `files` more."""
        self.n += n
        self._files_done += files

    def close(self) -> None:
        """Print no more lines."""
        self._ended.set()

    def text(self) -> str:
        """Return the line: files, bytes, rate and the time left, as far as they are known."""
        from tqdm import tqdm

        seconds = time.monotonic() - self._begun
        rate = self.n / seconds if seconds else 0.0
        parts = [f"{self._files_done:,} of {self._files:,} files"] if self._files is not None else []
        parts += [f"{self._sized(self.n)} of {self._sized(self._total)}", f"{self._sized(rate)}/s"]
        if rate and self._total > self.n:
            parts.append(f"{tqdm.format_interval((self._total - self.n) / rate)} left")
        return f"{self._desc}: {', '.join(parts)}"

    def _sized(self, number: float) -> str:
        if self._unit != "B":
            return f"{number:,.0f}{self._unit}"
        if number < 1_000:
            return f"{number:.0f} B"
        from tqdm import tqdm

        text = tqdm.format_sizeof(number, divisor=1_000)
        return f"{text[:-1]} {text[-1]}B"

    def _print(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                print(self.text(), file=sys.stderr, flush=True)
            except (OSError, ValueError):  # standard error was closed: the job goes on
                return


def _terminal_bar(all_files: int | None, **options: Any) -> tqdm:
    """Return a bar of tqdm, with files behind it, whose lock is for the threads of this process.

    tqdm's own lock is also for other processes. With Python 3.14 such a lock starts a helper of multiprocessing, which
    would import modules from the current directory: from the folder whose files a job encrypts.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        _lock = threading.RLock()
        done = 0

        def update(self, n: float | None = 1, files: int = 0) -> bool | None:
            self.done += files
            if all_files is not None:
                self.set_postfix_str(f"{self.done:,}/{all_files:,} files", refresh=False)
            shown: bool | None = super().update(n)
            return shown

    return Bar(**options)


def make_bar(
    desc: str, total: int, progress: object, *, files: int | None = None, unit: str = "B"
) -> tqdm | Lines | Hidden:
    """Return what shows a job's progress, as the argument `progress` of the functions of jobs says.

    True: a bar. None: a bar on a terminal, else nothing. "lines": a bar on a terminal, else `Lines`. False and
    callables: nothing. Bytes are counted in kB, MB and so on.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is True or (progress in (None, "lines") and is_terminal):
        return _terminal_bar(files, total=total, unit=unit, unit_scale=True, desc=desc)
    return Lines(desc, total, files, unit) if progress == "lines" else Hidden()
