"""The Muon child of Megatron's layer-wise optimizer, with its state in the offloader's tiers.

Megatron wraps the torch optimizer that steps Muon's matrices in `Float16OptimizerWithFloat16Params`
(megatron/core/optimizer/optimizer.py). The subclass made here keeps that class's life cycle: gradients are
prepared, their norm taken and clipped as ever; only where masters are created, stepped, and copied to the
model's weights does it go chunk by chunk. Facts about the base class are in docs/megatron.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron.exact_halves import with_exact_halves
from muon_offload_cli.megatron.plan_agreement import demand_same_plan
from muon_offload_cli.offload.offloader import ChunkState, StateOffloader
from muon_offload_cli.offload.plan import ParameterSpec
from muon_offload_cli.offload.settings import OffloadSettings

FLOAT16 = (torch.bfloat16, torch.float16)
MOMENTUM = "momentum_buffer"
"""Key of Muon's only state (emerging_optimizers, OrthogonalizedOptimizer)."""
MASTERS = "fp32_from_fp16_params"
"""Key of the masters in the base class's state dict."""


def make_muon_child(
    base: type[Any], muon: type[Any], settings: OffloadSettings, on_built: Callable[[Any], None]
) -> type[Any]:
    """Make the class that stands for `base` where layer-wise wraps its children.

    Args:
        base: Megatron's `Float16OptimizerWithFloat16Params`.
        muon: The torch optimizer that is taken over; a child of any other class becomes a plain `base`.
        settings: Engine, budgets, directory.
        on_built: Called with each instance once its state is in place.

    Returns:
        A subclass of `base`.
    """

    class OffloadedMuon(base):  # type: ignore[misc]
        """Muon's mixed-precision optimizer with momentum and masters off the device between steps.

        A master's ``.data`` is a CPU view of its bytes between steps, a NaN placeholder on the device while
        gradients are prepared (a forgotten read shows itself), and a view of a window while it is stepped.
        Object identity of masters never changes: Megatron keys state by it.
        """

        def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if type(optimizer) is muon and any(parameter.dtype in FLOAT16 for parameter in parameters):
                return super().__new__(cls)
            return base(optimizer, *args, **kwargs)

        def __init__(self, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any) -> None:
            groups = optimizer.param_groups
            originals = [list(group["params"]) for group in groups]
            self._offloaded = [
                (group_index, parameter)
                for group_index, parameters in enumerate(originals)
                for parameter in parameters
                if parameter.dtype in FLOAT16
            ]
            self._model_params = [parameter for _, parameter in self._offloaded]
            device = self._model_params[0].device
            specs = [
                ParameterSpec(
                    shape=tuple(parameter.shape),
                    domain=bool(groups[group].get("is_expert_parallel", False)),
                )
                for group, parameter in self._offloaded
            ]
            self.offloader = StateOffloader(specs, settings, device)
            try:
                peers = getattr(optimizer, "pg_collection", None)
                demand_same_plan(self.offloader.plan, specs, peers, device)
                self._take_over(base, (optimizer, config, grad_scaler, init_state_fn), originals)
            except BaseException:
                # Whoever builds an optimizer in vain has nothing to close.
                self.offloader.close()
                raise
            on_built(self)

        def _take_over(self, base: type[Any], arguments: tuple[Any, ...], originals: list[list[Any]]) -> None:
            """Fill the tiers with masters and point every master and momentum at its place there."""
            self._masters: list[Any] = [None] * len(self._offloaded)
            nan = torch.full((), math.nan, dtype=torch.float32, device=self._model_params[0].device)
            self._placeholders = [nan.expand(parameter.shape) for parameter in self._model_params]
            self._bear_masters(base, arguments, originals)
            self._select = {
                chunk.index: self._members_by_group(chunk.parameters) for chunk in self.offloader.plan.chunks
            }
            self._resident = [
                [parameter for parameter in parameters if parameter.dtype not in FLOAT16]
                for parameters in originals
            ]
            self._resting = [torch.empty(0)] * len(self._masters), [torch.empty(0)] * len(self._masters)
            for state in self.offloader.resting():
                for index, master, momentum in zip(
                    state.parameters, state.masters, state.momenta, strict=True
                ):
                    self._resting[0][index], self._resting[1][index] = master, momentum
            self._rest(range(len(self._masters)))

        def _bear_masters(
            self, base: type[Any], arguments: tuple[Any, ...], originals: list[list[Any]]
        ) -> None:
            """Let the base class build one chunk after another, so that never all masters are on the device.

            It fills the list it is given with masters and copies every attribute that its version knows of.
            Its own lists are written in the optimizer's order at the end, whatever order the chunks had:
            Megatron pairs them with the parameter groups by position when it names a checkpoint's tensors.
            """
            groups = arguments[0].param_groups

            def build(parameters: list[list[Any]]) -> None:
                for group, subset in zip(groups, parameters, strict=True):
                    group["params"] = subset
                base.__init__(self, *arguments)

            master_of: dict[int, torch.nn.Parameter] = {}
            for state in self.offloader.fill():
                subset: list[list[Any]] = [[] for _ in groups]
                for index in state.parameters:
                    subset[self._offloaded[index][0]].append(self._model_params[index])
                build(subset)
                for index, target in zip(state.parameters, state.masters, strict=True):
                    master = self._model_params[index].main_param
                    target.copy_(master.data)
                    master.data = self._placeholders[index]
                    self._masters[index] = master_of[id(self._model_params[index])] = master
            build([[p for p in parameters if p.dtype not in FLOAT16] for parameters in originals])
            self.float16_groups = [[p for p in parameters if id(p) in master_of] for parameters in originals]
            self.fp32_from_float16_groups = [[master_of[id(p)] for p in kept] for kept in self.float16_groups]
            self.fp32_from_fp32_groups = [
                [p for p in parameters if id(p) not in master_of] for parameters in originals
            ]
            for group, parameters in zip(groups, originals, strict=True):
                group["params"] = [master_of.get(id(parameter), parameter) for parameter in parameters]

        def _members_by_group(self, parameters: tuple[int, ...]) -> list[list[Any]]:
            members: list[list[Any]] = [[] for _ in self.optimizer.param_groups]
            for index in parameters:
                members[self._offloaded[index][0]].append(self._masters[index])
            return members

        def _rest(self, parameters: Any) -> None:
            """Point masters and momenta at their bytes between steps."""
            masters, momenta = self._resting
            for index in parameters:
                master = self._masters[index]
                master.grad = None
                master.data = masters[index]
                self.optimizer.state[master][MOMENTUM] = momenta[index]

        def _enter(self, state: ChunkState) -> None:
            """Point masters and momenta of a chunk at its window."""
            for index, data, momentum in zip(state.parameters, state.masters, state.momenta, strict=True):
                master = self._masters[index]
                master.data = data
                self.optimizer.state[master][MOMENTUM] = momentum

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
            """Assign gradients to masters, which look like device tensors of NaN meanwhile."""
            for master, placeholder in zip(self._masters, self._placeholders, strict=True):
                master.data = placeholder
            return bool(super().prepare_grads())

        @torch.no_grad()
        def step_with_ready_grads(self) -> bool:
            """Step chunk by chunk and copy each chunk's masters to the model's weights while it is here."""
            for state in self.offloader.sweep():
                self._enter(state)
                with self._stepping(self._select[state.chunk]):
                    self.optimizer.step()
                weights = [self._model_params[index].data for index in state.parameters]
                torch._foreach_copy_(weights, list(state.masters))
                self._rest(state.parameters)
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
                weights = [self._model_params[index].data for index in state.parameters]
                torch._foreach_copy_(list(state.masters), weights)

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            """Begin fetching for the coming step: Megatron calls this before forward and backward."""
            super().zero_grad(*args, **kwargs)
            self.offloader.prefetch()

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Return the state as views of where it lies; they must not outlive the next step."""
            self.offloader.synchronize()
            return super().state_dict(*args, **kwargs)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Describe the state for a torch_dist checkpoint, as views of where it lies.

            Megatron's reader puts loaded bytes in place through these views, then calls `load_state_dict`.
            """
            self.offloader.synchronize()
            return with_exact_halves(super().sharded_state_dict(*args, **kwargs))

        @torch.no_grad()
        def load_state_dict(self, state_dict: Any) -> None:
            """Take over loaded state; what the checkpoint reader has put in place is not copied again."""
            with self.offloader.written_outside():
                with self._without_masters_in_place(state_dict) as rest:
                    super().load_state_dict(rest)
                for master, momentum in zip(self._masters, self._resting[1], strict=True):
                    loaded = self.optimizer.state[master][MOMENTUM]
                    if loaded.data_ptr() != momentum.data_ptr():
                        momentum.copy_(loaded)
                    self.optimizer.state[master][MOMENTUM] = momentum

        @contextmanager
        def _without_masters_in_place(self, state_dict: Any) -> Iterator[Any]:
            """Hide masters that the reader has put in place: copied onto themselves, all pages turn dirty."""
            groups, saved = self.fp32_from_float16_groups, state_dict.get(MASTERS)
            if saved is None:
                yield state_dict
                return
            pairs = [
                [
                    (mine, other)
                    for mine, other in zip(*both, strict=True)
                    if mine.data_ptr() != other.data_ptr()
                ]
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
                "offload_to_cpu() was called on an optimizer whose state is offloaded",
                "offload.engine=none",
                "offload.engine",
            )

        restore_from_cpu = offload_to_cpu

    return OffloadedMuon
