"""A GPU's memory over the life of a run, without a GPU: real code on fake tensors, and a simulated caching allocator.

`record_life` notes every allocation of a run (kernel test, steps, snapshot, validation, preview, resume) in order; each
replay on a card of another size takes a second.  As in `Footprint`, fake tensors are CPU tensors, so the recorder adds
what kernels take internally: workspaces of convolutions, FFTs and cuBLAS.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.caching_allocator import MIB, Block, CachingAllocator
from vesuvius.config import Config
from vesuvius.diffusion.estimate import generate
from vesuvius.diffusion.network.regions import CompiledRegions
from vesuvius.diffusion.network.unet import Execution
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.loader.device import apply_symmetries
from vesuvius.loader.intensity import normalized
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.start.prepare import IntensityRange, IntensityRanges
from vesuvius.training.forecast.memory_plan import Footprint, _FakeUNet, traced_step
from vesuvius.training.step.feed import Conditioner
from vesuvius.training.step.self_test import check_kernels
from vesuvius.training.step.setup import execution, resolve_amp
from vesuvius.training.step.step import TrainStep
from vesuvius.training.validation.fixed_patches import FixedPatches
from vesuvius.training.validation.validation import ValidationPatches, validate

# cuBLAS's default workspace on Hopper (8 MiB before), which torch allocates at the first product and keeps.
CUBLAS_BYTES = 32 * MIB
# Workspace of the greediest kernel that cuDNN times, relative to input and output of a convolution: both in float32.
# Assumed; with `greedy_trials` all that the card has left.
_TRIAL_SHARE = 2.0
# Batches whose voxels and noise the copy stream may not reuse yet: the loop's queue and the next one.
_IN_FLIGHT = 4
_CPU = torch.device("cpu")
Blocks = Callable[[nn.Module], AbstractContextManager[None]]
_aten = torch.ops.aten


@dataclass
class Life:
    """Events of a run: (kind, key, size); kinds alloc, free, workspace, trial, empty, mark and process."""

    events: list[tuple[str, Any, int]] = field(default_factory=list)


@dataclass
class Usage:
    """Peaks of a replay, over its processes and by phase."""

    allocated: int = 0
    reserved: int = 0
    retries: int = 0
    starved: int = 0  # kernels that had to do with a smaller workspace: slower, but not out of memory
    by_phase: dict[str, int] = field(default_factory=dict)  # allocated


class Recorder(Footprint):
    """Records allocations on the simulated card while entered.

    `workspace_share`: workspace of a convolution's kernel relative to its input and output.
    """

    def __init__(self, workspace_share: float) -> None:
        super().__init__()
        self.life, self._stream, self._on_card, self._next = Life(), 0, True, 0
        self._share, self._tried = workspace_share, set[Any]()

    def note(self, kind: str, key: Any = None, size: int = 0) -> None:
        self.life.events.append((kind, key, size))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Context in which new tensors are in host memory."""
        self._on_card, before = False, self._on_card
        try:
            yield
        finally:
            self._on_card = before

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Context of the copy stream."""
        self._stream = 1
        try:
            yield
        finally:
            self._stream = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            return 0.0  # figures that the host reads
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._note_internals(func, args, out)
        return out

    def run_graph(self, graph: GraphModule, arguments: list[Any]) -> Any:
        """Run a compiled graph: what fuses with its users gets no memory, the rest only until its last use."""
        values, dying = dict[Node, Any](), _last_uses(graph)
        for node in graph.graph.find_nodes(op="placeholder"):
            values[node] = arguments.pop(0)
        for node in graph.graph.nodes:
            if node.op == "output":
                return torch.fx.map_arg(node.args[0], values.__getitem__)
            if node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if _has_buffer(node):
                    for leaf in tree_leaves(values[node]):
                        if isinstance(leaf, Tensor):
                            self._follow(leaf)
                if isinstance(node.target, torch._ops.OpOverload):
                    self._note_internals(node.target, args, values[node])
                del args, kwargs
            elif node.op == "get_attr":
                values[node] = getattr(graph, node.target)
            for dead in dying.get(node, ()):
                del values[dead]
        raise AssertionError("a graph ends with its output")

    def _note_internals(self, func: Any, args: Any, out: Any) -> None:
        """Note memory that a kernel takes while it runs."""
        match func._overloadpacket:
            case _aten.convolution:
                self._kernels(func, args[0], args[1], [args[0].nbytes + out.nbytes])
            case _aten.convolution_backward:
                self._kernels(func, args[1], args[2], [args[0].nbytes + args[1].nbytes] * 2)
            case _aten._fft_r2c | _aten._fft_c2r | _aten._fft_c2c:
                self.note("workspace", None, 2 * out.nbytes)  # assumed: cuFFT's, and a copy of a destroyed input

    def _kernels(self, func: Any, x: Tensor, weight: Tensor, moved: list[int]) -> None:
        key = func, x.shape, weight.shape, x.dtype
        for size in moved:
            if key not in self._tried:
                self.note("trial", None, int(_TRIAL_SHARE * size))
            self.note("workspace", None, int(self._share * size))
        self._tried.add(key)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key in self._live:
            return
        self._next += 1
        index, on_card = self._next, self._on_card

        def freed(_: object) -> None:
            del self._live[key]
            if on_card:
                self.note("free", index)

        self._live[key] = weakref.ref(storage, freed)
        if on_card:
            self.note("alloc", (index, self._stream), storage.nbytes())


def _last_uses(graph: GraphModule) -> dict[Node, list[Node]]:
    """Nodes whose values nothing needs after a node."""
    last: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    dying: dict[Node, list[Node]] = {}
    for node, end in last.items():
        dying.setdefault(end, []).append(node)
    return dying


def _has_buffer(node: Node) -> bool:
    """Whether inductor would write a node's value to memory: assumed of all but pointwise ones that only others read
    with which they fuse.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if not (torch.Tag.pointwise in target.tags or target.is_view):
        return True
    for user in node.users:
        if user.op == "output" or not isinstance(user.target, torch._ops.OpOverload):
            return True
        fuses = torch.Tag.pointwise in user.target.tags or torch.Tag.reduction in user.target.tags
        if _has_buffer(user) if user.target.is_view else not fuses:
            return True
    return False


@contextmanager
def _compiled(network: nn.Module, recorder: Recorder, fake: FakeTensorMode) -> Iterator[None]:
    """Context in which the blocks of a network are compiled regions, split into passes as torch's partitioner does."""

    def compiler(graph: GraphModule, inputs: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            with _disable_current_modes(), fake:
                return recorder.run_graph(graph, arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    aot = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    regions = CompiledRegions(aot)

    def call(block: Any, *arguments: Any) -> Tensor:
        with _disable_current_modes():  # torch does not compile within a mode
            return regions(block, *arguments)

    torch.compiler.reset()
    for module in network.modules():
        if hasattr(module, "execution"):
            cast(Any, module).execution = replace(cast(Execution, module.execution), call=call)
    yield
    torch.compiler.reset()
    assert not regions.failure, regions.failure


def record_life(
    config: Config, batch: int, workspace_share: float = 1.0, compiled: bool = False, resumes: bool = True
) -> Life:
    """Allocations of a run of `config` with micro-batches of `batch` patches, from the kernel test to a resume."""
    config = config.with_micro_batch(batch)
    traced, patches = traced_step(config, None)._config, config.training.micro_batch * config.training.accumulate_steps
    update = {"accumulate_steps": min(patches // batch, 2), "train_batch_size": batch, "validate_patches": 1}
    traced = traced.with_training(**update)
    recorder = Recorder(workspace_share)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, recorder, np.errstate(all="ignore"):
        blocks: Blocks = partial(_compiled, recorder=recorder, fake=fake) if compiled else lambda _: nullcontext()
        _first_session(recorder, traced, blocks)
        if resumes:
            recorder.note("process")
            _resumed_session(recorder, traced, blocks)
    return recorder.life


def _first_session(recorder: Recorder, config: Config, blocks: Blocks) -> None:
    step = _begin(recorder, config)
    with blocks(step.network):
        _live(recorder, config, step)


def _live(recorder: Recorder, config: Config, step: TrainStep) -> None:
    _train(recorder, config, step, 1)
    recorder.note("mark", "snapshot")
    step.state_dict()
    recorder.note("mark", "validation")
    _validate(recorder, config, step)
    recorder.note("mark", "preview")
    shape, diffusion = (1, *config.data.patch_size), config.diffusion.model_copy(update={"sampler_steps": 2})
    channels = config.condition_channels
    condition = torch.empty(1, channels, *config.data.patch_size) if channels else None
    denoise = step.denoiser("ema")
    generate(denoise, step.schedule, diffusion, 0, [0], shape, _CPU, condition=condition)
    del condition
    _train(recorder, config, step, 1)


def _resumed_session(recorder: Recorder, config: Config, blocks: Blocks) -> None:
    recorder._tried.clear()
    with recorder.on_host():
        before = _new_step(config)
        for weight in before.network.parameters():
            weight.grad = torch.zeros_like(weight)
        before.apply(0.0)
        state = before.state_dict()
    step = _begin(recorder, config)
    recorder.note("mark", "resume")
    load = step.optimizer.load_state_dict

    def load_from_host(moments: Any) -> None:  # torch copies a host's moments to the device
        load(tree_map_only(Tensor, torch.clone, moments))

    with patch.object(step.optimizer, "load_state_dict", load_from_host):
        step.load_state_dict(state)
    with blocks(step.network):
        _train(recorder, config, step, 1)


def _begin(recorder: Recorder, config: Config) -> TrainStep:
    recorder.note("mark", "kernel test")
    recorder.note("alloc", ("cuBLAS", 0), CUBLAS_BYTES)
    with patch("vesuvius.training.step.self_test.empty_cache", partial(recorder.note, "empty")):
        check_kernels(config, config.training.micro_batch, _CPU, resolve_amp(config.training.amp, _CPU))
    recorder.note("mark", "network")
    return _new_step(config)


def _new_step(config: Config) -> TrainStep:
    network = _FakeUNet(config.model, config.input_channels, execution(config.training))
    for weight in network.parameters():
        if weight.ndim == 5 and config.training.channels_last:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    return TrainStep(config, network, Schedule.from_config(config.diffusion), _CPU)


def _train(recorder: Recorder, config: Config, step: TrainStep, steps: int) -> None:
    batch, size, channels = config.training.micro_batch, config.data.patch_size, config.condition_channels
    conditioner = Conditioner(config.data.class_values, [IntensityRange(0, 255)], _CPU)
    scales = np.tile([[0.0, 127.5]], (batch, 1))
    in_flight: deque[Any] = deque(maxlen=_IN_FLIGHT)
    for _ in range(steps):
        for number in range(config.training.accumulate_steps):
            recorder.note("mark", "step")
            with recorder.copying():
                raw = [torch.empty(batch, *size, dtype=torch.uint8) for _ in range(1 + bool(channels))]
                eps = torch.empty(batch, 1, *size)
            in_flight.append((raw, eps))
            turned = [apply_symmetries(each, [Augmentation((True, False, False))] * batch).unsqueeze(1) for each in raw]
            x_0 = normalized(turned[0], scales)
            condition = conditioner(turned[1], [0] * batch) if channels else None
            del turned, raw
            last = number == config.training.accumulate_steps - 1
            step.accumulate(x_0, np.arange(batch), np.zeros(batch, np.int64), condition, last, eps)
        recorder.note("mark", "update")
        step.apply(config.training.lr)
        del x_0, condition, eps


def _validate(recorder: Recorder, config: Config, step: TrainStep) -> None:
    count, size = config.training.validate_patches, config.data.patch_size
    stored = np.zeros((count, *size), np.uint8)
    fixed = FixedPatches(
        True, (0,) * count, ((0, 0, 0),) * count, stored, stored if config.condition_channels else None
    )
    one = (IntensityRange(0, 255),)
    conditioner = Conditioner(config.data.class_values, one, _CPU)
    reference = ValidationPatches(fixed, IntensityRanges(one, one), conditioner, _CPU)
    denoisers = {name: step.denoiser(name) for name in step.weight_names}
    validate(config, reference, step.schedule, Spectrum.white(), denoisers, lambda: False)


def replay(life: Life, capacity: int, greedy_trials: bool = False) -> Usage:
    """Replay a life on a card with `capacity` bytes for torch.

    If a workspace does not fit, torch takes a kernel with a smaller one (`Conv_v8.cpp`); that of trials it halves until
    it fits.  `greedy_trials`: cuDNN times a kernel whose workspace is all that the card has left.

    Raises torch.OutOfMemoryError, with the phase.
    """
    usage, card, phase = Usage(), CachingAllocator(capacity), ""
    blocks: dict[int, Block] = {}

    def ended() -> None:
        usage.allocated = max(usage.allocated, card.peak_allocated)
        usage.reserved = max(usage.reserved, card.peak_reserved)
        usage.retries += card.retries

    try:
        for kind, key, size in life.events:
            match kind:
                case "mark":
                    phase = key
                case "process":
                    ended()
                    card = CachingAllocator(capacity)
                    blocks.clear()
                case "alloc":
                    blocks[key[0]] = card.allocate(size, key[1])
                case "free" if key in blocks:
                    card.free(blocks.pop(key))
                case "workspace":
                    try:
                        card.free(card.allocate(size))
                    except torch.OutOfMemoryError:
                        usage.starved += 1
                case "trial":
                    _try_kernels(
                        card, max(card.capacity - card.reserved, card.largest_free()) if greedy_trials else size
                    )
                case "empty":
                    card.empty_cache()
            if phase:
                usage.by_phase[phase] = max(usage.by_phase.get(phase, 0), card.allocated + (kind == "workspace") * size)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{phase}: {error}") from None
    ended()
    return usage


def _try_kernels(card: CachingAllocator, size: int) -> None:
    while size > MIB:
        try:
            card.free(card.allocate(size))
            return
        except torch.OutOfMemoryError:
            size //= 2


def runs_on(life: Life, capacity: int, greedy_trials: bool = False) -> bool:
    try:
        replay(life, capacity, greedy_trials)
    except torch.OutOfMemoryError:
        return False
    return True


def least_capacity(life: Life, greedy_trials: bool = False, within: int = 16 * MIB) -> int:
    """Smallest card, to `within` bytes, on which a life runs."""
    unlimited = replay(life, 2**50, greedy_trials=False)
    fails, runs = unlimited.allocated - 1, unlimited.reserved
    while not runs_on(life, runs, greedy_trials):
        fails, runs = runs, int(1.05 * runs)
    while runs - fails > within:
        middle = (runs + fails) // 2
        if runs_on(life, middle, greedy_trials):
            runs = middle
        else:
            fails = middle
    return runs
