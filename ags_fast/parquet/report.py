"""What was done to a file, and what its readers should know: Report, and a ColumnReport for each column."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ags_fast._core import ColumnCounts

if TYPE_CHECKING:
    from ags_fast._core import Chunk, Modules
    from ags_fast.parquet.mover import Mover
    from ags_fast.parquet.opened import Opened

__all__ = [
    "ColumnReport",
    "ColumnReports",
    "Report",
    "footer_warnings",
    "level_warnings",
    "report_of",
    "v2_warnings",
]


@dataclass
class ColumnReport:
    """What became of a column, over all row groups. Sizes are bytes in the sealed file."""

    path: str
    key: str  # "plain", "footer", "column", or "missing": encrypted, and the key is not held
    data_pages: int = 0
    dictionary_pages: int = 0
    modules: int = 0
    nbytes: int = 0
    authenticated: bool = True  # every part in `tags` has a tag
    key_metadata: bytes | None = field(default=None, repr=False)
    # Which parts have a tag: "headers" (of pages, with all other metadata, indexes and bloom filters), "levels" and
    # "values". A plain column has no tags. Under AES_GCM_CTR_V1 only "headers" have tags. With V2 pages in
    # parquet-java's layout, "levels" have none. Empty if the key is not held.
    tags: dict[str, bool] = field(default_factory=dict)

    def note_tags(self, modules: Modules | None, outside_levels: bool) -> None:
        """Add a chunk, by its seal."""
        sealed = modules is not None
        body = modules is not None and not modules.ctr
        for part, has in (("headers", sealed), ("levels", body and not outside_levels), ("values", body)):
            self.tags[part] = has and self.tags.get(part, True)
        self.authenticated = all(self.tags.values())


@dataclass
class Report:
    """What was done to a file. Sizes are in bytes.

    `warnings` are text for people: what readers may refuse, or what was wrong with the source.
    """

    op: str
    algorithm: str | None
    footer: str  # "encrypted", "signed" (in plain text) or "plain"
    row_groups: int
    source_length: int
    file_length: int = 0
    # Of the plaintext view that `open_plain` makes of the file; None if that is not known: columns whose keys are not
    # held may hide the length of their metadata.
    plain_length: int | None = None
    columns: list[ColumnReport] = field(default_factory=list)
    # Where each row group begins in the file that was written. Empty if none was.
    row_group_offsets: list[int] = field(default_factory=list)
    footer_verified: bool = True  # False for a signed footer that was read without the footer key
    # (column, row group) where levels of V2 pages have no tag, in the source or in the target: there, somebody could
    # change which values are null, and where lists begin.
    unauthenticated_levels: list[tuple[str, int]] = field(default_factory=list)
    buffer_nbytes: int = 0  # the most of the file that was in memory at once
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it: key metadata as hexadecimal digits."""
        row = asdict(self)
        for column in row["columns"]:
            column["key_metadata"] = None if column["key_metadata"] is None else column["key_metadata"].hex()
        return row


class ColumnReports:
    """The reports of a file's columns, added up over chunks that a Mover has moved.

    Args:
        plaintext_footer: Whether the footer of the file that was encrypted is in plain text.
    """

    def __init__(self, plaintext_footer: bool) -> None:
        self._counts = ColumnCounts(plaintext_footer)
        self._rows: dict[int, ColumnReport] = {}  # by number

    def add(self, chunks: list[Chunk]) -> None:
        """Add chunks to the reports of their columns."""
        for chunk in self._counts.add(chunks):
            row = self._rows.get(chunk.column)
            if chunk.missing:
                row = ColumnReport(chunk.name, "missing", authenticated=False)
            elif row is None:
                was = chunk.target is None and chunk.modules is not None  # it is plain now: say how it was sealed
                kind, metadata = (chunk.kind, None) if was else (chunk.side.kind, chunk.side.key_metadata)
                row = ColumnReport(chunk.name, kind, key_metadata=metadata)
            self._rows[chunk.column] = row
            if not chunk.missing:
                row.note_tags(chunk.target or chunk.modules, chunk.moved is not None and chunk.moved.outside_levels)

    def rows(self) -> list[ColumnReport]:
        """Return the reports, in the order of the columns."""
        for column, row in self._rows.items():
            row.data_pages, row.dictionary_pages, row.modules, row.nbytes = self._counts.of(column)
        return [self._rows[column] for column in sorted(self._rows)]


def report_of(
    op: str,
    opened: Opened,
    chunks: list[Chunk],
    mover: Mover,
    algorithm: str | None,
    plaintext_footer: bool,
) -> Report:
    """Report what a Mover did with chunks."""
    footer = "signed" if plaintext_footer else "encrypted"
    report = Report(op, algorithm, footer, len(opened.groups), opened.source.size, mover.target.position)
    columns = ColumnReports(plaintext_footer)
    columns.add(chunks)
    report.columns = columns.rows()
    begins: dict[int, int] = {}
    for chunk in chunks:
        there = chunk.moved
        if there is not None and there.nbytes and there.begin < begins.get(chunk.row_group, there.begin + 1):
            begins[chunk.row_group] = there.begin
    report.row_group_offsets = sorted(begins.values())
    report.buffer_nbytes = mover.buffer_nbytes
    report.unauthenticated_levels = mover.pages.unauthenticated_levels
    report.warnings += level_warnings(report.unauthenticated_levels)
    if opened.crypto is not None and any(chunk.modules is not None and chunk.modules.ctr for chunk in chunks):
        report.warnings.append("the source's pages had no tag (AES_GCM_CTR_V1): changes in them could not be detected")
    if mover.pages.wrong_checksums:
        report.warnings.append(
            f"{mover.pages.wrong_checksums} pages already had a wrong CRC, which was kept: the source was damaged "
            "before"
        )
    if mover.pages.dropped_checksums:
        report.warnings.append(
            f"{mover.pages.dropped_checksums} page headers had no room for the new CRC, which was left out"
        )
    return report


def footer_warnings(report: Report) -> list[str]:
    """Warn of a footer that was not verified."""
    if report.footer_verified:
        return []
    return [
        "the footer's signature was not verified, because the footer key was not given: the schema, the numbers of "
        "rows and row groups, and columns that are not encrypted may have been changed"
    ]


def level_warnings(places: list[tuple[str, int]]) -> list[str]:
    """Warn of levels without a tag."""
    if not places:
        return []
    columns = ", ".join(dict.fromkeys(column for column, _ in places))
    return [
        f"the levels of {columns} have no tag (parquet-java's V2 layout): a writer can change unseen which values "
        "are null, and where lists begin (allow_unauthenticated_levels=False refuses such pages)"
    ]


def v2_warnings(mover: Mover) -> list[str]:
    """Warn of V2 pages that some readers refuse."""
    count, layout = mover.pages.v2_levels, mover.pages.v2_layout
    if not count:
        return []
    readers = "parquet-java and Spark" if layout != 2 else "Arrow, polars and all other readers except parquet-java"
    warnings = [f"{count} V2 pages have levels: {readers} will not read them (see v2_layout)"]
    if layout == 2:
        warnings.append("these pages show in plain text which values are null")
    return warnings
