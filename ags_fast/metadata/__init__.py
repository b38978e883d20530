"""Metadata of Iceberg tables, as they are parsed: pure functions of their shape, their history and their changes."""
