"""What a rank tells of its training: one record a step, one report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, BinaryIO

import torch

from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron import state_census
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.offload.watched import Watched
from muon_offload_cli.records import RankReport, StepRecord
from muon_offload_cli.units import format_bytes

STALL_S = 5.0
"""A request of 8 MiB takes milliseconds; drives that reset or collect garbage take seconds."""


class Observer:
    """Records what this rank does; owns its metrics file and its report.

    Args:
        report: The rank's report, kept up to date.
        report_path: Where it is written.
        metrics_path: One JSON line a step is appended here.
        engine: The backend that was asked for.
        script: The user's own training script, which may build any optimizer; None: ours trains.

    Attributes:
        optimizer: The one whose steps are recorded; None until it is known.
    """

    def __init__(
        self,
        report: RankReport,
        report_path: Path,
        metrics_path: Path,
        engine: str,
        script: str | None = None,
    ) -> None:
        self.report = report
        self._report_path = report_path
        self._metrics: BinaryIO | None = metrics_path.open("ab", buffering=0)
        self._engine = engine
        self._script = script
        self._offloaders: list[Watched] = []
        self._model: list[torch.nn.Module] = []
        self.optimizer: Any = None
        self._model_peak = 0
        self._last = time.perf_counter()
        self._totals = (0, 0, 0.0, 0.0)
        self._skipped = 0

    def built(self, optimizer: Any) -> None:
        """Take note of a Muon optimizer whose state was offloaded."""
        self._offloaders.append(optimizer.offloader)

    def _bytes(self, tier: Tier) -> int:
        return sum(offloader.stored_bytes(tier) for offloader in self._offloaders)

    def model_built(self) -> None:
        """Take note of the device memory that building the model took; what follows is the optimizer's."""
        self._model_peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def attached(self, optimizer: Any, model: list[torch.nn.Module], last_step: int) -> None:
        """Take stock of the optimizer that was built.

        Args:
            optimizer: Its steps are recorded from now on.
            model: What it steps, for the hashes at the end; empty if it is not known.
            last_step: The last step before the next one.

        Raises:
            UserError: A script built one whose state cannot be what was asked to be moved.
        """
        self.optimizer, self._model = optimizer, model
        self.report.last_step = last_step
        if self._script and self._engine != "none" and not state_census.is_layer_wise(self.optimizer):
            raise wrong(
                f"megatron.entrypoint={self._script} built an optimizer without layer-wise Muon, "
                f"and offload.engine={self._engine} moves nothing else",
                "offload.engine=none",
                "megatron.entrypoint",
                "offload.engine",
            )
        report = self.report
        report.muon_parameters = state_census.muon_parameters(self.optimizer)
        report.muon_state_bytes = state_census.muon_state_bytes(self.optimizer)
        report.chunks = sum(len(offloader.plan.chunks) for offloader in self._offloaders)
        report.build_gpu_peak_bytes = torch.cuda.max_memory_allocated()
        report.disk_bytes = self._bytes(Tier.DISK)
        native = state_census.native_host_bytes(self.optimizer)
        report.host_bytes = self._bytes(Tier.HOST) + native
        taken = native + sum(
            chunk.state_bytes for offloader in self._offloaders for chunk in offloader.plan.chunks
        )
        # What no offloader took over is resident, whatever was asked for.
        report.gpu_bytes = self._bytes(Tier.GPU) + max(0, report.muon_state_bytes - taken)
        report.engine = self._engine if self._offloaders else "none"
        for offloader in self._offloaders:
            store = offloader.stores.get(Tier.DISK)
            if store is not None:
                report.directory, report.direct_io = store.path, store.direct
                report.notes += [
                    f"{part.path} refuses direct I/O: reads and writes go through the page cache"
                    for part in store.parts
                    if self._engine == "disk" and not part.direct
                ]
        report.notes += {offloader.near.note for offloader in self._offloaders if offloader.near.note}
        self.write()
        # Filling the tiers is not part of the first step.
        for offloader in self._offloaders:
            offloader.synchronize()
        self._totals = self._count()
        self._last = time.perf_counter()

    def _count(self) -> tuple[int, int, float, float]:
        """Bytes read, bytes written, seconds stalled and seconds of I/O so far."""
        return (
            sum(offloader.bytes_read for offloader in self._offloaders),
            sum(offloader.bytes_written for offloader in self._offloaders),
            sum(offloader.wait_s for offloader in self._offloaders),
            sum(offloader.io_busy_s for offloader in self._offloaders),
        )

    def step(
        self,
        step: int,
        *,
        loss: float | None,
        grad_norm: Any,
        learning_rate: float | None,
        skipped: bool = False,
    ) -> None:
        """Record a step.

        Args:
            step: Its number.
            loss: Mean loss; None where it is not known.
            grad_norm: Norm of the gradients, before clipping.
            learning_rate: Of the first group.
            skipped: Megatron left the weights as they were, for the norm was too large or not finite. Such a
                step needs no state, from wherever.
        """
        now = time.perf_counter()
        totals = self._count()
        # Megatron's own offloader takes momenta off the device from the first step on.
        self.report.disk_bytes = self._bytes(Tier.DISK)
        parts = [getattr(child, "offloader", None) for child in state_census.children(self.optimizer)]
        # A program may have other optimizers, which step when it pleases them.
        counted = [part for part in parts if part is not None] or self._offloaders
        sweeps = min((offloader.sweeps for offloader in counted), default=0)
        self.report.steps += 1
        self.report.last_step = step
        self._skipped += skipped
        sweeps += self._skipped * bool(self._offloaders)
        from_backend = sweeps > self.report.steps_from_backend
        read, written, wait_s, busy_s = (
            now - before for now, before in zip(totals, self._totals, strict=True)
        )
        self.report.steps_from_backend = sweeps
        record = StepRecord(
            step=step,
            loss=loss,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=learning_rate,
            seconds=now - self._last,
            engine=self.report.engine if from_backend else "none",
            chunks=self.report.chunks if from_backend else 0,
            bytes_read=int(read),
            bytes_written=int(written),
            disk_bytes=self.report.disk_bytes,
            host_bytes=self.report.host_bytes,
            gpu_bytes=self.report.gpu_bytes,
            wait_s=wait_s,
            io_wait_s=min(wait_s, busy_s),
            io_busy_s=busy_s,
            staging_bytes=sum(offloader.staging_high_bytes for offloader in self._offloaders),
            pinned_bytes=sum(offloader.pinned_bytes for offloader in self._offloaders),
            window_bytes=sum(offloader.window_bytes for offloader in self._offloaders),
            gpu_peak_bytes=max(self._model_peak, torch.cuda.max_memory_allocated()),
        )
        self._append(record.to_json() + "\n")
        print(f"muon state step: {self._where()}", flush=True)
        self._totals = totals
        self._last = time.perf_counter()

    def _append(self, line: str) -> None:
        """Write a line of metrics; a file that takes no more is given up, for a run does not end for it."""
        try:
            if self._metrics is not None:
                self._metrics.write(line.encode())
        except OSError as error:
            print(f"no more metrics are written: {error.strerror}", flush=True)
            self.close()

    def _where(self) -> str:
        places = ((self.report.disk_bytes, "on disk"), (self.report.host_bytes, "in host memory"))
        parts = [f"{format_bytes(nbytes)} {place}" for nbytes, place in places if nbytes]
        if self.report.gpu_bytes or not parts:
            parts.append(f"{format_bytes(self.report.gpu_bytes)} on the device")
        return ", ".join(parts)

    def saved(self, step: int, *, flush_s: float, write_s: float, nbytes: int, grown: int) -> None:
        """Record a checkpoint; its time is not part of the next step."""
        report = self.report
        report.saves += 1
        report.saved_step = step
        report.save_flush_s = flush_s
        report.save_write_s = write_s
        report.save_bytes = nbytes
        report.save_memory_bytes = max(report.save_memory_bytes, grown)
        print(
            f"saved step {step}: {flush_s:.2f} s of waiting for write-back, "
            f"{write_s:.2f} s of writing {format_bytes(nbytes)}; memory grew by {format_bytes(grown)}",
            flush=True,
        )
        self.write()
        self._last = time.perf_counter()

    def loaded(self, step: int, seconds: float, grown: int) -> None:
        """Record that the run goes on from a checkpoint."""
        self.report.load_memory_bytes = grown
        self.report.loaded_step = step
        self.report.load_s = seconds
        print(f"loaded step {step} in {seconds:.2f} s; memory grew by {format_bytes(grown)}", flush=True)
        self.write()

    def stopped(self, step: int) -> None:
        """Record that training ends before its last step, on request; the step was saved."""
        self.report.stopped_at = step

    def finish(self, *, digest: bool) -> None:
        """Complete the report after training; hashes need every tier to hold the current bytes."""
        for offloader in self._offloaders:
            offloader.synchronize()
        self.report.notes += [
            f"{part.path} took {part.slowest_s:.1f} s for one request: the drive stalled, and a step waited"
            for offloader in self._offloaders
            for store in offloader.stores.values()
            for part in store.parts
            if part.slowest_s >= STALL_S
        ]
        # Copies that Megatron's own offloader left under way.
        torch.cuda.synchronize()
        self.report.adam_disk_bytes = state_census.sibling_disk_bytes(self.optimizer)
        resident = state_census.sibling_state_bytes(self.optimizer) - self.report.adam_disk_bytes
        self.report.adam_state_bytes = max(0, resident)
        if digest:
            self.report.digests = state_census.digests(self._model, self.optimizer)
        self.report.finished = True
        self.write()

    def write(self) -> None:
        """Write the report."""
        self.report.write(self._report_path)

    def close(self) -> None:
        """Close the metrics file."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
