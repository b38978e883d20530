"""What a job wants of the next entry, and what a log knows of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ags_fast.dataset.names import new_job_id
from ags_fast.errors import UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Collection

    from ags_fast.dataset.entry import Batch, MasterVersion
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.tables import Table
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import KmsClient


class Sign(NamedTuple):
    """What a listing tells of a plan.

    Attributes:
        alive: When its job last showed life, in seconds since the epoch.
        of: The job whose further plan it is; None: the plan is the job's own.
        waits: Whether its job waits for another process to go on.
    """

    alive: float
    of: str | None = None
    waits: bool = False


Plans = Mapping[str, Sign]  # by the ids of plans


class Draft(NamedTuple):
    """What the next entry changes. A field that is None stays as in the head.

    Attributes:
        operation: What the job does.
        files: The tables of the snapshot.
        keys: The KEKs.
        gone: The versions of master keys that nobody may wrap under.
        uses: How often KEKs were used by jobs that this entry puts in `over`: added to the KEKs that are there.
        first: The first entry that is kept.
        policy: The policy.
        streams: The last batches of streams.
        sets: The numbered sets that are whole.
        ends: The jobs that the entry ends.
        returns: Whether files of an older version come back.
        kms: The KMS that wraps the KEKs of `keys`; None: that of the log.
    """

    operation: str
    files: tuple[Table, ...] | None = None
    keys: Mapping[str, KeyEntry] | None = None
    gone: tuple[MasterVersion, ...] | None = None
    uses: Mapping[str, int] = {}
    first: int | None = None
    policy: Policy | None = None
    streams: tuple[Batch, ...] | None = None
    sets: Mapping[str, int] | None = None
    ends: Collection[str] = ()
    returns: bool = False
    kms: KmsClient | None = None


class Work(Protocol):
    """A job, as the log sees it.

    Attributes:
        made: The objects that it has made beside its plans. The log adds what it makes for it.
    """

    made: list[str]

    @property
    def id(self) -> str:
        """The id, which is in the name of each object that the job makes."""

    @property
    def plans(self) -> Collection[str]:
        """The ids of its plan and its further plans, which must be there when it commits; none for an idle job."""


class Idle:
    """A job that writes no object but its entry, and whose wish may be done twice: it needs no plan."""

    plans: Collection[str] = ()

    def __init__(self) -> None:
        self.id = new_job_id()
        self.made: list[str] = []


class Again(Exception):  # noqa: N818 # no error: what was decided is out of date
    """Read the head again, and decide anew."""


class LeftKeyError(UnknownKeyError, FileNotFoundError):
    """The KEK has left the dataset, and its row has left the key store: no kept version needs it."""
