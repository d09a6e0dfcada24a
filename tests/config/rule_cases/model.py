"""Cases of config/rules/model.py."""

from __future__ import annotations

from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import Case

CASES = [
    Case("head-size", "model.hidden_size=100", "model.hidden_size=100 model.kv_channels=32"),
    Case("query-groups", "model.num_query_groups=3", "model.num_query_groups=2"),
    Case(
        "context",
        "model.max_position_embeddings=100",
        "model.max_position_embeddings=128",
        level=Level.WARNING,
    ),
    Case(
        "context",
        "model.max_position_embeddings=100 parallel.cp=2",
        "model.max_position_embeddings=100 megatron.args.rotary_seq_len_interpolation_factor=2",
        level=Level.WARNING,
    ),
    Case("top-k", "model.moe.topk=300"),
    Case("normalization", "model.normalization=rms"),
    Case("head-width", "model.kv_channels=48", "model.kv_channels=32", level=Level.WARNING),
    Case("head-width", "model.kv_channels=48 model.hidden_size=100", "", level=Level.WARNING),
    Case("rotary-size", "model.kv_channels=33", "model.kv_channels=34"),
    Case("rotary-size", "model.rotary_percent=0.01", "model.rotary_percent=0.5"),
    Case("load-balancing", "model.moe.load_balancing=aux", "model.moe.load_balancing=sinkhorn"),
    Case(
        "load-balancing",
        "model.moe.load_balancing=none model.moe.aux_loss_coeff=0.1",
        "model.moe.load_balancing=none",
    ),
    Case("expert-layers", "model.moe.layer_freq=often", "model.moe.layer_freq=2"),
    Case("expert-layers", "model.moe.layer_freq=0"),
    Case("expert-layers", "'model.moe.layer_freq=\"([0]+[1]*2)\"'", "'model.moe.layer_freq=\"([0]+[1]*3)\"'"),
    Case("expert-layers", "'model.moe.layer_freq=\"[1]*10**9\"'", "'model.moe.layer_freq=\"([1]+[0]*1)*2\"'"),
    Case("expert-layers", "'model.moe.layer_freq=\"[2]*4\"'", "'model.moe.layer_freq=\"[1,0,1,0]\"'"),
    Case("grouped-gemm", "device=cpu model.moe.grouped_gemm=true", "device=cuda model.moe.grouped_gemm=true"),
]
