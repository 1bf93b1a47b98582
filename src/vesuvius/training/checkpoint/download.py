"""Fetches a model file from an address, once: `--checkpoint https://host/model.safetensors#sha256=...`.

The file gets its name in the cache when all bytes are there, are a model and have the sum.  Reads are ranges, retried
during outages as those of volumes (`volumes/store/source.py`).
"""

import hashlib
import logging
import os
import re
import shutil
import time
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from vesuvius.config import StoreConfig
from vesuvius.errors import ConfigError, DataError, storage_errors
from vesuvius.runlog.files import cache_folder
from vesuvius.runlog.units import format_size
from vesuvius.training.checkpoint.format import digest
from vesuvius.training.checkpoint.model_file import SUFFIX, is_model_file
from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.store.objects import ByteRange, display_address, is_remote
from vesuvius.volumes.store.source import open_object

log = logging.getLogger(__name__)

LARGEST_BYTES = 2**34
_HEADER_BYTES = 10**8  # the most that safetensors reads
_PART_BYTES = 2**24
_PREFIX = ".download-"
_LEFT_S = 24 * 3600  # since the last write
_STORE = StoreConfig(outage_minutes=3)


def local_checkpoint(given: str) -> Path:
    """Return a path as it is, and for an address (https, s3, gs, az, hf) the path of a local copy of its model.

    Raises ConfigError: there is no model, or it has another sum; DataError: no answer, a refusal, or no place to write.
    """
    if not is_remote(given):
        return Path(given)
    address, _, fragment = given.partition("#")
    match = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
    if fragment and not match:
        raise ConfigError(f"#{fragment} of a model's address is not #sha256= and 64 hexadecimal digits; correct it")
    wanted, shown = match[1].lower() if match else None, display_address(address)
    folder = cache_folder() / "models"
    path = folder / f"{hashlib.sha256(address.encode()).hexdigest()[:16]}{SUFFIX}"
    with storage_errors(str(path), "free some space or set XDG_CACHE_HOME to a writable folder"):
        if path.is_file() and wanted in (None, digest(path)):
            log.info("Using the copy of %s in %s; delete it to fetch it again", shown, path)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_PREFIX}*"):  # of downloads that were killed
            with suppress(OSError):  # another command may delete it too
                if max(each.stat().st_mtime for each in (left, *left.iterdir())) < time.time() - _LEFT_S:
                    shutil.rmtree(left)
        with TemporaryDirectory(prefix=_PREFIX, dir=folder) as own:
            with (part := Path(own) / path.name).open("wb") as file:
                found = _fetch(address, shown, file)
            if wanted not in (None, found):
                text = "it was replaced or damaged; compare the sum with that of its publisher"
                raise ConfigError(f"The model at {shown} has SHA-256 {found} instead of {wanted}: {text}")
            if not is_model_file(part):
                raise ConfigError(f"{shown} holds weights alone; use a model file, which has the config of its run too")
            part.replace(path)
    if wanted is None:
        log.info("Append #sha256=%s to the address to accept these bytes only", found)
    return path


def _fetch(address: str, shown: str, file: BinaryIO) -> str:
    """Write a safetensors file, whose header says how long it is.  Returns its SHA-256 sum."""
    sums, version, (source, key) = hashlib.sha256(), None, open_object(address, _STORE)
    no_model = f"{shown} is not a {SUFFIX} file, but perhaps a web page; give the address of the download itself"

    def read(start: int, stop: int) -> bytes:
        nonlocal version
        answer = source.get_stamped(key, ByteRange(start, stop, version=version), cached=False, probing=True)
        if answer is None:
            problem = source.forbidden or "it does not exist"
            raise ConfigError(f"Cannot fetch {shown}: {problem}; check the address and the credentials")
        data, version = answer
        return data

    try:
        with closing(source):
            head = read(0, 9)
            header_bytes = int.from_bytes(head[:8], "little")
            if head[8:] != b"{" or not 2 <= header_bytes <= _HEADER_BYTES:
                raise ConfigError(no_model)
            ends = re.findall(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,18})\s*\]', read(8, 8 + header_bytes))
            size = 8 + header_bytes + max(map(int, ends), default=0)
            if size > LARGEST_BYTES:
                raise ConfigError(f"{shown} has {format_size(size)}; models have at most {format_size(LARGEST_BYTES)}")
            log.info("Fetching %s (%s)", shown, format_size(size))
            for start in range(0, size, _PART_BYTES):
                data = read(start, min(start + _PART_BYTES, size))
                sums.update(data)
                file.write(data)
    except FetchError as error:
        raise ConfigError(f"{shown} is incomplete or no model: {error}; publish it again") from error
    except DataError as error:
        if "status 200 for a range" in str(error):
            raise ConfigError(f"{no_model} (it was sent whole, as `python -m http.server` does)") from error
        raise
    file.flush()
    os.fsync(file.fileno())
    return sums.hexdigest()
