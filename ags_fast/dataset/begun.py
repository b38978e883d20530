"""A transaction that has begun: its plan and its tickets, made here or taken up from another process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, check_block_size
from ags_fast.dataset.at import At
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.files.contents import Contents
from ags_fast.dataset.files.writing import Ticket
from ags_fast.dataset.key_material import KEYTOOLS, check_key_material
from ags_fast.dataset.names import ATTEMPT, JOB_ID, LEFT, PLANS
from ags_fast.dataset.open_jobs import is_dead
from ags_fast.dataset.plan import WRITE, Plan
from ags_fast.dataset.planning import begin_plan, column_masters, reserve_keys, wrapped_under
from ags_fast.dataset.policy import Policy
from ags_fast.errors import ConcurrentChangeError
from ags_fast.fs.numbered import numbered

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version


@dataclass(frozen=True)
class Settings:
    """How a transaction writes files: the arguments of `Dataset.transaction`."""

    wrapping_key_id: str | None = None
    double_wrap: bool = True
    dek_length: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE
    column_keys: Mapping[str, str] | None = None
    fsync: bool = True
    threads: int | None = None
    key_material: str | None = None

    def __post_init__(self) -> None:
        if self.dek_length not in (16, 24, 32):
            raise ValueError(f"dek_length must be 16, 24 or 32 bytes, not {self.dek_length}")
        check_block_size(self.block_size)
        check_key_material(self.key_material, self.dek_length)


@dataclass
class Begun:
    """A transaction that runs. Make one with `begin` or `take_up`.

    Attributes:
        ledger: The dataset.
        job_id: The transaction's id.
        settings: How files are written.
        base: The version that the transaction began on; None: there was none.
        expired: The number of that version if it was expired meanwhile; `base` is then the newest version.
        plan: The plan, locked.
    """

    ledger: Ledger
    job_id: str
    settings: Settings
    base: Version | None
    expired: int | None = None
    plan: Plan = field(init=False, repr=False)
    _ticket: Ticket | None = None
    _tickets: dict[str, Ticket] = field(default_factory=dict, repr=False)  # for other settings

    @classmethod
    def begin(cls, ledger: Ledger, job_id: str, base: Version | None, settings: Settings, held: ExitStack) -> Begun:
        """Reserve keys, and make the plan durable.

        Args:
            ledger: The dataset.
            job_id: A new id.
            base: The newest version that the caller knows.
            settings: How files are written.
            held: Releases the plan when it is closed.
        """
        begun = cls(ledger, job_id, settings, base)
        ledger.store.check_writable()
        template = begun._reserve(settings)
        number = base.number if base else 0
        facts = {"operation": WRITE, "base": number, "wraps": sorted(template.key_ids()), "settings": asdict(settings)}
        begun.plan, _ = begin_plan(ledger, held, job_id, [], settings.dek_length, **facts)
        begun._ticket = begun._new_ticket(template, settings)
        return begun

    @classmethod
    def take_up(cls, ledger: Ledger, job_id: str, held: ExitStack) -> Begun:
        """Go on with a transaction that another process has left.

        Args:
            ledger: The dataset.
            job_id: The id of the transaction.
            held: Releases the plan when it is closed.

        Raises:
            ConcurrentChangeError: The transaction is over, or lives in another process.
            ValueError: The job is not a transaction that was left.
        """
        if not JOB_ID.fullmatch(job_id):
            raise ValueError(f"{job_id!r} is not the id of a transaction")
        plan = None if is_dead(ledger.store, job_id, None) else Plan.take(ledger, job_id)
        if plan is None:
            raise ConcurrentChangeError(
                f"the transaction {job_id} is over, or has not shown that it lives for a day, or another process has "
                "taken it up"
            )
        held.callback(plan.release)
        if plan.body.get("operation") != WRITE or ledger.store.stat(plan.folder + LEFT) is None:
            raise ValueError(f"the job {job_id} is not a transaction that was left")
        if (done := plan.committed()) is not None:
            plan.end()
            raise ConcurrentChangeError(f"the transaction {job_id} was committed before, as version {done.number}")
        settings, number = Settings(**plan.body["settings"]), plan.body["base"]
        base, expired = None, None
        if number:
            try:
                base = ledger.current(version=number)
            except FileNotFoundError:
                base, expired = ledger.current(), number
        plan.taken = False  # not from a dead job: its attempts tell of their files
        begun = cls(ledger, job_id, settings, base, expired)
        begun.plan = plan
        begun.leave()  # it lives for a day from now on, if the commit takes long where the storage has no locks
        return begun

    def leave(self) -> None:
        """Mark the plan as one that another process takes up: without a lock, it counts as dead only after a day."""
        self.ledger.store.write_small(self.plan.folder + LEFT, b"left\n", tag=self.job_id)

    def attempts(self) -> set[str]:
        """Return the ids of all attempts that have begun to write files."""
        begins = self.plan.folder + ATTEMPT
        return {entry.path.removeprefix(begins) for entry in self.ledger.store.list(begins)}

    @property
    def policy(self) -> Policy:
        """How files share KEKs."""
        return self.base.policy if self.base else Policy()

    def check_base(self) -> None:
        """Raise ConcurrentChangeError if the version that the transaction began on was expired meanwhile."""
        if self.expired is not None:
            raise ConcurrentChangeError(
                f"version {self.expired}, on which the transaction began, was expired meanwhile: begin again"
            )

    def ticket(self) -> Ticket:
        """Return what files are created with. A transaction that was taken up reserves keys now."""
        return self._ticket or self._extended(self.settings)

    def ticket_like(self, entry: FileEntry) -> Ticket:
        """Return what files are created with that are to be protected as another file of the dataset is."""
        ledger = self.ledger
        key = ledger.keys.get(ledger.keyring.active(entry.key_id))
        contents = At(ledger, self.base).contents(entry, None)
        settings = replace(
            self.settings,
            wrapping_key_id=key.wrapping_key_id,
            double_wrap=key.double_wrap,
            dek_length=len(contents.dek(entry)),
            block_size=entry.block_size or self.settings.block_size,
            column_keys=column_masters(ledger, entry),
            key_material=None if entry.key_material is None else KEYTOOLS,
        )
        return self._extended(settings)

    def _extended(self, settings: Settings) -> Ticket:
        """Return a ticket for other settings. The plan learns of their keys."""
        name = repr(asdict(settings))
        if name not in self._tickets:
            template = self._reserve(settings)
            self.plan.extend([], wraps=sorted({*self.plan.body["wraps"], *template.key_ids()}))
            self._tickets[name] = self._new_ticket(template, settings)
        return self._tickets[name]

    def under_their_keks(self, add: list[FileEntry]) -> list[FileEntry]:
        """Return the files, their data keys wrapped by the KEKs that the policy has for their paths.

        A file that was renamed keeps its KEK, unless the policy has one for each folder.
        """
        ledger, made = self.ledger, list(add)
        kinds: dict[str, tuple[str, bool]] = {}  # master key and wrap of the files under a key
        groups: dict[tuple[str, bool], list[int]] = {}
        for i, entry in enumerate(add):
            if entry.job_id != self.job_id and self.policy.kek_scope != "partition":
                continue
            if entry.key_id not in kinds:
                key = ledger.keys.get(ledger.keyring.active(entry.key_id))
                kinds[entry.key_id] = key.wrapping_key_id, key.double_wrap
            groups.setdefault(kinds[entry.key_id], []).append(i)
        for (master, double_wrap), places in groups.items():
            mine = [add[i] for i in places]
            masters = [column_masters(ledger, entry) for entry in mine]
            wanted = reserve_keys(ledger, self.policy, self.job_id, master, double_wrap, [*mine], masters)
            for i, entry in zip(places, wrapped_under(ledger, mine, wanted), strict=True):
                made[i] = entry
        return made

    def _reserve(self, settings: Settings) -> FileEntry:
        """Return an entry with the ids of the keys that wrap the data keys of new files."""
        (template,) = reserve_keys(
            self.ledger,
            self.policy.replace(kek_scope="dataset"),  # at the commit, each file gets the KEK that its path is to have
            self.job_id,
            settings.wrapping_key_id,
            settings.double_wrap,
            [_template(self.job_id, settings)],
            [dict(settings.column_keys or {})],
        )
        return template

    def _new_ticket(self, template: FileEntry, settings: Settings) -> Ticket:
        ledger = self.ledger
        contents = Contents(ledger.id, ledger.store, ledger.envelope.subset(template.key_ids()), settings.threads)
        place = f"{PLANS}{self.job_id}/{numbered(self.plan.number)}"
        return Ticket(contents, template, settings.dek_length, settings.fsync, place)


def _template(job_id: str, settings: Settings) -> FileEntry:
    """Return an entry with what all files of a transaction have in common."""
    return FileEntry(
        path="",
        file="",
        format="ags1",
        plain_length=0,
        file_length=0,
        block_size=settings.block_size,
        key_id="",
        wrapped_dek=b"",
        column_keys=None,
        aad_prefix=b"",
        job_id=job_id,
        set_id=None,
        part=None,
        parts=None,
        source="",
        stamp="",
        key_material=None if settings.key_material is None else (),
    )
