"""Inductor's kernels, written as for a GPU, become machine code without one."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vesuvius.diffusion.network.layers import NormSiLU
from vesuvius.diffusion.network.regions import CompiledRegions

pytest.importorskip("triton", reason="Triton has no wheel for this platform or Python")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "tools" / "bench"), *sys.path])
    import step_cost
    import triton_kernels

    return step_cost, triton_kernels


@pytest.mark.long  # of a tool that a developer runs
def test_each_configuration_of_a_norm_becomes_machine_code_and_one_that_does_not_fit_is_an_error(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    # Wrong programs: only the first configuration, no assembler, a failure or a spill passed over, another GPU's code.
    step_cost, triton_kernels = bench
    written: Any = {"sm_80": {}}
    x = torch.zeros(1, 32, 8, 8, 8).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    torch.compiler.reset()
    regions = CompiledRegions(step_cost.backend(lambda graph, arguments, kernels: graph(*arguments), written))
    regions(NormSiLU(32), x, nn.Identity(), True)
    torch.compiler.reset()
    assert not regions.failure
    sources = written["sm_80"]
    assert any("sigmoid" in name for name in sources.values()), "no backward pass"
    assert all("cc=80" in source for source in sources)

    kernels = triton_kernels.assembled(sources, "sm_80")
    assert len({kernel.kernel for kernel in kernels}) == len(sources)
    assert len(kernels) > len(sources), "a kernel of two memory orders has two configurations"
    assert all(0 < kernel.registers < 255 and kernel.spilled_bytes == 0 for kernel in kernels)
    assert f"| all | {len(kernels)} |" in triton_kernels.table(kernels)

    source, name = next(each for each in sources.items() if each[1].startswith("triton_red_"))
    compiled = triton_kernels.CachingAutotuner._precompile_config

    def crowded(autotuner: Any, config: Any) -> Any:
        """Compile a reduction with more accumulators in a thread than it has registers."""
        config = copy.deepcopy(config)
        config.kwargs, config.num_warps = {"XBLOCK": 64, "R0_BLOCK": 64}, 1
        return compiled(autotuner, config)

    with monkeypatch.context() as change:
        change.setattr(triton_kernels.CachingAutotuner, "_precompile_config", crowded)
        assert triton_kernels.spilling(triton_kernels.assembled({source: name}, "sm_80")) == {f"{name}.0"}
    with monkeypatch.context() as change:
        change.setitem(triton_kernels.CARDS, "sm_80", (*triton_kernels.CARDS["sm_80"][:-1], 0))
        with pytest.raises(OutOfResources, match="shared memory"):
            triton_kernels.assembled({source: name}, "sm_80")
    with pytest.raises(Exception, match="nothing"):
        triton_kernels.assembled({source.replace("tl.store", "tl.nothing"): name}, "sm_80")


@pytest.mark.long
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("config", "batch", "overrides"),
    [
        ("exp001_full", 8, ["training.recompute_norm=false"]),
        ("exp001_full", 4, []),
        ("exp001_full", 1, []),
        ("demo", 8, []),
        ("demo", 8, ["training.channels_last=false", "training.recompute_norm=false"]),
        ("demo", 8, ["training.amp=fp16"]),
    ],
)
def test_all_blocks_of_the_configs_become_machine_code_that_does_not_spill(
    bench: Any, config: str, batch: int, overrides: list[str], inference: bool
) -> None:
    step_cost, triton_kernels = bench
    sources: Any = {arch: {} for arch in triton_kernels.CARDS}
    count = step_cost.count_evaluation if inference else step_cost.count
    count(REPOSITORY / f"configs/{config}.yaml", overrides, batch, compiled=True, sources=sources)
    for arch, written in sources.items():
        kernels = triton_kernels.assembled(written, arch)
        print(f"\n{config} {batch} {overrides} {arch}\n{triton_kernels.table(kernels)}")
        assert len(kernels) >= len(written) >= 20
        assert triton_kernels.spilling(kernels) == set()
