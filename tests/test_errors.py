"""Foreign messages are quoted as one plain line, and errors of disks have the remedy of their cause."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vesuvius.errors import StorageError, disk_remedy, one_line, storage_errors


def test_foreign_messages_become_one_line_without_terminal_codes() -> None:
    said = "\x1b[36mray::MapWorker\x1b[39m\n  died\x1b[1;31m here\x1b[0m"
    assert one_line(said) == "ray::MapWorker died here"
    assert one_line("x" * 300) == "x" * 197 + "..."


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_space_is_asked_for_on_a_full_disk_alone(number: int) -> None:
    error = OSError(number, os.strerror(number))
    with pytest.raises(StorageError) as raised, storage_errors("the config x", "free some space or choose another"):
        raise error
    assert ("free some space" in str(raised.value)) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert str(raised.value).endswith(" or choose another")


def test_a_link_to_a_missing_disk_is_named_with_its_target(tmp_path: Path) -> None:
    link = tmp_path / "runs"
    link.symlink_to(tmp_path / "mnt/disk")
    for act in (link.mkdir, (link / "x").mkdir, (link / "x").touch):
        with pytest.raises(StorageError) as raised, storage_errors("the run directory", "free some space"):
            act()
        assert f"; {link} is a link to {tmp_path / 'mnt/disk'}, which does not exist: mount its" in str(raised.value)


def test_an_error_of_safetensors_has_the_remedy_of_its_cause() -> None:
    error = SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)")
    assert disk_remedy(error) == "correct the permissions"
    with pytest.raises(SafetensorError) as raised:
        save_file({"x": torch.zeros(2)}, "/nowhere/x.safetensors")
    assert "check that the folder exists" in disk_remedy(raised.value)
