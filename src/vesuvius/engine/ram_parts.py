"""The predicted memory of a run on its host, part by part, and the lines that tell it.  `ram_plan.py` works it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vesuvius.observe.units import size_text


@dataclass(frozen=True)
class RamPlan:
    """Bytes of host memory that a run takes at its peak; None = not known, because torch is not installed here.

    Attributes:
        workers: reader processes; 0 = the trainer reads.
        readers_at_once: reader processes that live at the same time: twice the workers while one execution of Ray Data
            hands over to the next, which a short run never does; not more than there are tasks.
        gpu: whether it was planned for a run on a GPU.
        reader_process_bytes: interpreter, Ray, zarr and numpy of one reader.  Measured.
        reader_ring_bytes: the blocks that one reader decodes into: 2 of `ReaderJob.block_bytes`.  Computed.
        reader_staged_bytes: compressed chunks on their way from a remote store, at most; 0 on a disk.  Computed.
        reader_scratch_bytes: chunks in work, each with its compressed bytes, one a core.  Computed.
        store_bytes: of the object store, what can be in use at once (`store_need_bytes`; twice that while one
            execution hands over to the next) with an eighth for holes, at most what the run reads or Ray is allowed;
            with the plan's maps.  Computed.
        store_capacity_bytes: what Ray is told to use at most; not part of the total.
        ray_bytes: Ray's daemons, Ray Data's actors, and idle processes that it starts ahead.  Measured.  0 for a
            cluster that others have started.
        trainer_process_bytes: interpreter, torch, zarr, and Ray where it has readers.  Measured.
        cuda_bytes: CUDA's libraries in host memory; assumed; 0 on a CPU.
        local_reader_bytes: what a reader holds, in the trainer, with `workers: 0`.  Computed.
        batches_bytes: batches ahead and in hand, in the stored dtype; pinned on a GPU.  Computed.
        fixed_bytes: patches of validation and previews, and the plan's maps.  Computed.
        snapshot_bytes: the copy of a checkpoint that waits for the disk.  Computed.
        step_bytes: weights, gradients, optimizer, averages and activations, on a CPU; 0 on a GPU.  Computed
            (`memory_plan.py`), with an allowance for what the allocator cannot use.
        vram_bytes: memory of the GPU, of one rank; not part of the total.
    """

    workers: int
    readers_at_once: int
    gpu: bool | None
    reader_process_bytes: int
    reader_ring_bytes: int
    reader_staged_bytes: int
    reader_scratch_bytes: int
    store_bytes: int
    store_capacity_bytes: int
    ray_bytes: int
    trainer_process_bytes: int
    cuda_bytes: int | None
    local_reader_bytes: int
    batches_bytes: int
    fixed_bytes: int
    snapshot_bytes: int | None
    step_bytes: int | None
    vram_bytes: int | None

    @property
    def reader_bytes(self) -> int:
        """Private memory of one reader."""
        return self.reader_process_bytes + self.reader_ring_bytes + self.reader_staged_bytes + self.reader_scratch_bytes

    @property
    def readers_bytes(self) -> int:
        """Private memory of all readers that live at once."""
        return self.readers_at_once * self.reader_bytes

    @property
    def trainer_bytes(self) -> int:
        """Private memory of the trainer, what is not known left out."""
        known = self.trainer_process_bytes + self.local_reader_bytes + self.batches_bytes + self.fixed_bytes
        return known + sum(part or 0 for part in (self.cuda_bytes, self.snapshot_bytes, self.step_bytes))

    @property
    def total_bytes(self) -> int:
        """All of it; without what is not known, which `complete` tells."""
        return self.readers_bytes + self.store_bytes + self.ray_bytes + self.trainer_bytes

    @property
    def complete(self) -> bool:
        """Whether nothing is left out of the total."""
        return None not in (self.cuda_bytes, self.snapshot_bytes, self.step_bytes)

    def lines(self) -> list[str]:
        """For people: the total, then its parts."""
        least = "" if self.complete else "at least "
        place = {True: " on a GPU", False: " on this CPU", None: ""}[self.gpu]
        return [
            f"host RAM   {least}{size_text(self.total_bytes)} at the peak, planned{place}",
            *self._reader_lines(),
            f"  trainer  {least}{size_text(self.trainer_bytes)}: {self._trainer_parts()}",
            *([] if self.complete else ["  unknown  what the network takes: torch is not installed here"]),
        ]

    def _reader_lines(self) -> Iterator[str]:
        if self.workers == 0:
            return
        count = f"{self.readers_at_once} x {size_text(self.reader_bytes)}"
        if self.readers_at_once > self.workers:
            count += f" ({self.workers}, and as many while one execution of Ray hands over to the next)"
        staged = f", fetched ahead {size_text(self.reader_staged_bytes)}" if self.reader_staged_bytes else ""
        yield (
            f"  readers  {count}: process {size_text(self.reader_process_bytes)}, "
            f"blocks {size_text(self.reader_ring_bytes)}, decoding {size_text(self.reader_scratch_bytes)}{staged}"
        )
        yield f"  store    {size_text(self.store_bytes)} in use at once, {size_text(self.store_capacity_bytes)} allowed"
        if self.ray_bytes:
            yield f"  Ray      {size_text(self.ray_bytes)} for its own processes"

    def _trainer_parts(self) -> str:
        parts = {
            "process": self.trainer_process_bytes,
            "CUDA (assumed)": self.cuda_bytes,
            "its reader": self.local_reader_bytes,
            "batches": self.batches_bytes,
            "fixed patches": self.fixed_bytes,
            "training step": self.step_bytes,
            "copy of a checkpoint": self.snapshot_bytes,
        }
        return ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
