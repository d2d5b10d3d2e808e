"""The file of the jobs store: its lock, its schema, and the checks before it is used."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from sash.spec.errors import ConfigError

FILE_NAME = "jobs.sqlite3"
LOCK_NAME = "lock"
OTHER_FOLDER = "name another folder (or none, for no jobs): --jobs-dir DIR"
# "sash" in ASCII: tells our files from other people's.
APPLICATION_ID = 0x73617368
# A file grows by pages of this size; SQLite's default.
PAGE_BYTES = 4096
_WAL_BYTES = 64 << 20

# ``user_version`` counts how many of these a file has seen; a new version of the schema is a further entry.
# Bodies stand last in their tables, so that reading the columns before them doesn't load their pages.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE jobs (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            idempotency_key TEXT UNIQUE,
            fingerprint BLOB NOT NULL,
            state TEXT NOT NULL CHECK (state IN
                ('queued', 'running', 'cancelling', 'cancelled', 'completed', 'failed', 'expired')),
            total INTEGER NOT NULL CHECK (total > 0),
            completed INTEGER NOT NULL DEFAULT 0,
            failed INTEGER NOT NULL DEFAULT 0 CHECK (completed + failed <= total),
            max_concurrency INTEGER,
            created_at REAL NOT NULL,
            expires_at REAL NOT NULL,
            started_at REAL,
            ended_at REAL CHECK ((ended_at IS NULL) = (state IN ('queued', 'running', 'cancelling'))),
            models TEXT NOT NULL,
            metadata TEXT NOT NULL,
            error TEXT
        )""",
        "CREATE INDEX jobs_by_state ON jobs (state, expires_at)",
        """CREATE TABLE requests (
            job INTEGER NOT NULL REFERENCES jobs (seq) ON DELETE CASCADE,
            idx INTEGER NOT NULL,
            custom_id TEXT,
            endpoint TEXT NOT NULL,
            answers INTEGER NOT NULL,
            attempts INTEGER NOT NULL DEFAULT 0,
            body BLOB NOT NULL,
            PRIMARY KEY (job, idx)
        )""",
        """CREATE TABLE results (
            sequence INTEGER PRIMARY KEY AUTOINCREMENT,
            job INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            status INTEGER NOT NULL,
            finished_at REAL NOT NULL,
            body BLOB NOT NULL,
            UNIQUE (job, idx),
            FOREIGN KEY (job, idx) REFERENCES requests (job, idx) ON DELETE CASCADE
        )""",
    ),
)


def default_jobs_dir(environ: Mapping[str, str]) -> Path:
    """Where jobs are kept when nobody says: in the user's folder for state (XDG Base Directory Specification)."""
    given = environ.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return base / "sash" / "jobs"


def take_lock(folder: Path) -> IO[str]:
    """Make ``folder`` ours until the file that is returned is closed or the process ends, however it ends.

    Raises:
        ConfigError: another server has it, or it can't be made or written.
    """
    path = folder / LOCK_NAME
    try:
        # Bodies are prompts: nobody else's to read.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  # held open for as long as the store is
    except OSError as error:
        raise ConfigError(f"jobs_dir: {path} can't be written ({error}); {OTHER_FOLDER}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise ConfigError(
            f"jobs_dir: {folder} is in use by another server{f' (process {owner})' if owner else ''}; {OTHER_FOLDER}"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file


def open_database(path: Path, max_bytes: int) -> sqlite3.Connection:
    """The store's file, made or brought to the newest schema. Every commit is on disk when it returns.

    Raises:
        ConfigError: the file is broken, somebody else's or newer than this version of sash; the way out is named.
    """
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, isolation_level=None)
        _check_owner(db, path)
        _configure(db, max_bytes)
        _check_pages(db, path)
        _migrate(db)
    except (sqlite3.Error, ConfigError) as error:
        if db is not None:
            db.close()
        if isinstance(error, ConfigError):
            raise
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _broken(path, str(error)) from None
        raise ConfigError(f"jobs_dir: {path} can't be used ({error}); {OTHER_FOLDER}") from None
    return db


def _check_owner(db: sqlite3.Connection, path: Path) -> None:
    version, owner = _pragma(db, "user_version"), _pragma(db, "application_id")
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and owner != APPLICATION_ID:
        raise ConfigError(f"jobs_dir: {path} is not a jobs store; {OTHER_FOLDER}")
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"jobs_dir: {path} was written by a newer sash (schema {version}, this one knows {len(MIGRATIONS)}); "
            f"start that version, or {OTHER_FOLDER}"
        )


def _configure(db: sqlite3.Connection, max_bytes: int) -> None:
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    # Has an effect in a file without tables only; later ones remember it.
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    # Never below what the file has already: SQLite refuses to shrink a file this way.
    db.execute(f"PRAGMA max_page_count = {max(max_bytes // _pragma(db, 'page_size'), 1)}")


def _check_pages(db: sqlite3.Connection, path: Path) -> None:
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _broken(path, str(verdict))


def _migrate(db: sqlite3.Connection) -> None:
    for version in range(_pragma(db, "user_version"), len(MIGRATIONS)):
        db.execute("BEGIN IMMEDIATE")
        for statement in MIGRATIONS[version]:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {version + 1}")
        db.execute("COMMIT")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def _broken(path: Path, reason: str) -> ConfigError:
    reason = " ".join(reason.split())
    return ConfigError(
        f"jobs_dir: {path} is broken ({reason}). Move it away together with {path.name}-wal and {path.name}-shm and "
        f"start again with no jobs, or {OTHER_FOLDER}. "
        f"`sqlite3 {path.name} .recover` prints what can be saved of it"
    )
