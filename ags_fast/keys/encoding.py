"""JSON and base64 as documents, tables of keys and Iceberg's metadata have them: one way to write each value."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from ags_fast._json import check_marks
from ags_fast.errors import FormatError

__all__ = ["dumps", "parse_object", "to_base64", "unbase64"]


def dumps(value: Any) -> str:
    """Return JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def parse_object(data: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: The JSON text, in UTF-8.
        path: Where it was read, for errors.

    Raises:
        FormatError: It is not a JSON object, or would take too much memory.
    """
    check_marks(data, path)
    try:
        body = json.loads(str(data, "utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{path} is not JSON, or was damaged ({type(error).__name__})") from None
    if not isinstance(body, dict):
        raise FormatError(f"{path} is not a JSON object")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError("a number that is too large")
    return number


def to_base64(data: bytes) -> str:
    """Return standard base64 with padding."""
    return base64.b64encode(data).decode()


def unbase64(text: Any) -> bytes:
    """Return the bytes of a base64 text. ValueError unless `to_base64` writes them as this text."""
    data = base64.b64decode(text, validate=True)
    if not isinstance(text, str) or to_base64(data) != text:
        raise ValueError("this is not base64 as it is written here")
    return data
