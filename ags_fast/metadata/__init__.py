"""Metadata of Iceberg tables, as they are parsed: their shape, Java's spelling, their state, seals and pins of it."""
