"""Listening to the loop that trains, Megatron's or a script's own, on behalf of the observer."""

from __future__ import annotations

import inspect
from typing import Any

from muon_offload_cli.megatron.observer import Observer
from muon_offload_cli.megatron.substitute import Substitutions


class LoopListener:
    """Tells `observer` of the model, the optimizer and each step, until `stack` is closed.

    The functions of `megatron.training` that it stands in for are called as before.
    """

    def __init__(self, observer: Observer, stack: Substitutions) -> None:
        self._observer = observer
        self._megatron_logs = False
        self._in_a_step = False
        self._listen_to_megatron(stack)
        self._listen_to_other_loops(stack)

    def _listen_to_megatron(self, stack: Substitutions) -> None:
        from megatron.training import training

        log, setup, build = training.training_log, training.setup_model_and_optimizer, training.get_model
        loop = training.train
        names = inspect.signature(log)
        observer = self._observer

        def training_log(*args: Any, **kwargs: Any) -> Any:
            given = names.bind(*args, **kwargs).arguments
            # A loop of a script's own that logs: its first step was counted before that was known.
            counted = not self._megatron_logs and given["iteration"] == observer.report.last_step
            self._megatron_logs = True
            if not counted:
                observer.step(
                    int(given["iteration"]),
                    loss=_mean_loss(given["loss_dict"]),
                    grad_norm=given.get("grad_norm"),
                    learning_rate=given.get("learning_rate"),
                    skipped=bool(given.get("skipped_iter")),
                )
            return log(*args, **kwargs)

        def train(*args: Any, **kwargs: Any) -> Any:
            self._megatron_logs = True
            return loop(*args, **kwargs)

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            built = setup(*args, **kwargs)
            observer.attached(built[1], list(built[0]), int(training.get_args().iteration))
            return built

        def get_model(*args: Any, **kwargs: Any) -> Any:
            model = build(*args, **kwargs)
            observer.model_built()
            return model

        stack.replace(training, "get_model", get_model)
        stack.replace(training, "training_log", training_log)
        stack.replace(training, "setup_model_and_optimizer", setup_model_and_optimizer)
        stack.replace(training, "train", train)

    def _listen_to_other_loops(self, stack: Substitutions) -> None:
        """Count the optimizer's steps where a script has a loop of its own, which logs nothing here.

        The first optimizer that steps is the one that counts.
        """
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        step = ChainedOptimizer.step
        observer = self._observer

        def step_and_record(optimizer: Any) -> Any:
            if self._megatron_logs or self._in_a_step:
                return step(optimizer)
            if observer.optimizer is None:
                observer.attached(optimizer, [], observer.report.last_step)
            self._in_a_step = True
            try:
                result = step(optimizer)
            finally:
                self._in_a_step = False
            if optimizer is observer.optimizer:
                rate = next((group.get("lr") for group in optimizer.param_groups), None)
                last = observer.report.last_step
                taken, norm, _ = result
                observer.step(last + 1, loss=None, grad_norm=norm, learning_rate=rate, skipped=not taken)
            return result

        stack.replace(ChainedOptimizer, "step", step_and_record)


def _mean_loss(losses: dict[str, Any]) -> float | None:
    """Take the language-model loss of a step; ranks without the last pipeline stage have none."""
    value = losses.get("lm loss")
    return None if value is None else float(value)
