"""The engine of one machine: in which of its processes and threads a job is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast._threads import thread_count
from ags_fast.engines.base import FILES_AT_ONCE, bins
from ags_fast.engines.together import opening_cost, run_files, with_files_at_once, with_threads
from ags_fast.fs import Store
from ags_fast.keys.kms import Kms, KmsClient, as_kms, check_travels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.dataset.access import Folder
    from ags_fast.dataset.rows import Row
    from ags_fast.engines.base import AnyTask, Engine, JobContext


TARGET_BYTES = 64 << 20  # work in one message to a worker: a small part of a second
STARTS_NONE_BYTES = 20 * TARGET_BYTES  # a job of less work is done before worker processes would gain on threads


def client_for(engine: Engine, kms: Kms | None, *folders: Folder) -> KmsClient:
    """Return the KMS client of a job on these folders. TypeError if workers need its properties and it has none."""
    client = as_kms(kms)
    stores = [folder if isinstance(folder, Store) else Store(folder) for folder in folders]
    if not (isinstance(engine, LocalEngine) and engine.runs_here(*stores)):
        check_travels(client)
    return client


class LocalEngine:
    """Runs jobs on this machine: in processes or, where these would not pay, in threads of this process.

    A file may crash what works on it: then only a process of the engine dies, and the file is a failed row. Threads of
    this process work only on AGS1 streams, of which nothing but ags_fast's own C takes in the bytes, and only with KMS
    clients of ags_fast.

    A program that embeds Python sets the interpreter of these processes by `multiprocessing.set_executable`.

    Args:
        processes: The number of processes. None: as many as there are usable CPUs, or none for a job that is done
            sooner than they start. 0 does everything in the calling process: a file that crashes takes that process
            along.
        files_at_once: How many files a process has in work at once, where they wait for an object store, for a disk
            (`fsync`), or for a KMS (single wrap). They have at most 64 MiB together; a larger file is in work alone.

    Raises:
        ValueError: `processes` is negative, or `files_at_once` is less than 1.
    """

    def __init__(self, processes: int | None = None, *, files_at_once: int = FILES_AT_ONCE) -> None:
        if processes is not None and processes < 0:
            raise ValueError(f"processes must not be negative, not {processes}")
        if files_at_once < 1:
            raise ValueError(f"files_at_once must be at least 1, not {files_at_once}")
        self._processes = processes
        self._files_at_once = files_at_once

    def runs_here(self, *stores: Store | None) -> bool:
        """Return whether jobs on these stores run in this process. They must if only this process sees a store."""
        return self._processes == 0 or any(store is not None and not store.shared for store in stores)

    def run(
        self, context: JobContext, tasks: Sequence[AnyTask], open_cost: int, report: Callable[[list[Row]], None]
    ) -> None:
        """Run every task: see `Engine`. An exception of `report`, and Ctrl-C, end the workers.

        Raises:
            ChildProcessError: No worker starts.
        """
        context = with_files_at_once(context, self._files_at_once)
        cpus = thread_count(None)
        work = sum(task.nbytes + open_cost for task in tasks)
        starts_none = self._processes is None and work <= STARTS_NONE_BYTES and context.is_harmless(tasks)
        if starts_none or self.runs_here(*context.stores):
            for row in run_files(with_threads(context, tasks, cpus, self._files_at_once), tasks):
                report([row])
            return
        from ags_fast.engines.processes import run_in_processes  # most jobs need none

        processes = self._processes or cpus
        parts = bins(tasks, target_bytes=TARGET_BYTES, open_cost=opening_cost(context, open_cost), least=2 * processes)
        run_in_processes(context, parts, processes, cpus, report)
