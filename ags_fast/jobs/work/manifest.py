"""The work on a manifest: rewrite it, with each DEK wrapped by a key in use."""

from __future__ import annotations

from typing import Any

from ags_fast.dataset.entries import FileEntry, column_binding, wrapped_by
from ags_fast.dataset.tables import (
    TableRef,
    decode_entries,
    encode_table,
    open_table,
    seal_table,
)
from ags_fast.errors import AgsError
from ags_fast.jobs.work.context import Context, Outcome, Task
from ags_fast.keys.envelope import binding

MANIFEST = "manifest"  # the format of such a file


def as_ref(file: FileEntry) -> TableRef:
    """Return the reference to the manifest that an entry stands for."""
    return TableRef(file.file, file.file_length, file.part or 0, file.key_id, file.wrapped_dek)


def rewrite_manifest(context: Context, task: Task, attempt: int) -> int:
    """Write `task.old` again as `task.entry`, with no DEK wrapped by a retired key. Returns the length in bytes."""
    assert task.old is not None
    if (attempt or context.resume) and (length := _is_finished(context, task.entry)) is not None:
        return length
    file = task.entry.file
    table = open_table(context.dataset, context.dataset_id, as_ref(task.old), context.envelope)
    if task.entry.parts is not None:
        table = table.slice(task.entry.parts, task.entry.part)
    table = _rewrapped_column(context, table)
    table = _rewrapped_column_keys(context, table)
    data = seal_table(encode_table(table), context.dek(task.entry), context.dataset_id, file)
    try:
        context.dataset.create(file, data)
    except FileExistsError:
        # Another attempt wrote it, perhaps at the same time. The first one stays: their lengths can differ.
        if (length := _is_finished(context, task.entry)) is None:
            raise
        return length
    return len(data)


def _is_finished(context: Context, entry: FileEntry) -> int | None:
    """Return the length of the manifest if an earlier attempt wrote it, complete and under the current keys."""
    there = context.dataset.stat(entry.file)
    if there is None:
        return None
    try:
        ref = as_ref(entry._replace(file_length=there.size))
        entries = decode_entries(open_table(context.dataset, context.dataset_id, ref, context.envelope), entry.file)
    except AgsError:
        return None
    return there.size if context.moves.keys().isdisjoint(wrapped_by(entries)) else None


def _rewrapped_column(context: Context, table: Any) -> Any:
    """Return the table with the DEKs of its files re-wrapped."""
    import pyarrow.compute as pc

    key_ids = table.column("key_id").combine_chunks()
    names = table.column("file").combine_chunks()
    wrapped = table.column("wrapped_dek").combine_chunks()
    prefix = binding(context.dataset_id, "dek", "")
    for old in pc.unique(key_ids).to_pylist():
        new = context.moves.get(old)
        if new is None:
            continue
        mine = pc.equal(key_ids, old)
        some = not pc.all(mine).as_py()
        those = (names.filter(mine), wrapped.filter(mine)) if some else (names, wrapped)
        fresh = context.envelope.rewrap_column(old, new, prefix, *those, context.ready, context.concurrency)
        wrapped = pc.replace_with_mask(wrapped, mine, fresh) if some else fresh
        key_ids = pc.if_else(mine, new, key_ids)
    table = table.set_column(table.column_names.index("key_id"), table.schema.field("key_id"), key_ids)
    return table.set_column(table.column_names.index("wrapped_dek"), table.schema.field("wrapped_dek"), wrapped)


def _rewrapped_column_keys(context: Context, table: Any) -> Any:
    """Return the table with the DEKs of columns re-wrapped."""
    import pyarrow as pa

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
    return table.set_column(at, table.schema.field(at), pa.array(rows, table.schema.field(at).type))


def run(context: Context, task: Task, attempt: int) -> Outcome:
    """Rewrite one manifest."""
    return Outcome("ok", file_length=rewrite_manifest(context, task, attempt))
