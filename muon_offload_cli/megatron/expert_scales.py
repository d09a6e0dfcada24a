"""Keep torch's compiler from giving up on the activation of experts.

Megatron compiles it (`weighted_swiglu` in megatron/core/fusions), once for all experts and layers, and gives
each expert its tokens' probabilities as a view into those of all experts of the rank. torch compiles a
variant anew where the number of tokens, the view's offset, or the size of what it looks into is 0, 1 or
neither: up to nine (torch 2.11, 2.14). Past `torch._dynamo.config.recompile_limit` (8) it runs the missing
one uncompiled for the rest of the process, and that rounds differently. So what a step computes would depend
on the variants that the process had met before, and a resumed run, which has met fewer, would not be the run
that was saved.
"""

from __future__ import annotations

from typing import Any

from muon_offload_cli.megatron.substitute import Substitutions


def own_expert_scales(stack: Substitutions) -> None:
    """Hand every expert a copy of its probabilities, four bytes a token, until `stack` is closed.

    No value changes; four variants are left.
    """
    from megatron.core.transformer.mlp import MLP

    apply = MLP.forward

    def forward(self: Any, hidden_states: Any, per_token_scale: Any = None, **others: Any) -> Any:
        own = None if per_token_scale is None else per_token_scale.clone()
        return apply(self, hidden_states, own, **others)

    stack.replace(MLP, "forward", forward)
