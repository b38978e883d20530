"""Seals and pins of Iceberg tables, as pure functions: see `ags_fast.seals.seal`."""
