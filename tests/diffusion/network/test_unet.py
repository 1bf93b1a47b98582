"""The network's shapes, initial weights, precision and refusals."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vesuvius.config import ModelConfig
from vesuvius.diffusion.network import unet
from vesuvius.diffusion.network.layers import ZeroConv3d
from vesuvius.diffusion.network.unet import Context, Execution, UNet, build_unet
from vesuvius.errors import ConfigError

ALL_PARTS = ModelConfig(
    channels=(8, 16), blocks_per_level=2, stem_stride=(1, 2, 2), full_res_channels=4, attention_heads=2
)
ONE_LEVEL = ModelConfig(
    channels=(8,), blocks_per_level=1, stem_stride=(2, 2, 2), full_res_channels=0, attention_heads=1
)
NARROWING = ModelConfig(channels=(24, 8), stem_stride=(1, 1, 1), full_res_channels=0, attention_heads=0)
FLAT = ModelConfig(  # as for slices further apart than pixels
    channels=(8, 12, 16), strides=((1, 2, 2), (3, 1, 2)), stem_stride=(1, 2, 2), full_res_channels=4, attention_heads=2
)
IDS = {"one_level": ONE_LEVEL, "anisotropic": FLAT}
CONFIGS = pytest.mark.parametrize("config", IDS.values(), ids=IDS.keys())
SIZE = (6, 8, 24)


def _input(batch: int = 2, channels: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn((batch, channels, *SIZE), generator=torch.Generator().manual_seed(4))
    return x, torch.arange(batch) * 300


@torch.no_grad()
def _awake(config: ModelConfig, channels: int = 1, execution: Execution = Execution()) -> UNet:
    """A network whose zero-initialized maps have been given weights, as a few updates would."""
    model, generator = build_unet(config, 0, channels, execution=execution), torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, ZeroConv3d):
            module.weight.normal_(std=math.prod(module.weight.shape[1:]) ** -0.5, generator=generator)
    return model


@CONFIGS
def test_initial_output_is_zero_with_one_channel_and_the_input_size(config: ModelConfig) -> None:
    x, t = _input(channels=2)
    out = build_unet(config, 0, 2)(x, t)
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.zeros_like(x[:, :1]))


@CONFIGS
def test_every_parameter_gets_a_gradient_once_the_zero_convolutions_are_nonzero(config: ModelConfig) -> None:
    model, (x, t) = build_unet(config, 0), _input()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.roll(x, 1, dims=4)
    # The output convolution moves in the first step, the branches' last convolutions in the second (behind the
    # attention's or the trunk's in the third), all that is before them in the next.
    for _ in range(4):
        optimizer.zero_grad()
        F.mse_loss(model(x, t), target).backward()
        optimizer.step()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert dead == []


def test_a_seed_fixes_the_weights_without_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_unet(ALL_PARTS, 7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_unet(ALL_PARTS, 7).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_unet(ALL_PARTS, 8).state_dict()
    assert not torch.equal(first["patch_embed.weight"], other["patch_embed.weight"])


def test_adding_a_module_does_not_change_other_initial_weights() -> None:
    without = build_unet(ALL_PARTS.model_copy(update={"attention_heads": 0}), 0).state_dict()
    with_attention = build_unet(ALL_PARTS, 0).state_dict()
    assert len(with_attention) > len(without)
    assert all(torch.equal(without[name], with_attention[name]) for name in without)


def test_initial_weights_have_variance_one_over_fan_in() -> None:
    weight = build_unet(ALL_PARTS, 0).get_parameter("trunk.middle_1.conv_1.weight")
    n = weight.numel()
    # 5 standard deviations of the variance of n independent normals.
    assert abs(weight.var() * 16 * 27 - 1) < 5 * math.sqrt(2 / n)
    rows = weight.flatten(1)
    assert torch.linalg.matrix_rank(rows) == 16


@CONFIGS
def test_t_matters_and_each_sample_sees_only_its_own(config: ModelConfig) -> None:
    model, (x, t) = _awake(config).eval(), _input(batch=3)
    together = model(x, t)
    assert (model(x, t + 1) - together).abs().max() > 1e-4
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1]) for i in range(3)])
    # 1e-5: the same float32 sums, blocked differently for another batch size; outputs are of order 1.
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@CONFIGS
def test_bf16_autocast_is_close_to_float32(config: ModelConfig) -> None:
    model, (x, t) = _awake(config).eval(), _input()
    exact = model(x, t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(x, t)
    assert rounded.dtype == torch.float32
    # bf16 rounds by up to 2^-9 = 0.2 %; some 30 roundings in a row add up to about the square root of 30 of that.
    assert (rounded - exact).norm() / exact.norm() < 0.02
    assert not torch.equal(rounded, exact)


def _loss_and_gradients(model: UNet) -> tuple[Tensor, dict[str, Tensor]]:
    x, t = _input()
    loss = F.mse_loss(model(x, t), torch.roll(x, 1, dims=4))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sample(4)
@CONFIGS
@pytest.mark.parametrize(
    "execution",
    [Execution(True), Execution(False, checkpoint_levels=(0, 1)), Execution(True, (0, 1, 2, 3))],
    ids=["recomputed", "checkpointed", "both"],
)
def test_execution_options_do_not_change_results(config: ModelConfig, execution: Execution) -> None:
    plain, other = _awake(config, execution=Execution(False)), _awake(config, execution=execution)
    loss, gradients = _loss_and_gradients(plain)
    other_loss, other_gradients = _loss_and_gradients(other)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        # 1e-5: the same kernels, but gradients that meet are added in another order.
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


class _Layouts(TorchDispatchMode):
    """Count the newly allocated tensors that are not channels last, by operation.

    Views move nothing.  Of one channel, or one voxel, both orders are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []
        self.count = 0
        self.tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in tree_leaves(args) if isinstance(part, Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, Tensor) or tensor.untyped_storage().data_ptr() in given:
                continue
            if tensor.ndim == 5 and tensor.shape[1] > 1 and tensor.shape[2:].numel() > 27:  # no kernel of weights
                self.count += 1
                if "aten.stack" in str(func):
                    self.tokens = tensor.shape[3]
                if not tensor.is_contiguous(memory_format=torch.channels_last_3d):
                    self.others.append(f"{func} {tuple(tensor.shape)} {tensor.stride()}")
        return out


@pytest.fixture
def one_dnn() -> Iterator[None]:
    """Small convolutions by oneDNN, which keeps the memory order: with one thread torch has its own for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.sample(7)
@pytest.mark.usefixtures("one_dnn")
@CONFIGS
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_order_holds_for_all_activations_and_gradients(
    config: ModelConfig, recompute: bool, channels: int
) -> None:
    model = _awake(config, channels, Execution(recompute))
    model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    x, t = _input(2, channels)  # contiguous, as the loader delivers it
    with _Layouts() as layouts:
        model(x, t).square().sum().backward()
    assert layouts.count > 60
    # Attention's queries, keys and values have five axes too: of their gradients one tensor is made, and turned.
    allowed = ("aten.stack.default (3, ", f"aten.clone.default (2, {layouts.tokens}, 3, ")
    assert [line for line in layouts.others if not line.startswith(allowed)] == []
    with _Layouts() as layouts:
        _awake(config, channels, Execution(recompute))(x, t).square().sum().backward()
    assert layouts.others, "contiguous weights are seen"


class _LargestOutput(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("config", [*IDS.values(), NARROWING])
def test_the_size_check_counts_the_largest_tensor_of_forward(config: ModelConfig) -> None:
    size = (72, 136, 136)
    # Fake and not meta tensors: on meta, attention takes the path that forms the whole matrix of scores, which neither
    # the CPU nor a GPU does.
    with FakeTensorMode():
        model, x, t = UNet(config), torch.empty(2, 1, *size), torch.zeros(2, dtype=torch.int64)
        with _LargestOutput() as seen:
            model(x, t)
    assert seen.elements == unet.largest_activation_elements(config, 2, size)


def test_a_batch_beyond_32_bit_indexing_is_refused() -> None:
    config, size = ModelConfig(), (72, 136, 136)
    per_sample = unet.largest_activation_elements(config, 1, size)
    batch = -(-(2**31) // per_sample)
    with torch.device("meta"):
        model = UNet(config)
        with pytest.raises(ConfigError, match=rf"a tensor of {batch * per_sample} elements.*2\^31.*train_batch_size"):
            model(torch.empty(batch, 1, *size), torch.zeros(batch, dtype=torch.int64))
        model(torch.empty(batch - 1, 1, *size), torch.zeros(batch - 1, dtype=torch.int64))


def test_the_default_network_has_the_documented_size_and_cost() -> None:
    with torch.device("meta"):
        model, x, t = UNet(ModelConfig()), torch.empty(1, 1, 72, 136, 136), torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(x, t)
    # exact counts of this structure, given to three digits in the documentation
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 154
    assert round(counter.get_total_flops() / 1e12, 1) == 4.7


@CONFIGS
@torch.no_grad()
def test_a_window_changes_nothing_at_first_and_later_reaches_the_patch_from_its_ends(config: ModelConfig) -> None:
    x, t = _input(channels=5)  # two of x_t, the condition, the flag and the level; one more is the window
    wide = torch.cat([x, x[:, :1]], dim=1)
    plain, model = _awake(config, 5), build_unet(config, 0, 6, context=Context(4, 1))
    model.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(model(wide, t), plain(x, t))
    for out in model.context.outs:  # type: ignore[union-attr]
        out.weight.normal_(generator=torch.Generator().manual_seed(6))
    far = wide.clone()
    far[:, -1, :, 0, 0] += 9
    assert not torch.equal(model(wide, t), plain(x, t))
    assert not torch.equal(model(far, t), model(wide, t))


def test_the_center_of_a_window_keeps_a_ramp() -> None:
    """A ramp in units of the patch: from -2 to 2 over the window, from -0.5 to 0.5 over the patch."""
    window = ((torch.arange(24) + 0.5) / 24 - 0.5) * 4
    for axis, size in itertools.product(range(3), (6, 8, 24)):
        shape, sizes = [1] * 5, [1, 1, 1]
        shape[2 + axis], sizes[axis] = 24, size
        ramp = unet._center(window.view(shape), 4, sizes).flatten()
        torch.testing.assert_close(ramp, (torch.arange(size) + 0.5) / size - 0.5, rtol=0, atol=1e-6)
