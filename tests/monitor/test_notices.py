"""What two samples in a row give cause to say: each trouble once, with a record where others act on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vesuvius.monitor.notices import Notices, others_text
from vesuvius.monitor.probes.cgroup import CgroupUse
from vesuvius.monitor.probes.gpus import GpuUse
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import SystemSample, read_machine
from vesuvius.runlog.units import GIB

GPU = GpuUse(0, "GPU-A", "NVIDIA H200", 1, 2, 0.5, 300.0, 91.0, slowed_by=(), power_capped=True, ecc_uncorrected=2)
MACHINE = read_machine()


def sample(clock_s: float, *gpus: GpuUse) -> SystemSample:
    return SystemSample(0.0, (), 0, None, MACHINE, gpus, clock_s)


def said(*samples: SystemSample) -> list[tuple[str, dict[str, Any]]]:
    notices = Notices()
    pairs = pairwise(samples)
    return [(notice.event, notice.fields) for before, now in pairs for notice in notices.of(before, now)]


def test_a_gpu_that_is_too_hot_is_said_after_ten_seconds_once_and_again_after_it_has_recovered() -> None:
    hot = replace(GPU, slowed_by=("heat (hardware limit)",))
    spell = [sample(t, hot) for t in range(30)]
    event = ("gpu_slowed", {"gpu": 0, "reasons": ["heat (hardware limit)"], "temperature_c": 91.0})
    assert said(*spell[:11]) == [], "seen since the second sample, for nine seconds"
    assert said(*spell) == [event]
    assert said(*spell, sample(30, GPU), *(sample(31 + t, hot) for t in range(12))) == [event] * 2
    flickering = [sample(t, hot if t % 9 else GPU) for t in range(60)]
    assert said(*flickering) == []


def test_a_gap_in_nvmls_answers_hides_neither_errors_of_memory_nor_heat() -> None:
    hot = replace(GPU, slowed_by=("heat (hardware limit)",))
    gap, worse = [sample(float(t)) for t in range(3, 9)], replace(hot, ecc_uncorrected=3)
    found = said(*(sample(t, hot) for t in range(3)), *gap, *(sample(t, worse) for t in range(9, 13)))
    assert [event for event, _ in found] == ["gpu_ecc", "gpu_slowed"]


def test_errors_of_memory_are_said_as_they_come_not_those_from_before_the_run() -> None:
    worse = replace(GPU, ecc_uncorrected=5)
    silent = replace(GPU, ecc_uncorrected=None)
    assert said(sample(0, GPU), sample(1, worse), sample(2, worse)) == [("gpu_ecc", {"gpu": 0, "errors": 3})]
    assert said(sample(0), sample(1, worse), sample(2, silent), sample(3, worse)) == [], "nothing to compare with"
    other = replace(worse, uuid="GPU-B", index=1)
    assert said(sample(0, GPU), sample(1, GPU, other)) == [], "another GPU that appears"


def test_errors_of_another_gpu_of_the_machine_do_not_ask_to_stop_this_run() -> None:
    ours, other = replace(GPU, uuid="GPU-A"), replace(GPU, uuid="GPU-B", index=1)
    worse = (replace(ours, ecc_uncorrected=3), replace(other, ecc_uncorrected=3))
    found = Notices("A").of(sample(0, ours, other), sample(1, *worse))
    assert [(notice.level, notice.fields["gpu"]) for notice in found] == [
        (logging.ERROR, 0),
        (logging.WARNING, 1),
    ]
    assert "stop, have the GPU checked" in found[0].text
    assert found[1].text.endswith("this run does not use that GPU")
    found = Notices("a part of a GPU").of(sample(0, ours, other), sample(1, *worse))
    assert [notice.level for notice in found] == [logging.ERROR] * 2, "each may be ours"


def test_a_kill_in_the_cgroup_of_the_run_is_said() -> None:
    """For whoever searches the log."""
    looks = [replace(sample(t), cgroup=CgroupUse("/job", 0, 0, 0, (), kills)) for t, kills in enumerate((3, 3, 5))]
    assert Notices().of(looks[0], looks[1]) == []
    (notice,) = Notices().of(looks[1], looks[2])
    assert notice.level == logging.ERROR
    assert "out of memory: the kernel has killed 2 process(es) of cgroup /job" in notice.text
    moved = replace(looks[2], cgroup=CgroupUse("/other", 0, 0, 0, (), 9))
    assert Notices().of(looks[1], moved) == [], "another count"


def _beside(pid: int, gib: float, rate: float) -> tuple[ProcessUse, float]:
    return ProcessUse(
        pid, 1, f"/opt/bin/program{pid} jobs/fill.py --fast", 0.0, "running", int(gib * GIB), 0, 0, 0, 0.0
    ), rate


def test_the_process_that_grows_is_named_first_with_its_size_and_rate() -> None:
    others = [_beside(pid, gib, 0.0) for pid, gib in ((1, 8.0), (2, 7.0), (3, 6.0))] + [_beside(4, 0.5, 496e6)]
    text = others_text(GIB, 1, others)
    assert "this run holds 1.00 GiB of the memory in use" in text
    first, second, third = text.partition("beside it: ")[2].split(", program")
    assert first == "program4 fill.py (pid 4) 0.50 GiB, which grows 496 MB/s"
    assert (second, third) == ("1 fill.py (pid 1) 8.00 GiB", "2 fill.py (pid 2) 7.00 GiB")
    quiet = others_text(GIB, 2, others[:3])
    assert "grows" not in quiet
    assert "about 1.00 GiB in 2 ranks" in quiet
    assert quiet.index("pid 1") < quiet.index("pid 2") < quiet.index("pid 3")
    assert others_text(GIB, 1, []).endswith("no process that can be seen from here")
