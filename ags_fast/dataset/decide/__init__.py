"""Decide what a job changes in a dataset: pure functions from what was read to a `Change`.

Nothing here reads, writes, asks a KMS or looks at a clock. So a job that loses a compare-and-swap reads and decides
again, a dry run prints the decision, and an audit applies decisions one after the other (`Change.apply_to`). A decision
that needs a new KEK lists the kind of that KEK in `Change.makes` and works with a provisional entry. A job then has the
KMS make the KEK and decides again; a dry run and an audit go on with the provisional entry.

The rules:

- A KEK is active, then retired, then removed. No step goes back.
- Jobs wrap by the newest active KEK of each kind (`Want`: master key, wrap, columns, scope). `uses` counts wraps before
  they are made, never goes down, and stays within the policy in what jobs reserve. A KEK beyond its lifetime or uses
  retires in favour of a new one.
- A retired KEK names its successor. The successors of a key end with an active key, its heir, or with none; then a key
  of the same kind takes its place.
- A rotation first replaces KEKs in the key store. Then each commit wraps by heirs, so the manifests of one more version
  are all that is left to rewrite. The new KEKs count all DEKs that they will wrap, even beyond `kek_uses`: a KEK that
  has leaked must go in one step.
- An expiry keeps the newest version, all that a version needs, and all that an open job needs or may wrap by when it
  commits. What else has retired stays for its grace, for writers that know no other KEK.
- Newer changes of other jobs win: a commit leaves out the paths that another job has changed, or refuses as a whole.
"""

from ags_fast.dataset.decide.change import Change, moved_counts
from ags_fast.dataset.decide.expiry import expire_keys, expire_versions
from ags_fast.dataset.decide.files import Wish, next_version
from ags_fast.dataset.decide.keys import active, heir, line, main_key, provisional
from ags_fast.dataset.decide.reservation import kinds_for_files, reserve, with_keys
from ags_fast.dataset.decide.rotation import (
    Rotation,
    counted_moves,
    install,
    put_in_wraps,
    replace_keks,
    rewrap_keks,
    rewrite_manifests,
)

__all__ = [
    "Change",
    "Rotation",
    "Wish",
    "active",
    "counted_moves",
    "expire_keys",
    "expire_versions",
    "heir",
    "install",
    "kinds_for_files",
    "line",
    "main_key",
    "moved_counts",
    "next_version",
    "provisional",
    "put_in_wraps",
    "replace_keks",
    "reserve",
    "rewrap_keks",
    "rewrite_manifests",
    "with_keys",
]
