"""Watching Megatron's training loop: one record a step, one report a rank."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron import state_census
from muon_offload_cli.megatron.substitute import Substitutions
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
        self._metrics: TextIO = metrics_path.open("a", buffering=1)
        self._engine = engine
        self._script = script
        self._offloaders: list[Watched] = []
        self._model: list[torch.nn.Module] = []
        self._optimizer: Any = None
        self._megatron_logs = False
        self._in_a_step = False
        self._model_peak = 0
        self._last = time.perf_counter()
        self._totals = (0, 0, 0.0, 0.0)

    def watch(self, stack: Substitutions) -> None:
        """Listen to `megatron.training` until `stack` is closed; its functions are called as before."""
        from megatron.training import training

        log, setup, build = training.training_log, training.setup_model_and_optimizer, training.get_model
        loop = training.train
        names = inspect.signature(log)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            given = names.bind(*args, **kwargs).arguments
            # A loop of a script's own that logs: its first step was counted before that was known.
            counted = not self._megatron_logs and given["iteration"] == self.report.last_step
            self._megatron_logs = True
            if not counted:
                self._step(
                    int(given["iteration"]),
                    loss=_mean_loss(given["loss_dict"]),
                    grad_norm=given.get("grad_norm"),
                    learning_rate=given.get("learning_rate"),
                )
            return log(*args, **kwargs)

        def train(*args: Any, **kwargs: Any) -> Any:
            self._megatron_logs = True
            return loop(*args, **kwargs)

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            built = setup(*args, **kwargs)
            self._model, self._optimizer = list(built[0]), built[1]
            self.report.last_step = int(training.get_args().iteration)
            self._attached()
            return built

        def get_model(*args: Any, **kwargs: Any) -> Any:
            model = build(*args, **kwargs)
            # What follows is the optimizer's own doing.
            self._model_peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return model

        stack.replace(training, "get_model", get_model)
        stack.replace(training, "training_log", training_log)
        stack.replace(training, "setup_model_and_optimizer", setup_model_and_optimizer)
        stack.replace(training, "train", train)
        self._watch_other_loops(stack)

    def _watch_other_loops(self, stack: Substitutions) -> None:
        """Count the optimizer's steps where a script has a loop of its own, which logs nothing here.

        The first optimizer that steps is the one that counts.
        """
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        step = ChainedOptimizer.step

        def step_and_record(optimizer: Any) -> Any:
            if self._megatron_logs or self._in_a_step:
                return step(optimizer)
            if self._optimizer is None:
                self._optimizer = optimizer
                self._attached()
            self._in_a_step = True
            try:
                result = step(optimizer)
            finally:
                self._in_a_step = False
            if optimizer is self._optimizer:
                rate = next((group.get("lr") for group in optimizer.param_groups), None)
                self._step(self.report.last_step + 1, loss=None, grad_norm=result[1], learning_rate=rate)
            return result

        stack.replace(ChainedOptimizer, "step", step_and_record)

    def built(self, optimizer: Any) -> None:
        """Take note of a Muon optimizer whose state was offloaded."""
        self._offloaders.append(optimizer.offloader)

    def _bytes(self, tier: Tier) -> int:
        return sum(offloader.stored_bytes(tier) for offloader in self._offloaders)

    def _attached(self) -> None:
        """Take stock of the optimizer that was built.

        Raises:
            UserError: A script built one whose state cannot be what was asked to be moved.
        """
        if self._script and self._engine != "none" and not state_census.is_layer_wise(self._optimizer):
            raise wrong(
                f"megatron.entrypoint={self._script} built an optimizer without layer-wise Muon, "
                f"and offload.engine={self._engine} moves nothing else",
                "offload.engine=none",
                "megatron.entrypoint",
                "offload.engine",
            )
        report = self.report
        report.muon_parameters = state_census.muon_parameters(self._optimizer)
        report.muon_state_bytes = state_census.muon_state_bytes(self._optimizer)
        report.chunks = sum(len(offloader.plan.chunks) for offloader in self._offloaders)
        report.build_gpu_peak_bytes = torch.cuda.max_memory_allocated()
        report.disk_bytes = self._bytes(Tier.DISK)
        report.host_bytes = self._bytes(Tier.HOST)
        taken = sum(chunk.state_bytes for offloader in self._offloaders for chunk in offloader.plan.chunks)
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

    def _step(self, step: int, *, loss: float | None, grad_norm: Any, learning_rate: float | None) -> None:
        now = time.perf_counter()
        totals = self._count()
        # Megatron's own offloader takes momenta off the device from the first step on.
        self.report.disk_bytes = self._bytes(Tier.DISK)
        parts = [getattr(child, "offloader", None) for child in state_census.children(self._optimizer)]
        # A program may have other optimizers, which step when it pleases them.
        counted = [part for part in parts if part is not None] or self._offloaders
        sweeps = min((offloader.sweeps for offloader in counted), default=0)
        self.report.steps += 1
        self.report.last_step = step
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
        self._metrics.write(record.to_json() + "\n")
        print(f"muon state step: {self._where()}", flush=True)
        self._totals = totals
        self._last = time.perf_counter()

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
        self.report.adam_disk_bytes = state_census.sibling_disk_bytes(self._optimizer)
        resident = state_census.sibling_state_bytes(self._optimizer) - self.report.adam_disk_bytes
        self.report.adam_state_bytes = max(0, resident)
        if digest:
            self.report.digests = state_census.digests(self._model, self._optimizer)
        self.report.finished = True
        self.write()

    def write(self) -> None:
        """Write the report."""
        self.report.write(self._report_path)

    def close(self) -> None:
        """Close the metrics file."""
        self._metrics.close()


def _mean_loss(losses: dict[str, Any]) -> float | None:
    """Take the language-model loss of a step; ranks without the last pipeline stage have none."""
    value = losses.get("lm loss")
    return None if value is None else float(value)
