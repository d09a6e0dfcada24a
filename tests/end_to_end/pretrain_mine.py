"""A training script as people have them: its own model, data and flags, and a call of Megatron's `pretrain`.

It knows nothing of muon-offload. ``--my-way`` chooses what kind of script it is.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from torch.utils.data import Dataset


def add_my_flags(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--my-way", default="pretrain")
    parser.add_argument("--my_words", nargs="*", default=[])
    return parser


def provide_model(pre_process: bool = True, post_process: bool = True, **given: Any) -> GPTModel:
    args = get_args()
    config = given.get("config") or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        pg_collection=given.get("pg_collection"),
    )


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from different numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        counted = (torch.arange(self.length + 1) + 7 * index) % 50
        return {
            "tokens": counted[:-1],
            "labels": counted[1:],
            "loss_mask": torch.ones(self.length),
            "position_ids": torch.arange(self.length),
        }


def provide_data(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, None, None]:
    return Counting(num_samples[0], get_args().seq_length), None, None


provide_data.is_distributed = True  # type: ignore[attr-defined]


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    mask = mask.reshape(-1).float()
    total, count = torch.sum(output.reshape(-1).float() * mask), mask.sum()
    return total, count.to(torch.int32), {"lm loss": torch.stack([total.detach(), count])}


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[Any, Any]:
    batch = {name: tensor.cuda() for name, tensor in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(
        extra_args_provider=add_my_flags, args_defaults={"tokenizer_type": "NullTokenizer", "mock_data": True}
    )
    print("mine:", args.my_way, args.my_words, flush=True)
    if args.my_way == "exit":
        sys.exit(7)
    if args.my_way == "adam":
        args.optimizer, args.use_layer_wise_distributed_optimizer = "adam", False
    if args.my_way != "nothing":
        pretrain(
            cfg_container=pretrain_cfg_container_from_args(args),
            train_valid_test_dataset_provider=provide_data,
            model_provider=provide_model,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=forward_step,
        )
