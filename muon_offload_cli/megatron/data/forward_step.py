"""One micro-batch of GPT pretraining: tokens to a loss, by the contract of Megatron's schedules.

The contract (``megatron/core/pipeline_parallel/schedules.py``, `forward_step_calc_loss`): the step returns
the model's output and a function from output to ``(loss sum, token count, report)``. Megatron divides
the sum by the count and the number of micro-batches, or, with ``calculate_per_token_loss``, the gradients
by all counts of the global batch; so the loss is a sum, never a mean, and context parallelism
needs no factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[[torch.Tensor], LossResult]
ForwardStep = Callable[[Iterator[dict[str, torch.Tensor]] | None, torch.nn.Module], tuple[Any, LossFunction]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch on this rank, ``[micro batch, sequence / CP]`` each.

    All None on pipeline stages that neither embed tokens nor take a loss. `attention_mask` is None where
    the attention makes the causal mask itself. `padding_mask`, of examples alone, is true behind them:
    routers take no balance from there.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    padding_mask: torch.Tensor | None = None


def make_forward_step() -> ForwardStep:
    """Return the ``forward_step_func`` of `megatron.training.pretrain` for a GPT model."""

    def forward_step(
        data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
    ) -> tuple[Any, LossFunction]:
        # The weights say where the batch belongs, so that no device is named here.
        batch = get_batch(data_iterator, next(model.parameters()).device)
        padding = {}
        # In a pipeline routers take padding for text: stages in the middle have no mask, and only the first
        # one cuts it for sequence parallelism (megatron/core/models/gpt/gpt_model.py).
        if batch.padding_mask is not None and parallel_state.get_pipeline_model_parallel_world_size() == 1:
            padding["padding_mask"] = batch.padding_mask
        output = model(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            **padding,
        )
        return output, partial(loss_function, batch.loss_mask)

    return forward_step


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, device: torch.device) -> Batch:
    """Take the next micro-batch and keep this context-parallel rank's part of it.

    Tensor-parallel peers each have an iterator over the same samples; see `provider`.

    Args:
        data_iterator: None on stages in the middle of a pipeline.
        device: Where the tensors are wanted; copies may still be under way on return.
    """
    if data_iterator is None:
        return Batch()
    sample = next(data_iterator)
    names = [name for name in Batch.__dataclass_fields__ if name in sample]
    batch = {name: sample[name].to(device, non_blocking=True) for name in names}
    if parallel_state.get_context_parallel_world_size() > 1:
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return Batch(**batch)


def loss_function(loss_mask: torch.Tensor | None, output: torch.Tensor) -> LossResult:
    """Sum the cross-entropy of the tokens that count.

    Args:
        loss_mask: 1 for tokens that count, 0 for others; None never reaches here, since only the last
            pipeline stage takes a loss.
        output: Cross-entropy of each token, in nats, in the shape of `loss_mask`.

    Returns:
        The sum, to be differentiated; the number of tokens (int32); and a report
        ``{"lm loss": [sum, tokens]}``, which Megatron sums over micro-batches and data-parallel ranks before
        it divides.
    """
    if loss_mask is None:
        raise ValueError("a loss was asked for on a pipeline stage that reads no labels")
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int32)
    # A stack is a copy: Megatron divides `total` in place.
    report = torch.stack([total.detach(), num_tokens.to(total.dtype)])
    return total, num_tokens, {"lm loss": report}
