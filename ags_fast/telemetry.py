"""What a running program tells: records of `logging`, and spans and counters of OpenTelemetry.

Both cost next to nothing in a program that uses neither: a package that the program has not imported is not imported
here, and nothing is told of blocks, pages or files in the making. Nothing here ever has a key, wrapped or not.

Loggers: ``ags_fast.jobs`` (a job's end at INFO, each failed file at WARNING), ``ags_fast.kms`` (each call at DEBUG,
each retry at INFO), ``ags_fast.dataset`` (each conflict that is tried again, at INFO) and ``ags_fast.store`` (each
request to S3, Google Cloud Storage and Azure, at DEBUG).

Spans: ``ags_fast.NAME`` for each job, where NAME is the name of its function. Counters, recorded in the process of the
caller, with their attributes: ``ags_fast.files`` (op, status), ``ags_fast.plaintext`` (bytes; op),
``ags_fast.kms.calls`` (provider, operation), ``ags_fast.kms.retries`` (provider) and ``ags_fast.conflicts``.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast._text import printable
from ags_fast._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["add", "debug", "info", "job_span", "warning"]

COUNTERS = {
    "files": ("{file}", "Files that jobs dealt with"),
    "plaintext": ("By", "Plaintext that jobs sealed or opened"),
    "kms.calls": ("{call}", "Calls of a KMS, by all processes of a job"),
    "kms.retries": ("{retry}", "Requests to a KMS that were sent again"),
    "conflicts": ("{conflict}", "Changes and reads that began again, because another process was faster"),
}
_made: dict[str, Any] = {}  # counters that this process has made, by name


def debug(part: str, text: str, *values: object) -> None:
    """Log at DEBUG. `part` is the last part of the logger's name; `values` fill `text` as `logging` does it."""
    _log(10, part, text, values)


def info(part: str, text: str, *values: object) -> None:
    """Log at INFO, as `debug`."""
    _log(20, part, text, values)


def warning(part: str, text: str, *values: object) -> None:
    """Log at WARNING, as `debug`."""
    _log(30, part, text, values)


def _log(level: int, part: str, text: str, values: tuple[object, ...]) -> None:
    if (logging := sys.modules.get("logging")) is not None:
        logger = logging.getLogger(f"ags_fast.{part}")
        if not logger.handlers:  # so that Python prints no warning of a program that has set up no log
            logger.addHandler(logging.NullHandler())
        logger.log(level, text, *(one if isinstance(one, int | float) else printable(str(one)) for one in values))


def add(counter: str, amount: int, attributes: Mapping[str, str] | None = None) -> None:
    """Add to a counter of COUNTERS."""
    if amount and "opentelemetry.metrics" in sys.modules:
        if counter not in _made:
            _made[counter] = _make_counter(counter)
        _made[counter].add(amount, {f"ags_fast.{name}": value for name, value in (attributes or {}).items()})


def _make_counter(name: str) -> Any:
    from opentelemetry import metrics

    unit, description = COUNTERS[name]
    return metrics.get_meter("ags_fast", __version__).create_counter(f"ags_fast.{name}", unit, description)


@contextmanager
def job_span(name: str) -> Iterator[dict[str, Any]]:
    """Have a span around the ``with`` block. Yields a dict for its attributes, to be filled in the block."""
    attributes: dict[str, Any] = {}
    if "opentelemetry.trace" not in sys.modules:
        yield attributes
        return
    from opentelemetry import trace

    tracer = trace.get_tracer("ags_fast", __version__)
    # An unknown exception may hold anything, so the span gets the name of its class only.
    with tracer.start_as_current_span(
        f"ags_fast.{name}", record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield attributes
        except BaseException as error:
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            for what, value in attributes.items():
                span.set_attribute(f"ags_fast.{what}", value)
