"""Plain torch stand-ins compute what the fused kernels are specified to compute."""

from __future__ import annotations

import importlib

import torch

from muon_offload_cli.megatron.plain_layers import (
    GATED_DELTA_NET,
    ZeroCentredRMSNorm,
    causal_conv1d,
    l2norm,
    stand_in_for_fla,
)
from muon_offload_cli.megatron.substitute import Substitutions


def test_the_convolution_sees_no_future() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 7, 3), torch.randn(3, 4)
    convolved, state = causal_conv1d(x=x, weight=weight, bias=None, activation="silu")
    assert state is None
    expected = torch.zeros_like(x)
    for position in range(7):
        for tap in range(4):
            source = position - 3 + tap
            if source >= 0:
                expected[:, position] += x[:, source] * weight[:, tap]
    torch.testing.assert_close(convolved, torch.nn.functional.silu(expected))


def test_the_zero_centred_norm_starts_without_scale_and_adds_one_to_its_weight() -> None:
    norm = ZeroCentredRMSNorm(8, eps=1e-6)
    x = torch.randn(3, 8)
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm(x), plain)
    with torch.no_grad():
        norm.weight.fill_(0.5)
    torch.testing.assert_close(norm(x), 1.5 * plain)


def test_the_zero_centred_norm_keeps_the_type_of_its_input() -> None:
    norm = ZeroCentredRMSNorm(8, eps=1e-6).bfloat16()
    assert norm(torch.randn(2, 8).bfloat16()).dtype is torch.bfloat16


def test_the_length_is_one_after_l2norm() -> None:
    torch.testing.assert_close(l2norm(torch.randn(4, 16)).norm(dim=-1), torch.ones(4), rtol=1e-4, atol=1e-4)


def test_the_chunked_delta_rule_equals_its_recurrence() -> None:
    with Substitutions() as stack:
        stand_in_for_fla(stack)
        common = importlib.import_module(f"{GATED_DELTA_NET}.common")
        rule = common.chunk_gated_delta_rule
        torch.manual_seed(0)
        batch, length, heads, key, value = 1, 70, 2, 8, 4
        q, k = (l2norm(torch.randn(batch, length, heads, key)) for _ in range(2))
        v = torch.randn(batch, length, heads, value)
        g, beta = -torch.rand(batch, length, heads), torch.rand(batch, length, heads)
        chunked, _ = rule(q, k, v, g=g, beta=beta)
    state = torch.zeros(batch, heads, key, value)
    expected = torch.zeros_like(v)
    for t in range(length):
        state = state * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        written = (v[:, t] - read) * beta[:, t][..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        expected[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t] * key**-0.5, state)
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-4)


def test_the_stand_ins_are_taken_away_again() -> None:
    common = importlib.import_module(f"{GATED_DELTA_NET}.common")
    before = common.HAVE_FLA, common.l2norm
    with Substitutions() as stack:
        stand_in_for_fla(stack)
        assert common.HAVE_FLA
    assert (common.HAVE_FLA, common.l2norm) == before
