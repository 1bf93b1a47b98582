"""A copy of the run directory in an object store (`cluster.storage_path`), made beside the training by rank 0.

    s3://bucket/runs/NAME/...   the files of runs/NAME, under the same names

An object appears as a whole.  Of a checkpoint the manifest is written last and deleted first: where there is none, the
checkpoint is not chosen.  `training.keep_last` and `keep_every` hold for what is stored there by all sessions.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError

from vesuvius.config import Config, StoreConfig
from vesuvius.errors import ConfigError, DataError, StorageError, storage_errors
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training.checkpoint.format import MANIFEST, find_damage, list_checkpoints, step_of
from vesuvius.training.checkpoint.save import RetentionPolicy, linked_best
from vesuvius.volumes.errors import reason
from vesuvius.volumes.store.object_store import open_store

log = logging.getLogger(__name__)

T = TypeVar("T")

_EVERY_S = 30.0
_SHARE = 0.05  # of the time at most, for uploads of a file that grows
_SAY_AFTER_S = 1.0
_END_S = 600.0  # for what is not uploaded when the run ends
_PAUSES_S = (1.0, 5.0, 20.0)  # between tries of a download
_WARN_EVERY_S = 600.0
_PART_BYTES = 2**24
_Failure = (BaseError, OSError)
_STEP = r"step_\d{8,}"


class RunStore:
    """The objects of one run, by the paths of its files below the run directory.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, config: Config) -> None:
        self.address = f"{str(config.cluster.storage_path).rstrip('/')}/{config.name}"
        try:
            self._store = open_store(self.address, StoreConfig(anonymous=False))
        except DataError as error:
            raise ConfigError(f"cluster.storage_path must be an address that can be opened; {error}") from error

    def put(self, key: str, file: Path) -> None:
        """Raises BaseError or OSError."""
        obstore.put(self._store, key, file, use_multipart=file.stat().st_size > _PART_BYTES, chunk_size=_PART_BYTES)

    def get(self, key: str, file: Path) -> None:
        """Raises BaseError, or StorageError where the file cannot be written."""
        parts = obstore.get(self._store, key).stream(min_chunk_size=_PART_BYTES)
        with storage_errors(
            "what a run continues from must fit on this disk",
            "free some space, or point VESUVIUS_RUNS at a larger disk",
            f"while {key} was copied from {self.address} to {file}",
            but=(ConnectionError, TimeoutError),
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                for part in parts:
                    out.write(part)

    def read(self, key: str) -> bytes:
        """A small object.  Raises BaseError."""
        return bytes(obstore.get(self._store, key).bytes())

    def list_keys(self, prefix: str | None = None) -> list[str]:
        """Raises BaseError."""
        return [entry["path"] for batch in obstore.list(self._store, prefix) for entry in batch]

    def tried(self, act: Callable[..., T], *arguments: Any) -> T:
        """What one of these reads returns, tried a few times.  Raises StorageError."""
        for pause_s in _PAUSES_S:
            try:
                return act(*arguments)
            except _Failure:
                time.sleep(pause_s)
        try:
            return act(*arguments)
        except _Failure as error:
            raise StorageError(
                f"cluster.storage_path must be readable at the start; got {reason(error)} for {self.address}; try "
                "again, correct the address or the AWS_* and GOOGLE_* environment, or set it to null"
            ) from error

    def delete_checkpoint(self, name: str) -> None:
        """Raises BaseError."""
        keys = self.list_keys(f"checkpoints/{name}")
        for key in sorted(keys, key=lambda key: not key.endswith(MANIFEST)):
            obstore.delete(self._store, key)


class Mirror:
    """Copies finished checkpoints, logs and records on a thread.  A context manager that ends with a last look.

    A store that does not answer is told in the log and tried again; the training does not wait for it.

    Args:
        directory: of the run.
        retention: which checkpoints stay there, of this session and of those before; `best_step` is the best one so
            far, which may not be on this machine.
    """

    def __init__(self, directory: RunDir, store: RunStore, retention: RetentionPolicy) -> None:
        self._directory, self._store, self._retention = directory, store, retention
        self._stored: set[str] | None = None  # checkpoints there; None = not listed yet
        self._uploaded: dict[str, tuple[int, int]] = {}  # modification time and size by key
        self._not_before: dict[str, float] = {}
        self._uploaded_checkpoints: dict[str, tuple[int, int] | None] = {}  # identity by name
        self._ended = threading.Event()
        self._failing_since: float | None = None
        self._warned = 0.0
        self._waiting: list[str] = []
        self._thread = threading.Thread(target=self._run, name="run-mirror", daemon=True)

    def __enter__(self) -> Mirror:
        log.info("checkpoints, logs and records are copied to %s", self._store.address)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(_SAY_AFTER_S)
        if self._thread.is_alive():
            log.info("copying the last files to %s; this may take up to %g s", self._store.address, _END_S)
            self._thread.join(_END_S)
        if not self._thread.is_alive() and not self._waiting:
            return
        missing = self._waiting or ["an upload that hangs"]
        log.warning(
            "all files of a run must be in cluster.storage_path when it ends; got %d files not uploaded to %s within "
            "%g s: %s; copy %s there, or continue with --resume on this machine",
            len(missing),
            self._store.address,
            _END_S,
            ", ".join(missing[:5]) + ("..." if len(missing) > 5 else ""),
            self._directory.path,
        )

    def _run(self) -> None:
        try:
            while not self._ended.wait(_EVERY_S):
                self._copy(at_once=False)
            deadline = time.monotonic() + _END_S
            while self._copy(at_once=True) and time.monotonic() < deadline:
                time.sleep(min(_EVERY_S, 5.0))
        except Exception:
            log.exception("copies to %s end here: a bug in vesuvius, please report it", self._store.address)
            self._waiting = self._waiting or ["not known"]

    def _copy(self, at_once: bool) -> list[str]:
        """One look at the run directory; returns what could not be uploaded.

        Args:
            at_once: also files that grow and were uploaded a moment ago.
        """
        waiting = []
        try:
            jobs = [*self._checkpoint_jobs(), *self._record_jobs(at_once)]
        except (OSError, StorageError) as error:
            self._warn(error)
            self._waiting = [str(self._directory.path)]
            return self._waiting
        for key, job in jobs:
            try:
                job()
            except FileNotFoundError:  # pruned or rotated meanwhile
                continue
            except _Failure as error:
                waiting.append(key)
                self._warn(error)
                if self._ended.is_set():
                    continue
                break  # an outage: the others would only wait for their timeouts
        if not waiting and self._failing_since is not None:
            log.info("%s answers again after %.0f s", self._store.address, time.monotonic() - self._failing_since)
            self._failing_since = None
        self._waiting = waiting
        return waiting

    def _checkpoint_jobs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Uploads of checkpoints, the newest first, then deletions of those that are gone here."""
        there = {path.name: path for path in list_checkpoints(self._directory.checkpoints)}
        for name in sorted(there, reverse=True):
            if self._uploaded_checkpoints.get(name) != _identity(there[name]):
                yield f"checkpoints/{name}", partial(self._upload_checkpoint, there[name])
        yield "older checkpoints to be deleted there", self._prune

    def _upload_checkpoint(self, path: Path) -> None:
        """Upload it.  One of the same step may lie there, or take its place here meanwhile: that is the next look's."""
        present = _identity(path)
        if path.name not in self._uploaded_checkpoints and self._is_stored(path):  # by an earlier session
            self._uploaded_checkpoints[path.name] = present
            return
        self._store.delete_checkpoint(path.name)
        for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):
            if file.name == MANIFEST and _identity(path) != present:
                return
            self._store.put(f"checkpoints/{path.name}/{file.name}", file)
        self._uploaded_checkpoints[path.name] = present

    def _is_stored(self, path: Path) -> bool:
        """Whether the store has this very checkpoint: the manifest, written last, has the digests of all files."""
        key = f"checkpoints/{path.name}/{MANIFEST}"
        if key not in self._store.list_keys(f"checkpoints/{path.name}"):
            return False
        return self._store.read(key) == (path / MANIFEST).read_bytes()

    def _prune(self) -> None:
        """Delete what the policy does not keep of all that is stored, also half stored, by this session or before.

        What is on this machine stays there, too; and what lies beyond the newest one here is not judged: it was
        damaged, or this session has not come so far.
        """
        if self._stored is None:
            names = {key.split("/")[1] for key in self._store.list_keys("checkpoints")}
            self._stored = {name for name in names if re.fullmatch(_STEP, name)}
        self._stored.update(self._uploaded_checkpoints)
        here = [path.name for path in list_checkpoints(self._directory.checkpoints)]
        newest = _step(here[-1]) if here else -1
        until_now = sorted((name for name in self._stored.union(here) if _step(name) <= newest), key=_step)
        best = linked_best(self._directory.checkpoints)
        retention = self._retention if best is None else replace(self._retention, best_step=_step(best))
        kept = retention.choose([_step(name) for name in until_now])
        for name in until_now:
            if name not in here and _step(name) not in kept:
                self._store.delete_checkpoint(name)
                self._stored.discard(name)
                self._uploaded_checkpoints.pop(name, None)

    def _record_jobs(self, at_once: bool) -> Iterator[tuple[str, Callable[[], None]]]:
        top = self._directory.path
        for folder, folders, files in os.walk(top):  # which passes over what disappears meanwhile
            apart = (self._directory.checkpoints.name,) if Path(folder) == top else ()
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in apart)
            for file in (Path(folder, name) for name in sorted(files) if not name.startswith(".")):
                key = file.relative_to(top).as_posix()
                if at_once or time.monotonic() >= self._not_before.get(key, 0.0):
                    yield key, partial(self._upload_record, key, file)

    def _upload_record(self, key: str, file: Path) -> None:
        if not file.is_file():
            return
        status, began = file.stat(), time.monotonic()
        if (state := (status.st_mtime_ns, status.st_size)) != self._uploaded.get(key):
            self._store.put(key, file)
            self._uploaded[key] = state
            took_s = time.monotonic() - began
            self._not_before[key] = began + max(_EVERY_S, took_s / _SHARE)

    def _warn(self, error: BaseException) -> None:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._warned > _WARN_EVERY_S or not self._warned:
            self._warned = now
            log.warning(
                "cluster.storage_path must be writable; got %s for %s; the run continues and retries every %g s",
                reason(error),
                self._store.address,
                _EVERY_S,
            )


def open_run_store(config: Config, directory: RunDir, resume: bool, wait_s: float = 0.0) -> RunStore | None:
    """Where a run is copied to, None = nowhere.  What is to continue from there is downloaded.

    Args:
        wait_s: for another process that is at work on the run.

    Raises:
        ConfigError: a new run would overwrite another one's objects, or another process is at work on this one.
        StorageError: as `fetch_run`.
    """
    if config.cluster.storage_path is None:
        return None
    store = RunStore(config)
    if not resume:
        refuse_stored(store)
    elif directory.exists():
        with directory.locked(new=False, wait_s=wait_s):
            fetch_run(store, directory)
    else:
        fetch_run(store, directory)
    return store


def stored_config(config: Config) -> str | None:
    """`config.resolved.yaml` of the run in `cluster.storage_path`; None where there is none.  Raises StorageError."""
    if config.cluster.storage_path is None:
        return None
    store, key = RunStore(config), "config.resolved.yaml"
    return store.tried(store.read, key).decode() if key in store.tried(store.list_keys) else None


def fetch_run(store: RunStore, directory: RunDir) -> None:
    """Bring the newest whole checkpoint and the records of a run down, unless this machine has them.

    Raises:
        StorageError: the store does not answer, or all checkpoints there are damaged.
    """
    here = reversed(list_checkpoints(directory.checkpoints))
    local = next((step_of(path) for path in here if find_damage(path) is None), 0)
    keys = store.tried(store.list_keys)
    whole = [key for key in keys if re.fullmatch(rf"checkpoints/{_STEP}/{re.escape(MANIFEST)}", key)]
    newer = sorted((key.split("/")[1] for key in whole if step_of(Path(key).parent) > local), reverse=True)
    if not newer:
        if not (local or whole) and any(re.match(f"checkpoints/{_STEP}/", key) for key in keys):
            raise StorageError(
                f"a resumed run needs a complete checkpoint in its store or on this machine; got "
                f"only parts in {store.address}, as after an interrupted upload; resume on the machine that "
                "wrote them, or start under another name"
            )
        return
    for name in newer:
        path = directory.checkpoints / name
        fetched = path.with_name(f".partial-{name}")
        shutil.rmtree(fetched, ignore_errors=True)
        try:
            for key in (key for key in keys if key.startswith(f"checkpoints/{name}/")):
                store.tried(store.get, key, fetched / Path(key).name)
        except StorageError:
            shutil.rmtree(fetched, ignore_errors=True)  # gigabytes on a disk that may be full
            raise
        if (damage := find_damage(fetched)) is None:
            break
        log.warning("checkpoint %s in %s is damaged (%s) and is skipped", name, store.address, damage)
        shutil.rmtree(fetched)
    else:
        raise StorageError(
            f"one checkpoint of a run must be intact; got {', '.join(newer)} in {store.address}, all damaged; restore "
            "one from a backup, or set cluster.storage_path=null"
        )
    for key in (key for key in keys if not key.startswith("checkpoints/")):
        store.tried(store.get, key, directory.path / key)
    shutil.rmtree(path, ignore_errors=True)  # one of this step is damaged, or it would have counted as local
    fetched.rename(path)
    log.info("%s and the records of the run come from %s", name, store.address)


def _identity(checkpoint: Path) -> tuple[int, int] | None:
    """What tells it from another one of the same step; None where it is not whole."""
    with suppress(OSError):
        status = (checkpoint / MANIFEST).stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _step(checkpoint: str) -> int:
    return step_of(Path(checkpoint))


def refuse_stored(store: RunStore) -> None:
    """Raises ConfigError where a new run would overwrite another one's objects, StorageError without an answer."""
    if store.tried(store.list_keys, "checkpoints"):
        raise ConfigError(
            f"a new run needs a place of its own; got {store.address}, where there are checkpoints; continue from "
            "them with --resume, or choose another name"
        )
