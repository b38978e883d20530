"""Base64 as Parquet's key tools and Iceberg's metadata have it: one way to write each value."""

from __future__ import annotations

import base64
from typing import Any

__all__ = ["to_base64", "unbase64"]


def to_base64(data: bytes) -> str:
    """Return standard base64 with padding."""
    return base64.b64encode(data).decode()


def unbase64(text: Any) -> bytes:
    """Return the bytes of a base64 text. ValueError unless `to_base64` writes them as this text."""
    data = base64.b64decode(text, validate=True)
    if not isinstance(text, str) or to_base64(data) != text:
        raise ValueError("this is not base64 as it is written here")
    return data
