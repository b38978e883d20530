"""A bar of tqdm. To import tqdm takes 25 ms, so import this where a bar is shown."""

from __future__ import annotations

import threading

from tqdm import tqdm

__all__ = ["TerminalBar"]


class TerminalBar(tqdm):  # type: ignore[misc]
    """A bar of tqdm whose lock is for the threads of this process.

    tqdm's own lock is also for other processes. With Python 3.14 such a lock starts a helper of multiprocessing, which
    would import modules from the current directory: from the folder whose files a job encrypts.
    """

    _lock = threading.RLock()

    def update(self, n: float | None = 1, files: int = 0) -> bool | None:
        """Count `n` more. A bar has no place for files."""
        shown: bool | None = super().update(n)
        return shown
