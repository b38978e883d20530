"""Seals of Iceberg metadata: the state that a seal is of, the seal, pins of it, and what a client demands of it."""
