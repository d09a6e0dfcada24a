"""What Megatron needs where neither Transformer Engine nor Apex is installed, on CPUs and GPUs alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any, cast

import torch

from muon_offload_cli.megatron.plain_layers import ZeroCentredRMSNorm, stand_in_for_fla
from muon_offload_cli.megatron.substitute import Substitutions


def has_transformer_engine() -> bool:
    """Whether Megatron finds Transformer Engine and would build its layers from it."""
    from megatron.core.utils import is_te_min_version  # imports nothing of TE itself

    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return bool(is_te_min_version("1.9.0"))


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Make up for missing fused libraries until the context is left."""
    with Substitutions() as stack:
        _allow_more_of_norms(stack)
        stand_in_for_fla(stack)
        _use_compiled_helpers(stack)
        _let_adam_be_loaded(stack)
        yield


def _allow_more_of_norms(stack: Substitutions) -> None:
    """Build torch's norms under sequence parallelism, and zero-centred ones.

    Megatron refuses the former because nothing tags their parameters for the gradient all-reduce over the
    tensor-parallel group; tagged ``sequence_parallel``, ``finalize_model_grads`` treats them like its own.
    It refuses the latter because torch has none.
    """
    from megatron.core.transformer import torch_norm

    class _Untouched:
        """A config that says no to what is made up for here and passes everything else through."""

        def __init__(self, config: Any) -> None:
            self._config = config

        sequence_parallel = False
        layernorm_zero_centered_gamma = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._config, name)

    build = torch_norm.WrappedTorchNorm.__new__

    def build_tagged(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if config.layernorm_zero_centered_gamma and config.normalization != "RMSNorm":
            build(cls, config, *args, **kwargs)  # Megatron's refusal says what is wrong.
        module: Any = build(cls, _Untouched(config), *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            module = ZeroCentredRMSNorm(module.normalized_shape, eps=module.eps)
        if config.sequence_parallel:
            for parameter in module.parameters():
                parameter.sequence_parallel = True
        return cast(torch.nn.Module, module)

    stack.replace(torch_norm.WrappedTorchNorm, "__new__", build_tagged)


def _use_compiled_helpers(stack: Substitutions) -> None:
    """Take dataset helpers that are compiled already; Megatron would run `make` and exit where that fails.

    The wheel ships them without a Makefile. A fresh checkout has none, and compiling them needs pybind11 and
    a writable checkout, so those of an installed wheel stand in: they have no part in the optimizer.
    """
    from megatron.core import datasets
    from megatron.core.datasets import utils

    with contextlib.suppress(metadata.PackageNotFoundError):
        shipped = str(metadata.distribution("megatron-core").locate_file("megatron/core/datasets"))
        # Asked last: a module that the checkout has is never taken from the wheel.
        stack.replace(datasets, "__path__", [*datasets.__path__, shipped])
    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        return
    stack.replace(utils, "compile_helpers", lambda: None)


def _let_adam_be_loaded(stack: Substitutions) -> None:
    """Let a DistributedOptimizer over torch's own Adam be loaded from a checkpoint.

    It reads the step of its state before there is any, and afterwards the step that was loaded stands in the
    parameter groups only, where torch's Adam never looks: a resumed run would not be the run that was saved.
    From the fully reshardable format, which saves no step with a parameter, it asks for one all the same.
    """
    from megatron.core.optimizer import distrib_optimizer

    if getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        return
    optimizer_class = distrib_optimizer.DistributedOptimizer
    describe, load = optimizer_class.sharded_state_dict, optimizer_class.load_state_dict

    def sharded_state_dict(self: Any, model: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        if is_loading and not self.is_stub_optimizer:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    if not state:
                        state["step"] = torch.zeros((), dtype=torch.float32)
                        state["exp_avg"] = torch.zeros_like(parameter.data)
                        state["exp_avg_sq"] = torch.zeros_like(parameter.data)
        return describe(self, model, is_loading, **kwargs)

    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if "step" in group:
                    self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    put = optimizer_class._set_main_param_and_optimizer_states

    def put_without_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, index = self.model_param_group_index_map[parameter]
        step = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]].get("step")
        put(self, parameter, {"step": step, **tensors})

    stack.replace(optimizer_class, "_set_main_param_and_optimizer_states", put_without_step)
    stack.replace(optimizer_class, "sharded_state_dict", sharded_state_dict)
    stack.replace(optimizer_class, "load_state_dict", load_state_dict)
