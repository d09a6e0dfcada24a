"""The Muon child of Megatron's layer-wise optimizer, with its state in the offloader's tiers.

Megatron wraps the torch optimizer that steps Muon's matrices in `Float16OptimizerWithFloat16Params`
(megatron/core/optimizer/optimizer.py). The subclass made here keeps that class's life cycle: gradients are
prepared, their norm taken and clipped as ever; only where masters are created, stepped, and copied to the
model's weights does it go chunk by chunk. Facts about the base class are in docs/megatron.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron.checkpoint_views import checkpoint_views
from muon_offload_cli.megatron.late_gradients import LateGradient, widen
from muon_offload_cli.megatron.masters import Masters
from muon_offload_cli.megatron.muon_state import second_moment_shape
from muon_offload_cli.megatron.plan_agreement import demand_same_plan
from muon_offload_cli.offload.offloader import StateOffloader
from muon_offload_cli.offload.plan import ParameterSpec
from muon_offload_cli.offload.settings import OffloadSettings

FLOAT16 = (torch.bfloat16, torch.float16)
MASTERS = "fp32_from_fp16_params"
"""Key of the masters in the base class's state dict."""


def make_muon_child(
    base: type[Any],
    muon: tuple[type[Any], ...],
    settings: Callable[[], OffloadSettings],
    on_built: Callable[[Any], None],
) -> type[Any]:
    """Make the class that stands for `base` where layer-wise wraps its children.

    Args:
        base: Megatron's `Float16OptimizerWithFloat16Params`.
        muon: The torch optimizers that are taken over; a child of any other class becomes a plain `base`.
        settings: Gives the next instance's engine, budgets, directory.
        on_built: Called with each instance once its state is in place.

    Returns:
        A subclass of `base`.
    """

    class OffloadedMuon(base):  # type: ignore[misc]
        """Muon's mixed-precision optimizer with momentum and masters off the device between steps.

        Attributes:
            offloader: Owner of the bytes.
            close: Stops the offloader's threads and releases its memory and its file; masters are released
                before, also those that the model still holds. Happens by itself where the optimizer is
                collected as garbage; a second call does nothing.
        """

        def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if type(optimizer) in muon and any(parameter.dtype in FLOAT16 for parameter in parameters):
                return super().__new__(cls)
            return base(optimizer, *args, **kwargs)

        def __init__(self, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any) -> None:
            _refuse_second_offload(config, settings())
            groups = optimizer.param_groups
            originals = [list(group["params"]) for group in groups]
            self._group_of = [
                number
                for number, parameters in enumerate(originals)
                for parameter in parameters
                if parameter.dtype in FLOAT16
            ]
            self._weights = [p for parameters in originals for p in parameters if p.dtype in FLOAT16]
            device = self._weights[0].device
            specs = [
                ParameterSpec(
                    shape=tuple(weight.shape),
                    domain=bool(groups[number].get("is_expert_parallel", False)),
                    second_moment=second_moment_shape(optimizer, weight),
                )
                for number, weight in zip(self._group_of, self._weights, strict=True)
            ]
            self.offloader = StateOffloader(specs, settings(), device)
            try:
                peers = getattr(optimizer, "pg_collection", None)
                demand_same_plan(self.offloader.plan, specs, peers, device)
                self._take_over(base, (optimizer, config, grad_scaler, init_state_fn), originals)
            except BaseException:
                # Whoever builds an optimizer in vain has nothing to close.
                self.offloader.close()
                raise
            self.close = weakref.finalize(self, self._masters.release, self.offloader)
            # A process that ends leaves nothing behind, and its threads are joined before this could run.
            self.close.atexit = False
            on_built(self)

        def _take_over(self, base: type[Any], arguments: tuple[Any, ...], originals: list[list[Any]]) -> None:
            """Let the base class make masters a chunk at a time, and give them their places in the tiers.

            It fills the list it is given with masters and copies every attribute that its version knows of.
            Its own lists are written in the optimizer's order at the end, whatever order the chunks had:
            Megatron pairs them with the parameter groups by position when it names a checkpoint's tensors.
            """
            groups = arguments[0].param_groups
            self._resident = [[p for p in parameters if p.dtype not in FLOAT16] for parameters in originals]

            def build(parameters: list[list[Any]]) -> None:
                for group, subset in zip(groups, parameters, strict=True):
                    group["params"] = list(subset)
                base.__init__(self, *arguments)

            def make(indices: Iterable[int]) -> None:
                build(self._by_group(indices, self._weights))

            self._masters = Masters(arguments[0], self._weights, self.offloader, make)
            build(self._resident)
            everything = range(len(self._weights))
            self.float16_groups = self._by_group(everything, self._weights)
            self.fp32_from_float16_groups = self._by_group(everything, self._masters.all)
            for group, parameters in zip(groups, originals, strict=True):
                group["params"] = [p.main_param if p.dtype in FLOAT16 else p for p in parameters]
            self._masters.rest()

        def _by_group(self, indices: Iterable[int], members: list[Any]) -> list[list[Any]]:
            groups: list[list[Any]] = [[] for _ in self._resident]
            for index in indices:
                groups[self._group_of[index]].append(members[index])
            return groups

        @contextmanager
        def _stepping(self, members: list[list[Any]]) -> Iterator[None]:
            """Let the torch optimizer see only `members` of each group."""
            groups = self.optimizer.param_groups
            whole = [group["params"] for group in groups]
            for group, subset in zip(groups, members, strict=True):
                group["params"] = subset
            try:
                yield
            finally:
                for group, parameters in zip(groups, whole, strict=True):
                    group["params"] = parameters

        @torch.no_grad()
        def prepare_grads(self) -> bool:
            """Assign gradients to masters, which look like device tensors until the step ends."""
            self._masters.await_step()
            return bool(super().prepare_grads())

        def _copy_model_grads_to_main_grads(self) -> None:
            """Leave gradients in bf16, if they are that, until their chunk is stepped."""
            sources: list[Any] = [getattr(weight, "main_grad", None) for weight in self._weights]
            late = all(source is not None and source.dtype == torch.bfloat16 for source in sources)
            if not late or self.grad_scaler is not None:
                super()._copy_model_grads_to_main_grads()
                return
            groups = self.float16_groups
            self.float16_groups = []
            try:
                super()._copy_model_grads_to_main_grads()
            finally:
                self.float16_groups = groups
            for master, weight, source in zip(self._masters.all, self._weights, sources, strict=True):
                master.grad = LateGradient.of(source, master.data)
                weight.grad = None

        @torch.no_grad()
        def step_with_ready_grads(self) -> bool:
            """Step chunk by chunk and copy each chunk's masters to the model's weights while it is here."""
            for state in self.offloader.sweep():
                self._masters.enter(state)
                widen(self._masters.all[index] for index in state.parameters)
                with self._stepping(self._by_group(state.parameters, self._masters.all)):
                    self.optimizer.step()
                weights = [self._weights[index].data for index in state.parameters]
                torch._foreach_copy_(weights, list(state.masters))
                self._masters.rest(state.parameters)
            if any(self._resident):
                with self._stepping(self._resident):
                    self.optimizer.step()
            return True

        @torch.no_grad()
        def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
            """Refresh the masters from the model's weights, in their tiers."""
            if state_dict is not None:
                raise wrong("masters cannot be taken from a state dict while they are offloaded")
            for state in self.offloader.fill(load=True):
                weights = [self._weights[index].data for index in state.parameters]
                torch._foreach_copy_(list(state.masters), weights)

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            """Begin fetching for the coming step: Megatron calls this before forward and backward."""
            # A step that was prepared is not coming: a norm was not finite, or too large.
            self._masters.rest()
            super().zero_grad(*args, **kwargs)
            self.offloader.prefetch()

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Return the state as views of where it lies; they must not outlive the next step."""
            self._masters.show()
            if not self.offloader.is_loading:
                self.offloader.synchronize()
            return super().state_dict(*args, **kwargs)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Describe the state for a torch_dist checkpoint, as views of where it lies.

            Megatron's reader puts loaded bytes in place through these views, then calls `load_state_dict`.
            """
            return checkpoint_views(super().sharded_state_dict(*args, **kwargs))

        @torch.no_grad()
        def load_state_dict(self, state_dict: Any) -> None:
            """Take over loaded state; what the checkpoint reader has put in place is not copied again."""
            self._masters.rest()
            with self.offloader.written_outside():
                with self._without_masters_in_place(state_dict) as rest:
                    super().load_state_dict(rest)
                self._masters.keep_loaded_state()

        @contextmanager
        def _without_masters_in_place(self, state_dict: Any) -> Iterator[Any]:
            """Hide masters that the reader has put in place: copied onto themselves, all pages turn dirty."""
            groups, saved = self.fp32_from_float16_groups, state_dict.get(MASTERS)
            if saved is None:
                yield state_dict
                return
            pairs = [
                [pair for pair in zip(*both, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
                for both in zip(groups, saved, strict=True)
            ]
            self.fp32_from_float16_groups = [[mine for mine, _ in group] for group in pairs]
            try:
                yield {**state_dict, MASTERS: [[other for _, other in group] for group in pairs]}
            finally:
                self.fp32_from_float16_groups = groups

        def offload_to_cpu(self) -> None:
            """Refuse: the state is off the device already, and its owner is the offloader."""
            raise wrong(
                "offload_to_cpu() or restore_from_cpu() was called on an optimizer whose state is offloaded",
                "offload.engine=none",
                "offload.engine",
            )

        restore_from_cpu = offload_to_cpu

    return OffloadedMuon


def _refuse_second_offload(config: Any, settings: OffloadSettings) -> None:
    """Refuse a config that has Megatron build its own chunked offloader around the same state."""
    asked = getattr(config, "chunked_optimizer_state_offload", False)
    if asked and config.optimizer_state_offload_fraction > 0:
        raise wrong(
            "the optimizer's config asks for Megatron's own chunked offload, and "
            f"offload.engine={settings.engine} moves the same state",
            "leave --chunked-optimizer-state-offload out, or offload.engine=mapped",
            "offload.engine",
        )
