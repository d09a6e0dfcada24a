"""One rank's training: Megatron's own loop, given our model, data and optimizer state."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any, NoReturn

import torch

from muon_offload_cli.config.schema import Config, Device, Engine
from muon_offload_cli.config.vocabulary import tokenizer_folder
from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron.arguments import local_rank
from muon_offload_cli.megatron.attach import install
from muon_offload_cli.megatron.checkpoints import Checkpoints
from muon_offload_cli.megatron.cpu_device import cpu_device
from muon_offload_cli.megatron.entry_point import run_script
from muon_offload_cli.megatron.expert_scales import own_expert_scales
from muon_offload_cli.megatron.flags import megatron_flags
from muon_offload_cli.megatron.hf_weights import watch_for_weights
from muon_offload_cli.megatron.loops import LoopListener
from muon_offload_cli.megatron.observer import Observer
from muon_offload_cli.megatron.plain_torch import has_transformer_engine, plain_torch
from muon_offload_cli.megatron.refusals import refusals_told, tell_refusals
from muon_offload_cli.megatron.release import parser_flags
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.planner.settings import offload_settings
from muon_offload_cli.tokens.preparation import prepare


def choose_device(device: Device) -> str:
    """Return ``cuda`` or ``cpu``; ``auto`` takes CUDA where torch sees a GPU.

    Raises:
        UserError: CUDA was asked for and torch sees no GPU.
    """
    if device is Device.cpu:
        return "cpu"
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return "cuda"
    if device is Device.cuda:
        raise wrong("device=cuda, but torch sees no GPU here.", "device=cpu", "device")
    return "cpu"


def train(config: Config, device: str, observer: Observer) -> None:
    """Train as `config` says; returns when the last step is done.

    Args:
        config: Resolved and checked config.
        device: ``cpu`` or ``cuda``.
        observer: Gets every step, and the final state.
    """
    prepared = prepare(config.data, tokenizer_folder(config))
    prefix = None if prepared.prefix is None else str(prepared.prefix)
    transformer_engine = device == "cuda" and has_transformer_engine()
    flags = megatron_flags(
        config,
        device=device,
        transformer_engine=transformer_engine,
        data_prefix=prefix,
        known=parser_flags(),
    )
    with Substitutions() as stack:
        if device == "cpu":
            stack.enter_context(cpu_device())
        stack.enter_context(plain_torch())
        own_expert_scales(stack)
        # Megatron's parser reads the process's arguments and nothing else.
        stack.replace(sys, "argv", [sys.argv[0], *flags])
        stack.replace(argparse.ArgumentParser, "error", _refuse_flag)
        tell_refusals(stack, config)
        watch_for_weights(config, stack)
        LoopListener(observer, stack)
        checkpoints = Checkpoints(config, observer)
        checkpoints.watch(stack)
        if config.offload.engine is not Engine.none:

            def built(optimizer: Any) -> None:
                observer.built(optimizer)
                checkpoints.built(optimizer)

            stack.enter_context(install(offload_settings(config, local_rank=local_rank()), built))
        if config.megatron.entrypoint is not None:
            run_script(config.megatron.entrypoint, [*flags, *config.megatron.script_args])
            if not observer.report.last_step:
                raise wrong(
                    f"megatron.entrypoint={config.megatron.entrypoint} ended, and no optimizer of Megatron's "
                    "took a step in it: nothing was trained",
                    "name the script that calls megatron.training's pretrain()",
                    "megatron.entrypoint",
                )
        else:
            try:
                _pretrain(config, prepared, transformer_engine=transformer_engine)
            except SystemExit as leaving:
                # How Megatron ends a run early on request: SIGTERM, --exit-interval, --exit-duration-in-mins.
                if leaving.code not in (None, 0):
                    raise
        observer.finish(digest=config.run.digest)
        # A script of the user's own may have done so, or never have begun.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _refuse_flag(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Tell what Megatron's or a script's parser says as the request's fault, on every rank alike."""
    raise wrong(
        f"the parser of Megatron's flags refuses one: {message}.",
        "change it in megatron.args or megatron.script_args, or the key that it comes from",
        "megatron.args",
    )


def _pretrain(config: Config, prepared: Any, *, transformer_engine: bool) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from muon_offload_cli.megatron.data.forward_step import make_forward_step
    from muon_offload_cli.megatron.data.provider import make_datasets_provider
    from muon_offload_cli.megatron.model import embedding_ranks, make_model_provider

    with refusals_told(config):
        container = pretrain_cfg_container_from_args(parse_and_validate_args())
    given: dict[str, Any] = {
        "cfg_container": container,
        "train_valid_test_dataset_provider": make_datasets_provider(prepared),
        "model_provider": make_model_provider(transformer_engine=transformer_engine),
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": make_forward_step(),
        # Asked before there is a model, it reads the flags that layers are built from.
        "get_embedding_ranks": refusals_told(config)(embedding_ranks),
    }
    missing = set(given) - set(inspect.signature(pretrain).parameters)
    if missing:
        raise wrong(
            f"this Megatron's pretrain() takes no {', '.join(sorted(missing))}",
            'pip install "megatron-core==0.19.2"',
            "megatron.path",
        )
    pretrain(**given)
