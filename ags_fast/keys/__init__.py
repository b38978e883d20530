"""Keys: the metadata that brings a file's data key, its AAD prefix and its trusted length."""

from ags_fast.keys.metadata import StandardKeyMetadata

__all__ = ["StandardKeyMetadata"]
