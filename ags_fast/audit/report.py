"""What an audit of keys returns: a dict, which a notebook shows as tables."""

from __future__ import annotations

from typing import Any

__all__ = ["Report"]

VERDICTS = {True: "may be destroyed", False: "must stay", None: "unknown"}


class Report(dict[str, Any]):
    """The keys of a dataset, as `audit` and `key_status` describe them."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from ags_fast.markup import grid, joined, sheet

        keys, versions = self["keys"], self["versions"]
        wrapping = sum(key["state"] == "active" for key in keys)
        due = f"{len(self['steps']):,}" if "steps" in self else None
        facts = [
            ("version", self["version"]),
            ("KEKs", f"{len(keys):,}, of which {wrapping:,} wrap"),
            ("data keys", f"{sum(key['data_keys'] for key in keys):,} in the newest version"),
            ("versions", f"{len(versions):,}"),
            ("steps to do" if self.get("event") else "steps due", due),
            ("could not be read", f"{len(self['unread']):,}" if self["unread"] else None),
        ]
        masters = [
            (master["wrapping_key_id"], row["version"] or "", f"{row['keks']:,}", VERDICTS[row["may_be_destroyed"]])
            for master in self["masters"]
            for row in master.get("versions", ())
        ]
        steps = [(_call(step), f"{sum(step.get('kms_calls', {}).values()):,}") for step in self.get("steps", ())]
        return joined(
            sheet(f"Keys of {self['dataset']}", facts),
            grid("Versions of master keys", ("master key", "version", "KEKs", "verdict"), masters),
            grid("What to do, in this order", ("step", "KMS calls"), steps),
        )


def _call(step: dict[str, Any]) -> str:
    """Return a step as a call in Python, as far as one is made in Python."""
    if step["function"] in (None, "new_version"):
        key_id = step["arguments"].get("key_id")
        return step["name"] if key_id is None else f"in the KMS: a new version of {key_id}"
    given = {name: value for name, value in step["arguments"].items() if name != "older_than"}
    days = step["arguments"].get("older_than")
    words = ["dataset", "kms=kms", *(f"{name}={value!r}" for name, value in given.items())]
    words += [] if days is None else [f"older_than=timedelta(days={days:g})"]
    return f"jobs.{step['function']}({', '.join(words)})"
