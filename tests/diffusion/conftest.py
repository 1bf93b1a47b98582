"""One thread for networks so small that waiting for a second one takes longer than the work."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """On a machine that does something else too, two threads were seen to take ten times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
