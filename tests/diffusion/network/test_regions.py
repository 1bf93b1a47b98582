"""Compiled blocks: equal ones compile once, nothing is kept twice, and what cannot be compiled runs all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from vesuvius.config import ModelConfig
from vesuvius.diffusion.network.layers import ResidualBlock, ZeroConv3d
from vesuvius.diffusion.network.regions import CompiledRegions, call_eager
from vesuvius.diffusion.network.unet import Execution, UNet, build_unet

SMALL = ModelConfig(channels=(8, 8), blocks_per_level=1, stem_stride=(2, 2, 2), full_res_channels=4, attention_heads=0)
ONE_LEVEL = SMALL.model_copy(update={"channels": (8,), "full_res_channels": 0})
PARTITIONED = "aot_eager_decomp_partition"  # what inductor is handed: no kernel is written, and its partitioner decides


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.no_grad()
def awake(execution: Execution, config: ModelConfig = SMALL) -> UNet:
    """A network whose zero-initialized maps and biases have been given values, as a few updates would."""
    model, generator = build_unet(config, 0, execution=execution), torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1, generator=generator)
    for module in model.modules():
        if isinstance(module, ZeroConv3d):
            module.weight.normal_(std=math.prod(module.weight.shape[1:]) ** -0.5, generator=generator)
    return model


def an_input() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(4)), torch.tensor([3, 500])


def trained(model: UNet) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, bytes that are kept for the backward pass besides the weights, and gradients."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    x, t = an_input()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = (model(x, t) - torch.roll(x, 1, dims=4)).square().mean()
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return float(loss.detach()), size, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_but_for_rounding(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        # The same float32 sums in another order.
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


RECOMPUTED, KEPT, CHECKPOINTED = Execution(True), Execution(False), Execution(True, (1,))


@pytest.mark.parametrize(
    ("backend", "execution", "last"),
    [
        pytest.param("eager", RECOMPUTED, True, id="traced-only"),
        # As a GPU trains; these compile for ten seconds.
        *(
            pytest.param(
                PARTITIONED, execution, last, id=f"{name}-{'zyxc' if last else 'czyx'}", marks=pytest.mark.long
            )
            for name, execution in (("recomputed", RECOMPUTED), ("kept", KEPT), ("checkpointed", CHECKPOINTED))
            for last in (False, True)
        ),
    ],
)
def test_equal_blocks_compile_once_with_equal_gradients_and_no_more_memory(
    backend: str, execution: Execution, last: bool
) -> None:
    counter = CompileCounterWithBackend(backend)
    calls: list[Any] = []

    def noted(*arguments: Any) -> Tensor:
        """Return the key that distinguishes calls."""
        modules = [a for a in arguments if isinstance(a, nn.Module)]
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        tensors += [parameter for module in modules for parameter in module.parameters()]
        calls.append(([type(module) for module in modules], [(t.shape, t.stride()) for t in tensors]))
        return call_eager(*arguments)

    config = ONE_LEVEL if backend == "eager" else SMALL  # each block takes half a second
    models = [awake(replace(execution, call=call), config) for call in (noted, CompiledRegions(counter))]
    if last:
        for model in models:
            model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    loss, size, gradients = trained(models[0])
    different = [call for number, call in enumerate(calls) if call not in calls[:number]]
    compiled_loss, compiled_size, compiled_gradients = trained(models[1])
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    assert_equal_but_for_rounding(gradients, compiled_gradients)
    assert backend == "eager" or compiled_size <= size, "the partitioner decides what is kept"
    assert counter.frame_count == len(different) < len(calls)
    trained(models[1])
    assert counter.frame_count == len(different), "the next micro-batch compiles nothing"


def test_operations_around_a_norm_are_compiled_with_it() -> None:
    """Joints, sums, the way out of boxes and the bias before it; not what only a convolution would read."""
    outside: set[str] = set()
    inside = False

    def region(*arguments: Any) -> Tensor:
        nonlocal inside
        inside = True
        out = call_eager(*arguments)
        inside = False
        return out

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not inside and not func.is_view and isinstance(out, Tensor) and out.ndim >= 5:
                outside.add(f"{func.overloadpacket.__name__} {out.shape[1]}")
            return out

    model, given = awake(Execution(call=region)), an_input()
    with Seen():
        model(*given)
    assert outside == {"convolution 8", "convolution 1"}, "convolutions of boxes, between levels, and the last"


def fails(*_: object) -> Any:
    raise OSError("no C compiler")


def without_gradients(model: UNet, block: ResidualBlock, batch: int) -> Tensor:
    x, rows = torch.ones(batch, 4, 2, 4, 4).cumsum(1), torch.ones(batch, 8).cumsum(1) / 32
    with torch.no_grad():
        return model.execution.run(0, block, {block: rows}, x)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_inference_is_compiled_once_for_each_batch_size(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    eager, compiled = awake(Execution()), awake(Execution(call=CompiledRegions(counter)))
    for batch, variants in ((2, 1), (1, 2), (2, 2)):  # a validation, its last batch, the next validation
        expected = without_gradients(eager, eager.full_down, batch)
        for _ in range(2):
            found = without_gradients(compiled, compiled.full_down, batch)
            # Sums in another order; nothing is overwritten by SiLU in place.
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert counter.frame_count == variants


def test_a_failure_in_inference_leaves_training_compiled(caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[Any] = []

    def refuses_inference(graph: Any, _: Any) -> Any:
        if not torch.is_grad_enabled():
            raise OSError("no C compiler")
        graphs.append(graph)
        return graph.forward

    regions = CompiledRegions(refuses_inference)
    model, eager = awake(Execution(call=regions)), awake(Execution())
    expected = without_gradients(eager, eager.full_down, 2)
    for _ in range(2):
        assert torch.equal(without_gradients(model, model.full_down, 2), expected)
    model.execution.run(
        0, model.full_down, {model.full_down: torch.ones(1, 8)}, torch.ones(1, 4, 2, 4, 4)
    ).sum().backward()
    assert graphs
    assert not regions.failure
    said = [record.getMessage() for record in caplog.records if record.name.startswith("vesuvius")]
    assert len(said) == 1
    assert "no C compiler" in said[0]
    assert said[0].endswith("; inference continues without it, slower")


def fails_backward(*graph_and_inputs: Any) -> Any:
    from functorch.compile import make_boxed_func  # takes seconds
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=fails)(*graph_and_inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", [fails, fails_backward])
def test_a_failed_compilation_continues_eagerly_with_one_warning(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loss, _, gradients = trained(awake(Execution()))
    regions = CompiledRegions(backend)
    model = awake(Execution(call=regions))
    for _ in range(2):
        model.zero_grad()
        found, _, found_gradients = trained(model)
        assert found == loss
        assert_equal_but_for_rounding(gradients, found_gradients)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("vesuvius")]
    assert len(said) == 1
    assert said[0].startswith(f"torch.compile failed: {regions.failure}; ")
    assert "no C compiler" in regions.failure
    assert said[0].endswith("set training.compile=false to skip the attempt")


def test_inference_is_compiled_on_another_thread() -> None:
    """As in a worker, which computes on two threads; torch keeps its limit of 8 variants for each."""
    regions = CompiledRegions(counter := CompileCounterWithBackend("eager"))
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        for size in range(9):
            pool.submit(torch.inference_mode()(regions), torch.exp, torch.ones(1 + size)).result()
        regions(torch.exp, torch.ones(10))
    assert counter.frame_count == 10


@pytest.mark.long
def test_a_deep_network_stays_compiled_after_its_micro_batch_is_halved() -> None:
    """Twelve kinds of blocks, each for two micro-batches; torch would say 'recompile_limit'."""
    regions = CompiledRegions("eager")
    for size in range(24):
        regions(torch.exp, torch.ones(1 + size, requires_grad=True))
    assert regions.failure == ""
