"""The work on a manifest: rewrite it, with each DEK wrapped by a key in use."""

from __future__ import annotations

from typing import Any

from ags_fast.arrays import arrow_array, arrow_scalar
from ags_fast.dataset.entries import column_binding, wrapped_by
from ags_fast.dataset.manifest_task import ManifestTask
from ags_fast.dataset.tables import decode_entries, encode_table, open_table, seal_table
from ags_fast.errors import AgsError
from ags_fast.jobs.work.context import Context, Outcome
from ags_fast.keys.envelope import binding


def run(context: Context, task: ManifestTask, attempt: int) -> Outcome:
    """Write rows of `task.old` to a new manifest, with no DEK wrapped by a retired key."""
    if (attempt or context.resume) and (length := _is_finished(context, task)) is not None:
        return Outcome("ok", file_length=length)
    table = open_table(context.dataset, context.dataset_id, task.old, context.envelope)
    table = _rewrapped_column(context, table.slice(task.first, task.rows))
    table = _rewrapped_column_keys(context, table)
    dek = context.envelope.unwrap(task.key_id, task.wrapped_key, binding(context.dataset_id, "dek", task.file))
    data = seal_table(encode_table(table), dek, context.dataset_id, task.file)
    try:
        context.dataset.create_exclusive(task.file, data)
    except FileExistsError:
        # Another attempt wrote it, perhaps at the same time. The first one stays: their lengths can differ.
        if (length := _is_finished(context, task)) is None:
            raise
        return Outcome("ok", file_length=length)
    return Outcome("ok", file_length=len(data))


def _is_finished(context: Context, task: ManifestTask) -> int | None:
    """Return the length of the manifest if an earlier attempt wrote it, complete and under the current keys."""
    there = context.dataset.stat(task.file)
    if there is None:
        return None
    try:
        ref = task.with_lengths(there.size).new
        entries = decode_entries(open_table(context.dataset, context.dataset_id, ref, context.envelope), task.file)
    except AgsError:
        return None
    return there.size if context.moves.keys().isdisjoint(wrapped_by(entries)) else None


def _rewrapped_column(context: Context, table: Any) -> Any:
    """Return the table with the DEKs of its files re-wrapped."""
    import pyarrow as pa
    import pyarrow.compute as pc

    key_ids = table.column("key_id").combine_chunks()
    names = table.column("file").combine_chunks()
    wrapped = table.column("wrapped_dek").combine_chunks()
    prefix = binding(context.dataset_id, "dek", "")
    for old in pc.unique(key_ids).to_pylist():
        new = context.moves.get(old)
        if new is None:
            continue
        mine = pc.equal(key_ids, arrow_scalar(old, pa.string()))
        some = not pc.all(mine).as_py()
        those = (names.filter(mine), wrapped.filter(mine)) if some else (names, wrapped)
        fresh = context.envelope.rewrap_column(old, new, prefix, *those, context.ready, context.concurrency)
        wrapped = pc.replace_with_mask(wrapped, mine, fresh) if some else fresh
        key_ids = pc.if_else(mine, arrow_scalar(new, pa.string()), key_ids)
    table = table.set_column(table.column_names.index("key_id"), table.schema.field("key_id"), key_ids)
    return table.set_column(table.column_names.index("wrapped_dek"), table.schema.field("wrapped_dek"), wrapped)


def _rewrapped_column_keys(context: Context, table: Any) -> Any:
    """Return the table with the DEKs of columns re-wrapped."""
    at = table.column_names.index("column_keys")
    rows = table.column(at).to_pylist() if table.column(at).null_count < table.num_rows else []
    names = table.column("file").to_pylist() if rows else []
    todo: dict[str, list[tuple[dict[str, Any], bytes]]] = {}
    for name, keys in zip(names, rows, strict=True):
        for key in keys or ():
            if key["key_id"] in context.moves:
                bound = column_binding(context.dataset_id, key["column"], name)
                todo.setdefault(key["key_id"], []).append((key, bound))
    for old, keys in todo.items():
        new = context.moves[old]
        items = [(key["wrapped_dek"], bound) for key, bound in keys]
        fresh = context.envelope.rewrap_many(old, new, items, context.ready, context.concurrency)
        for (key, _), wrapped in zip(keys, fresh, strict=True):
            key |= {"key_id": new, "wrapped_dek": wrapped}
    if not todo:
        return table
    return table.set_column(at, table.schema.field(at), arrow_array(rows, table.schema.field(at).type))
