"""Draw docs/plan.svg from the plan itself: cells, a region, the phases of two passes, and the window of regions.

python tools/plan_picture.py docs/plan.svg
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from vesuvius.config import AugmentConfig, DataConfig, ValidationConfig, VolumeConfig
from vesuvius.plan.make_plan import make_plan, plan_volume, split_volume
from vesuvius.plan.order import Mixing
from vesuvius.plan.plan import Plan, draw_pass

SHAPE, PATCH, CHUNK = (512, 1024, 1024), (72, 136, 136), (128, 128, 128)
BLUE, ORANGE, GREEN, GRAY = "#2b6cb0", "#c05621", "#2f855a", "#a0aec0"


def main() -> None:
    """Write the picture to the path on the command line."""
    matplotlib.rcParams.update({"svg.hashsalt": "plan", "font.size": 9, "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.6), width_ratios=(1, 1, 1.15), layout="constrained")
    plan = _plan()
    visits = plan.volumes[0].num_visits_per_pass
    for number, axis in enumerate(axes[:2]):
        _draw_pass(axis, plan, number * visits)
    axes[0].set_title("a pass: starts are cut into cells (blue);\na cell's region (green) is read once")
    axes[1].set_title("the next pass: another phase,\nother cells")
    _draw_window(axes[2], Mixing(16, 8))
    axes[2].set_title(
        "a window of M = 16 regions, K = 8 patches of each:\neach round takes one patch of every region in it"
    )
    figure.savefig(sys.argv[1], metadata={"Date": None})


def _plan() -> Plan:
    config = DataConfig(
        volumes=(VolumeConfig(path="v"),),
        patch_size=PATCH,
        augment=AugmentConfig(),
        validation=ValidationConfig(fraction=0),
    )
    split = split_volume("v", SHAPE, PATCH, config.validation)
    return make_plan(3, config, [plan_volume("v", split, SHAPE, CHUNK, "uint8", 1.0, config)])


def _draw_pass(axis: Any, plan: Plan, first_visit: int) -> None:
    """The y-x plane: chunks, cells, and one visit with its region and patches."""
    volume = plan.volumes[0]
    for edge in range(0, SHAPE[1] + 1, CHUNK[1]):
        axis.plot([0, SHAPE[2]], [edge, edge], color=GRAY, lw=0.8)
        axis.plot([edge, edge], [0, SHAPE[1]], color=GRAY, lw=0.8)
    visits = [plan.visit(first_visit + n) for n in range(volume.num_visits_per_pass)]
    visit = max(visits, key=lambda v: (v.cell[1][1] - v.cell[0][1]) * (v.cell[1][2] - v.cell[0][2]))
    phases, _ = draw_pass(plan.seed, 0, first_visit // volume.num_visits_per_pass, volume.cells, volume.num_positions)
    for y0, y1 in volume.cells.axes[1].cells(phases[1]):
        for x0, x1 in volume.cells.axes[2].cells(phases[2]):
            axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=BLUE, lw=1))
    (_, y0, x0), (_, y1, x1) = visit.cell
    axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fc=BLUE, alpha=0.25))
    (_, y0, x0), (_, y1, x1) = visit.region
    axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=GREEN, lw=2.2))
    starts = np.array([plan.sample_of(visit, index).start_zyx for index in plan.mixing.samples_of(visit.slot)])
    axis.plot(starts[:, 2], starts[:, 1], ".", color=ORANGE, ms=4)
    _, y, x = starts[0]
    axis.add_patch(Rectangle((x, y), PATCH[2], PATCH[1], fill=False, ec=ORANGE, lw=1.6))
    axis.annotate("a patch and its start", (x, y), (x + 60, y + 240), color=ORANGE, arrowprops={"arrowstyle": "-"})
    axis.annotate("chunks", (4, SHAPE[1] - 8), color="#718096")
    axis.set(xlim=(-8, SHAPE[2] + 8), ylim=(SHAPE[1] + 8, -8), xlabel="x, voxels", ylabel="y, voxels", aspect="equal")


def _draw_window(axis: Any, mixing: Mixing) -> None:
    """Rounds from left to right; the slots in flight, and the slot of each sample of a batch of 8."""
    rounds = 14
    for slot in range(mixing.first_slot(rounds) + mixing.regions):
        life = mixing.rounds_of(slot)
        shade = BLUE if slot // 8 % 2 else GREEN
        axis.add_patch(Rectangle((life.start, slot + 0.1), len(life), 0.8, fc=shade, alpha=0.35, lw=0))
    for index in range(9 * mixing.regions, 9 * mixing.regions + 8):
        place = index / mixing.regions + 0.5 / mixing.regions
        axis.plot(place, mixing.slot_of(index) + 0.5, ".", color=ORANGE, ms=5)
    axis.annotate("a batch of 8", (9.25, 31), (6.2, 38), color=ORANGE, arrowprops={"arrowstyle": "-"})
    axis.annotate("colors: tasks of 8 regions,\neach read by one worker", (7.2, 4), color="#4a5568")
    axis.set(
        xlim=(0, rounds), ylim=(0, 42), xlabel=f"round of {mixing.regions} samples", ylabel="slot: order of reading"
    )


if __name__ == "__main__":
    main()
