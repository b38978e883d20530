"""Children that are forked, and killed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def fork(work: Callable[[], object]) -> int:
    """The number of a child that does the work and ends, with 1 if that raises."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    """Wait for a child. Returns its exit code, or minus the signal that has killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
