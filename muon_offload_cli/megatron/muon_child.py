"""The Muon child of Megatron's layer-wise optimizer, with its state in the offloader's tiers.

Megatron wraps the torch optimizer that steps Muon's matrices in `Float16OptimizerWithFloat16Params`
(megatron/core/optimizer/optimizer.py). The subclass made here keeps that class's life cycle: gradients are
prepared, their norm taken and clipped as ever; only where masters are created, stepped, and copied to the
model's weights does it go chunk by chunk. Facts about the base class are in docs/megatron.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from muon_offload_cli.errors import UserError, wrong
from muon_offload_cli.megatron.checkpoint_views import checkpoint_views
from muon_offload_cli.megatron.late_gradients import LateGradient, widen
from muon_offload_cli.megatron.muon_state import members_of, second_moment_shape
from muon_offload_cli.megatron.plan_agreement import demand_same_plan
from muon_offload_cli.offload.offloader import ChunkState, StateOffloader
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

        A master's ``.data`` is a CPU view of its bytes between steps, a NaN placeholder on the device while
        gradients are prepared (a forgotten read shows itself), and a view of a window while it is stepped.
        Object identity of masters never changes: Megatron keys state by it.

        Attributes:
            offloader: Owner of the bytes.
            close: Stops the offloader's threads and releases its memory and its file; masters are
                placeholders from then on, also those that the model still holds. Happens by itself where the
                optimizer is collected as garbage; a second call does nothing.
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
                    second_moment=second_moment_shape(optimizer, parameter),
                )
                for group, parameter in self._offloaded
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
            stepped = weakref.ref(optimizer)
            self.close = weakref.finalize(
                self, _release, self.offloader, self._masters, self._placeholders, stepped, self._resting
            )
            # A process that ends leaves nothing behind, and its threads are joined before this could run.
            self.close.atexit = False
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
            self._resting: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {
                index: (master, kept)
                for state in self.offloader.resting()
                for index, master, kept in members_of(state)
            }
            self._prepared = False
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
            """Point masters and their state at their bytes between steps."""
            for index in parameters:
                master = self._masters[index]
                master.grad = None
                master.data, kept = self._resting[index]
                self.optimizer.state[master].update(kept)

        def _enter(self, state: ChunkState) -> None:
            """Point masters and state of a chunk at its window."""
            for index, data, kept in members_of(state):
                master = self._masters[index]
                master.data = data
                self.optimizer.state[master].update(kept)

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

        def _lie(self) -> None:
            """Point all masters at their bytes and leave gradients as they are; closed, there are none."""
            for index, (data, _) in self._resting.items():
                self._masters[index].data = data

        def _forget_step(self) -> None:
            """End a step that was prepared and not taken: a norm was not finite, or too large."""
            if self._prepared:
                self._prepared = False
                self._rest(range(len(self._masters)))

        @torch.no_grad()
        def prepare_grads(self) -> bool:
            """Assign gradients to masters, which look like device tensors of NaN until the step ends."""
            self._prepared = True
            for master, placeholder in zip(self._masters, self._placeholders, strict=True):
                master.data = placeholder
            return bool(super().prepare_grads())

        def _copy_model_grads_to_main_grads(self) -> None:
            """Leave gradients in bf16, if they are that, until their chunk is stepped."""
            sources: list[Any] = [getattr(parameter, "main_grad", None) for parameter in self._model_params]
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
            for master, parameter, source in zip(self._masters, self._model_params, sources, strict=True):
                master.grad = LateGradient.of(source, master.data)
                parameter.grad = None

        @torch.no_grad()
        def step_with_ready_grads(self) -> bool:
            """Step chunk by chunk and copy each chunk's masters to the model's weights while it is here."""
            for state in self.offloader.sweep():
                self._enter(state)
                widen(self._masters[index] for index in state.parameters)
                with self._stepping(self._select[state.chunk]):
                    self.optimizer.step()
                weights = [self._model_params[index].data for index in state.parameters]
                torch._foreach_copy_(weights, list(state.masters))
                self._rest(state.parameters)
            self._prepared = False
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
            self._forget_step()
            super().zero_grad(*args, **kwargs)
            self.offloader.prefetch()

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Return the state as views of where it lies; they must not outlive the next step."""
            self._lie()
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
            self._forget_step()
            with self.offloader.written_outside():
                with self._without_masters_in_place(state_dict) as rest:
                    super().load_state_dict(rest)
                for index, (_, kept) in self._resting.items():
                    state = self.optimizer.state[self._masters[index]]
                    for key, place in kept.items():
                        if state[key].data_ptr() != place.data_ptr():
                            place.copy_(state[key])
                        state[key] = place

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
            raise _moved_by_hand("offload_to_cpu")

        def restore_from_cpu(self) -> None:
            """Refuse, as `offload_to_cpu` does."""
            raise _moved_by_hand("restore_from_cpu")

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


def _moved_by_hand(method: str) -> UserError:
    return wrong(
        f"{method}() was called on an optimizer whose state is offloaded",
        "offload.engine=none",
        "offload.engine",
    )


def _release(
    offloader: StateOffloader,
    masters: Sequence[Any],
    placeholders: Sequence[torch.Tensor],
    stepped: weakref.ref[Any],
    resting: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]],
) -> None:
    """Close `offloader`, and first drop every view of its bytes, which would keep them in memory or on disk.

    A model keeps its masters (``main_param``) when its optimizer is gone.
    """
    optimizer = stepped()
    for master, placeholder in zip(masters, placeholders, strict=True):
        master.data = placeholder
        if optimizer is not None:
            optimizer.state.pop(master, None)
    resting.clear()
    offloader.close()
