"""Databases that hold keys: how their URLs are read, and how they are reached."""

from __future__ import annotations

import os
from typing import Any

from ags_fast._extras import explaining

with explaining("a database as a key store"):
    from sqlalchemy import Engine, create_engine, exc, make_url

from ags_fast.errors import PolicyError

__all__ = ["DATASET", "connect", "shown"]

DATASET = "dataset"  # the parameter of the URL that says which
NO_URL_HAS = {"password", "passwd", "pwd", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"}
CONNECT_SECONDS = 10
STATEMENT_SECONDS = 30


def connect(url: str, dataset_id: str | None) -> tuple[str, Engine, str | None]:
    """Return the URL without the dataset, an engine for it, and the dataset's id."""
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        # Which is not shown: it may hold a password.
        raise ValueError("a key store in a database has a URL as SQLAlchemy takes it") from None
    if parsed.password is not None or not parsed.query.keys().isdisjoint(NO_URL_HAS):
        raise PolicyError(
            f"the URL of {parsed.host or parsed.drivername} holds a password, and would take it to wherever the store "
            "is sent: leave it out, and set PGPASSWORD, or PGPASSFILE and ~/.pgpass, wherever it is used"
        )
    named = parsed.query.get(DATASET, dataset_id)
    if not isinstance(named, str | None) or dataset_id not in (None, named):
        raise ValueError(f"the URL names the dataset {named!r}, not {dataset_id!r}")
    parsed = parsed.difference_update_query([DATASET])
    settings: dict[str, Any] = {}
    if parsed.get_backend_name() == "sqlite":
        if parsed.database in (None, "", ":memory:") or "mode=memory" in str(parsed):
            raise ValueError("each connection to SQLite's memory sees another database: take a file, or MemoryKeyStore")
        if not parsed.database.startswith("file:"):
            parsed = parsed.set(database=os.path.abspath(parsed.database))
        settings = {"timeout": STATEMENT_SECONDS}
    elif parsed.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2"):
        settings = {
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": 1000 * STATEMENT_SECONDS,
            "options": f"-c statement_timeout={1000 * STATEMENT_SECONDS}",
        }
    settings = {name: value for name, value in settings.items() if name not in parsed.query}
    try:
        # One connection is kept, and looked at before it is used again.
        engine = create_engine(parsed, connect_args=settings, pool_pre_ping=True, pool_size=1, max_overflow=15)
    except exc.NoSuchModuleError:
        raise ValueError(f"SQLAlchemy knows no {parsed.drivername}://") from None
    except ImportError as error:
        raise ImportError(
            f"{parsed.drivername}:// needs a driver ({error.name}): pip install 'psycopg[binary]'"
        ) from None
    return parsed.render_as_string(), engine, named


def shown(engine: Engine) -> str:
    """Return the URL of a database, for people."""
    return engine.url.render_as_string(hide_password=True)
