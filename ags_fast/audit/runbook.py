"""What an event calls for: a table of steps for each event.

The cost of each step is counted on what the steps before it leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ags_fast.audit.costs import Cost, Forecast
from ags_fast.dataset.kinds import Want
from ags_fast.keys.entry import retires_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ags_fast.audit.survey import Survey
    from ags_fast.dataset.policy import Policy

Arguments: TypeAlias = dict[str, Any]


def newest_only(policy: Policy) -> Arguments:
    """Return the arguments with which `expire` removes all versions but the newest, whatever the policy keeps."""
    return {"keep": 1} if policy.keep in (None, 1) and policy.keep_days is None else {"keep": 1, "force": True}


class Facts:
    """What the steps of a runbook depend on."""

    def __init__(
        self,
        survey: Survey,
        now: int,  # milliseconds since 1970
        *,
        may_expire: bool,  # whether the policy lets jobs expire a version
        kms_wraps_before: bool,  # whether the KMS itself wraps data keys of any version, in tables or in files
        paths: Sequence[str] | None,  # patterns of the files whose data keys may be known; None: all files
    ) -> None:
        keys, head = survey.head.keys, survey.head
        active = [entry for entry in keys.values() if entry.state == "active"]
        self.survey = survey
        self.paths = paths
        self.kms_wraps_before = kms_wraps_before
        self.dead = [job.job_id for job in survey.jobs if not job.lives]
        self.masters = sorted({entry.wrapping_key_id for entry in active})
        # KEKs that the current version of their master key does not wrap, as far as the KMS tells.
        current = {key_id: version for key_id, version in survey.current.items() if version is not None}
        doubles = [entry for entry in keys.values() if entry.double_wrap and entry.wrapping_key_id in current]
        older = [entry for entry in doubles if survey.version_of(entry) != current[entry.wrapping_key_id]]
        self.newer = {entry.wrapping_key_id for entry in older}
        self.stale = sorted({entry.wrapping_key_id for entry in older if survey.version_of(entry) is not None})
        policy = head.policy
        self.worn = any(
            entry.double_wrap and (policy.outlived(entry.created_ms, now) or entry.uses >= policy.kek_uses)
            for entry in active
        )
        needed = set[str]().union(*map(survey.needed, survey.entries), *(job.keys for job in survey.jobs))
        retired = [entry for entry in keys.values() if entry.state == "retired" and entry.key_id not in needed]
        self.may_expire = may_expire or any(retires_ms(entry) <= now for entry in retired)
        self.expiry: Arguments = {} if policy.keep is not None else {"keep": len(survey.entries) + 1}
        self.newest_only = newest_only(policy)
        # Whether the KMS wraps data keys, or is about to.
        self.single = any(not entry.double_wrap for entry in active)
        self.doubles_wrap = any(keys[key_id].double_wrap for key_id in survey.wraps(head.files))
        # Whether files of the newest version have key material.
        self.key_material = any(table.material for table in head.files)
        # KEKs that what="double-wrap" does not replace.
        self.others = any(entry.double_wrap and Want.of(entry) != Want(entry.wrapping_key_id) for entry in active)


class Step(NamedTuple):
    """A line of the runbook. `arguments` returns the arguments of each step; no step is needed if there are none."""

    name: str
    function: str | None  # of `ags_fast.jobs`; "new_version": of a master key, in the KMS; None: for people only
    arguments: Callable[[Facts], Sequence[Arguments]] = lambda facts: [{}]
    only_if: str | None = None
    about: Callable[[Facts], Sequence[str]] = lambda facts: ()


def _rotate(what: str, needed: Callable[[Facts], bool] = lambda facts: True) -> Callable[[Facts], Sequence[Arguments]]:
    return lambda facts: [{"what": what}] if needed(facts) else []


def _each_master(facts: Facts) -> Sequence[Arguments]:
    return [{"key_id": key_id} for key_id in facts.masters]


def _replaced_at_once(facts: Facts) -> Sequence[Arguments]:
    documents = {"documents": True} if facts.single and not facts.doubles_wrap else {}
    return [{"what": "kek", **documents, "force_expire": True}]


SWEEP = Step("give-up-the-dead", "sweep", lambda facts: [{}] if facts.dead else [], about=lambda facts: facts.dead)
ASK_AGAIN = Step("ask-again", "audit")
RUNBOOK: dict[str | None, tuple[Step, ...]] = {
    None: (
        SWEEP,
        Step("wrap-stale-keks", "rotate", _rotate("mek", lambda facts: bool(facts.stale)), None, lambda f: f.stale),
        Step("replace-worn-keks", "rotate", _rotate("kek", lambda facts: facts.worn)),
        Step("remove-what-is-over", "expire", lambda facts: [facts.expiry] if facts.may_expire else []),
    ),
    "planned": (
        SWEEP,
        Step(
            "rotate-master-key",
            "new_version",
            lambda facts: [{"key_id": key_id} for key_id in facts.masters if key_id not in facts.newer],
        ),
        Step("wrap-data-keys", "rotate", _rotate("kek", lambda facts: facts.single)),
        Step("replace-worn-keks-too", "rotate", _rotate("kek", lambda facts: facts.worn and not facts.single)),
        Step("wrap-keks", "rotate", _rotate("mek", lambda facts: not (facts.single or facts.worn))),
        Step("renew-key-material", "rekey_files", lambda facts: [{}] if facts.key_material else []),
        Step("remove-earlier-versions", "expire", lambda f: [f.newest_only] if f.kms_wraps_before else []),
        ASK_AGAIN,
    ),
    "kek-leaked": (
        SWEEP,
        Step("new-master-version", "new_version", _each_master, only_if="could-write"),
        Step("replace-keks-at-once", "rotate", _replaced_at_once),
        Step("new-data-keys", "rekey_files", only_if="could-read"),
        Step("remove-old-files", "expire", lambda facts: [facts.newest_only], only_if="could-read"),
        Step("destroy-old-master-versions", "audit", only_if="could-write"),
    ),
    "dek-leaked": (
        SWEEP,
        Step("new-data-keys-of", "rekey_files", lambda facts: [{"paths": list(facts.paths)} if facts.paths else {}]),
        Step("remove-versions-and-files", "expire", lambda facts: [facts.newest_only]),
    ),
    "mek-leaked": (
        SWEEP,
        Step("end-the-access", None),
        Step("new-master-version-or-key", "new_version", _each_master),
        Step("wrap-by-a-kek", "rotate", _rotate("double-wrap", lambda facts: facts.single)),
        Step("replace-keks", "rotate", _rotate("kek", lambda facts: not facts.single or facts.others)),
        Step("new-data-keys", "rekey_files"),
        Step("remove-everything-old", "expire", lambda facts: [{**facts.newest_only, "skip_grace": True}]),
        ASK_AGAIN,
    ),
}
EVENTS = tuple(event for event in RUNBOOK if event is not None)
# The master keys of which the KMS is taken to have a new version when the steps are run.
ROTATED: dict[str | None, Callable[[Facts], set[str]]] = {
    "planned": lambda facts: set(facts.masters) - facts.newer,
    "kek-leaked": lambda facts: set(facts.masters),
    "mek-leaked": lambda facts: set(facts.masters),
}
COSTS: dict[str | None, Callable[..., Cost]] = {
    "rotate": Forecast.rotate,
    "rekey_files": Forecast.rekey,
    "expire": Forecast.expire,
}


def steps(event: str | None, facts: Facts) -> list[dict[str, Any]]:
    """Return the steps that an event calls for, in order, as `audit` returns them."""
    forecast = Forecast(facts.survey, ROTATED[event](facts) if event in ROTATED else ())
    found = []
    for step in RUNBOOK[event]:
        for arguments in step.arguments(facts):
            row = {
                "name": step.name,
                "function": step.function,
                "arguments": arguments,
                "only_if": step.only_if,
                "about": list(step.about(facts)),
            }
            if step is SWEEP:
                forecast.sweep()
            if step.function in COSTS:
                row |= COSTS[step.function](forecast, **arguments).to_json()
            found.append(row)
    return found
