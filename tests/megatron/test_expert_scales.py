"""Experts are handed probabilities with storage of their own, so that compiled code has few variants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from megatron.core.transformer.mlp import MLP

from muon_offload_cli.megatron.expert_scales import own_expert_scales
from muon_offload_cli.megatron.substitute import Substitutions

ROUTINGS = [
    [2, 0, 3, 1],
    [0, 6, 1, 0],
    [1, 0, 0, 0],
    [0, 1, 0, 0],
    [5, 0, 0, 0],
    [6, 1, 0, 2],
    [1, 0, 1, 2],
    [7, 9, 0, 0],
    [1, 5, 0, 1],
    [1, 1, 0, 0],
    [0, 0, 0, 0],
    [0, 0, 7, 1],
    [2, 2, 4, 8],
]
"""Tokens of each expert of a rank, by micro batch, in an order that makes many variants."""


@contextlib.contextmanager
def experts_of(forward: object, *, own: bool) -> Iterator[None]:
    with Substitutions() as stack:
        stack.replace(MLP, "forward", forward)
        if own:
            own_expert_scales(stack)
        yield


def scaled(routing: list[int]) -> list[torch.Tensor]:
    """Call an expert for each of `routing` as Megatron's `SequentialMLP` does, and return what they give."""
    tokens = torch.ones(sum(routing), 4)
    scales = torch.arange(sum(routing), dtype=torch.float32).requires_grad_() * 1
    parts = zip(torch.split(tokens, routing), torch.split(scales, routing), strict=True)
    return [MLP.forward(None, mine, its) for mine, its in parts]


def variants(*, own: bool) -> int:
    """Count how often torch compiles the activation for all `ROUTINGS`."""
    compiled = 0

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        nonlocal compiled
        compiled += 1
        return module.forward

    torch._dynamo.reset()
    activation = torch.compile(lambda hidden, scale: hidden * scale, backend=backend)

    def forward(_: object, hidden: torch.Tensor, per_token_scale: torch.Tensor) -> torch.Tensor:
        # The first matrix product gives storage of its own.
        return activation(hidden.clone(), per_token_scale.unsqueeze(-1))

    # As inside an autograd function, where Megatron calls it.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64), experts_of(forward, own=own):
        for routing in ROUTINGS:
            expected = torch.arange(sum(routing), dtype=torch.float32).unsqueeze(-1).expand(-1, 4)
            assert torch.equal(torch.cat(scaled(routing)), expected)
    torch._dynamo.reset()
    return compiled


def test_an_activation_has_at_most_four_variants_and_would_have_more() -> None:
    assert variants(own=True) <= 4 < variants(own=False)


@pytest.mark.parametrize("scale", [None, torch.arange(4.0)[2:]])
def test_an_expert_is_given_its_own_scales_and_all_else_as_it_was(scale: torch.Tensor | None) -> None:
    def forward(_: object, hidden: object, per_token_scale: torch.Tensor | None, **others: object) -> object:
        return hidden, per_token_scale, others

    with experts_of(forward, own=True):
        hidden, own, others = MLP.forward(None, "hidden", per_token_scale=scale, padding_mask=1)
    assert (hidden, others) == ("hidden", {"padding_mask": 1})
    if scale is None:
        assert own is None
    else:
        assert torch.equal(own, scale)
        assert own.untyped_storage().nbytes() == 8
