"""Megatron's data sets over prepared tokens. Loaded by the worker only: needs Megatron's globals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training.global_vars import get_args, get_tokenizer

from muon_offload_cli.config.rules.data import UNSUPPORTED_FLAGS, unsupported
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.data.response_dataset import ResponseDataset
from muon_offload_cli.tokens.preparation import PreparedTokens

_DEFAULT_SPLIT = "100,0,0"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetsProvider:
    """Builds the training, validation and test sets where Megatron's `pretrain` asks for them.

    Every tensor-parallel rank reads the same samples from its own node's files, so a batch is never
    broadcast. `is_distributed` tells Megatron to call it on every rank.

    Attributes:
        prefix: Path without suffix of the ``.bin``/``.idx`` pair; None: mock data.
        dataset: Class of the sets.
    """

    is_distributed: ClassVar[bool] = True

    prefix: Path | None
    dataset: type[Any]

    def __call__(
        self, train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
    ) -> list[Any]:
        """Return the three sets; None for a set without samples, and on ranks that need no tokens.

        Args:
            train_val_test_num_samples: Samples wanted of each set; None: one epoch.
            vp_stage: Virtual pipeline stage that will read them.

        Raises:
            UserError: A Megatron flag asks for batches of another kind.
        """
        args = get_args()
        _refuse_unsupported(args)
        return list(
            BlendedMegatronDatasetBuilder(
                self.dataset,
                train_val_test_num_samples,
                lambda: _needs_tokens(args, vp_stage),
                dataset_config(args, self.prefix),
            ).build()
        )


def make_datasets_provider(prepared: PreparedTokens) -> DatasetsProvider:
    """Return a ``train_valid_test_datasets_provider`` for `megatron.training.pretrain`."""
    if prepared.prefix is None:
        return DatasetsProvider(prefix=None, dataset=MockGPTDataset)
    return DatasetsProvider(
        prefix=prepared.prefix, dataset=ResponseDataset if prepared.examples else GPTDataset
    )


def dataset_config(args: Any, prefix: Path | None) -> GPTDatasetConfig:
    """Translate Megatron's flags to the configuration of its GPT data sets.

    Args:
        args: Megatron's parsed flags.
        prefix: The pair to read; None: mock data.
    """
    wanted: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "tokenizer": get_tokenizer(),
        # An empty path keeps the sample indices in memory. None would have Megatron write them beside the
        # data, which may be read-only, and later load them with pickle allowed.
        "path_to_cache": args.data_cache_path or "",
    }
    if prefix is not None:
        wanted["blend"] = ([str(prefix)], None)
        wanted["split"] = args.split or _DEFAULT_SPLIT
    # The rest have one name in the flags and in the data class, where this version has them at all.
    passed_through = (
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        "full_validation",
        "multiple_validation_sets",
        "num_dataset_builder_threads",
        "mmap_bin_files",
        "data_parallel_size",
        "context_parallel_size",
    )
    wanted |= {name: getattr(args, name) for name in passed_through if hasattr(args, name)}
    if hasattr(args, "create_attention_mask_in_dataloader"):
        wanted["create_attention_mask"] = args.create_attention_mask_in_dataloader
    known = {field.name for field in fields(GPTDatasetConfig) if field.init}
    return GPTDatasetConfig(**{name: value for name, value in wanted.items() if name in known})


def _needs_tokens(args: Any, vp_stage: int | None) -> bool:
    # Multi-token prediction embeds tokens and takes a loss wherever its layers are placed.
    return bool(
        parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        or getattr(args, "mtp_num_layers", None)
    )


def _refuse_unsupported(args: Any) -> None:
    problems = [unsupported(flag) for flag in UNSUPPORTED_FLAGS if getattr(args, flag, False)]
    if problems:
        raise UserError(problems=problems)
