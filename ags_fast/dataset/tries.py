"""When a job that tries to make an entry waits, and when it gives up."""

from __future__ import annotations

import random
import time

from ags_fast import telemetry
from ags_fast.errors import AgsError, ConcurrentChangeError, IntegrityError, UnknownOutcomeError
from ags_fast.fs import without_password

UNANSWERED = 3  # creates without an answer, at one number, after which the outcome is unknown
RACES = 200  # that a job loses, one after the other, until it gives up: ten minutes of pauses
TAKEN = 35  # times that a name is taken that no listing shows: those of network disks may be a minute old
PAUSE_SECONDS = 0.05  # the mean wait after the first race that was lost; it doubles up to 64 times that


class Tries:
    """What a job has tried to commit, and what it knows of that.

    Attributes:
        number: The number of the last entry that it has tried to create; 0 as soon as the head shows another one there.
    """

    def __init__(self, url: str, job_id: str) -> None:
        self.number = 0
        self._url, self._job_id = url, job_id
        self._pause, self._lost, self._unanswered, self._taken = PAUSE_SECONDS, 0, 0, 0

    def saw(self, head: int) -> None:
        """Take note of the head's number, which does not have the job in `over`."""
        if self.number == 0:
            return
        if head < self.number:  # nobody has the number yet: the entry may still come
            if self._unanswered >= UNANSWERED:
                raise self._unknown()  # rule 4
            return
        note_conflict(self._url)
        self._lost += 1
        if self._lost >= RACES:
            raise ConcurrentChangeError(f"others change {self._url} all the time: try again later")
        self.number = self._unanswered = self._taken = 0
        self._wait()

    def no_answer(self, error: OSError) -> None:
        """Take note of a request that failed, or whose name is taken.

        Raises the error if nothing was tried, or if the error is no failure; IntegrityError if something has the name
        that no head shows, such as a pipe or a folder.
        """
        if isinstance(error, FileExistsError):  # by another job, or by this request, which was repeated on its way
            self._taken += 1
            if self._taken > TAKEN:
                raise IntegrityError(f"something that is no file has the name of version {self.number} of {self._url}")
            if self._taken > 1:
                self._wait()
            return
        if self.number == 0 or isinstance(error, AgsError):
            raise error
        self._unanswered += 1
        if self._unanswered > 2 * UNANSWERED:
            raise self._unknown() from error

    def _wait(self) -> None:
        time.sleep(self._pause * (0.5 + random.random()))
        self._pause = min(2 * self._pause, 64 * PAUSE_SECONDS)

    def _unknown(self) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"{self._url} does not answer: the job {self._job_id} may be committed, now or later"
        )


def note_conflict(url: str) -> None:
    """Tell the log of the program that a change or a read begins again, because another process was faster."""
    telemetry.info("dataset", "%s was changed meanwhile: tried again", without_password(url))
    telemetry.add("conflicts", 1)
