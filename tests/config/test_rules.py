"""Every rule passes where it should, finds what it should, and its fix makes it pass."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from muon_offload_cli.config.compose import Composition, compose
from muon_offload_cli.config.keys import is_known
from muon_offload_cli.config.rules import (
    DirectoryFacts,
    FileFacts,
    MachineFacts,
    Rule,
    all_rules,
    check,
    refuses,
)
from muon_offload_cli.errors import Level, Problem

NOTHING_KNOWN = MachineFacts()


def on_disk(**changes: object) -> MachineFacts:
    values: dict[str, object] = {
        "path": Path("/d/s"),
        "nearest": Path("/d"),
        "exists": False,
        "mount_point": Path("/d"),
    }
    return MachineFacts(directory=DirectoryFacts(**(values | changes)), needed_bytes=1000)  # type: ignore[arg-type]


@dataclass
class Case:
    rule: str
    bad: str
    good: str = ""
    bad_facts: MachineFacts = field(default=NOTHING_KNOWN)
    good_facts: MachineFacts = field(default=NOTHING_KNOWN)
    level: Level = Level.ERROR


CASES = [
    Case("optimizer-family", "optimizer.name=soap"),
    Case("optimizer-family", "optimizer.name=adaptive_muon"),
    Case("optimizer-family", "optimizer.name=adm", "optimizer=adam"),
    Case("plain-muon", "optimizer.name=muon", "optimizer.name=muon optimizer.layer_wise=true"),
    Case("plain-muon", "optimizer.name=muon optimizer.distributed=true", "optimizer=muon"),
    Case("muon-distributed", "optimizer.distributed=true"),
    Case("adam-distributed", "optimizer.name=adam", "optimizer=adam"),
    Case("adam-layer-wise", "optimizer=adam optimizer.layer_wise=true", "optimizer=adam"),
    Case("adam-offload", "optimizer=adam", "optimizer=adam offload=none"),
    Case(
        "unused-optimizer-keys", "optimizer=adam optimizer.muon_momentum=0.9", "optimizer.muon_momentum=0.9"
    ),
    Case("muon-choices", "optimizer.muon_coefficient_type=quartic", "optimizer.muon_coefficient_type=cans"),
    Case("muon-choices", "optimizer.lr_decay_style=cosinus"),
    Case(
        "layer-wise-unread",
        "optimizer.layer_wise=false",
        "optimizer.layer_wise=true",
        level=Level.WARNING,
    ),
    Case("number-range", "train.steps=0"),
    Case("number-range", "optimizer.lr=nan"),
    Case("number-range", "optimizer.lr=inf"),
    Case("number-range", "optimizer.muon_momentum=1"),
    Case("number-range", "optimizer.muon_num_ns_steps=0"),
    Case("number-range", "launcher.master_port=0"),
    Case("number-range", "model.hidden_size=99999999999"),
    Case("node-rank", "launcher.nodes=2 launcher.node_rank=2", "launcher.nodes=2 launcher.node_rank=1"),
    Case(
        "meeting-point",
        "launcher.nodes=2 launcher.master_address=a",
        "launcher.nodes=2 launcher.master_address=a launcher.master_port=1234",
    ),
    Case("chunk-size", "offload.chunk_mb=-1"),
    Case("chunk-size", "offload.chunk_mb=inf"),
    Case("chunking-off", "offload.chunk_mb=0", "offload.chunk_mb=0 offload=none", level=Level.WARNING),
    Case("fraction-range", "offload.fraction=1.5", "offload.fraction=0.5"),
    Case("fraction-range", "offload.fraction=nan"),
    Case("fraction-zero", "offload.fraction=0", "offload.fraction=0 offload=none"),
    Case("windows", "offload.windows=1", level=Level.WARNING),
    Case("host-memory", "offload.host_memory_gb=lots", "offload.host_memory_gb=auto"),
    Case("host-memory", "offload.host_memory_gb=-1", "offload.host_memory_gb=1.5"),
    Case(
        "unused-offload-keys",
        "offload=none offload.directory=/x",
        "offload.directory=/x",
        level=Level.WARNING,
    ),
    *(
        Case("unserved-readers", f"megatron.args.{flag}=true", f"megatron.args.{flag}=true offload=none")
        for flag in (
            "log-params-norm",
            "qk_clip",
            "optimizer_cuda_graph",
            "offload_optimizer_states",
            "chunked_optimizer_state_offload",
            "optimizer-cpu-offload",
            "use_megatron_fsdp",
            "use_torch_fsdp2",
            "async_save",
        )
    ),
    Case(
        "full-iteration-graph",
        "megatron.args.cuda_graph_scope=full_iteration",
        "megatron.args.cuda_graph_scope=attn",
    ),
    Case(
        "full-iteration-graph",
        "megatron.args.cuda-graph-impl=full_iteration",
        "megatron.args.cuda_graph_impl=local",
    ),
    Case("fp16", "megatron.args.fp16=true", "megatron.args.fp16=false"),
    Case("param-gather", "megatron.args.overlap_param_gather=true"),
    Case("optimizer-instances", "megatron.args.num-distributed-optimizer-instances=2"),
    Case("save-offloaded", "checkpoint.directory=/c", "checkpoint.directory=/c checkpoint.optimizer=false"),
    Case("flag-form", "'megatron.args.a={b: 1}'", "megatron.args.a=[1,2]"),
    Case("flag-form", "megatron.args.a.b=1"),
    Case(
        "flag-ours", "megatron.args.tensor-model-parallel-size=2", "megatron.args.recompute_granularity=full"
    ),
    Case("flag-ours", "megatron.args.lr=1"),
    Case(
        "flag-unknown",
        "megatron.args.recompute_granulity=full",
        "megatron.args.recompute-granularity=full",
        MachineFacts(megatron_flags=frozenset({"recompute_granularity"})),
        MachineFacts(megatron_flags=frozenset({"recompute_granularity"})),
    ),
    Case("world-size", "launcher.ranks_per_node=3", "launcher.ranks_per_node=6"),
    Case("world-size", "launcher.nodes=3 launcher.ranks_per_node=1 parallel.tp=2"),
    Case("expert-world-size", "launcher.ranks_per_node=6", "launcher.ranks_per_node=8"),
    Case("expert-world-size", "parallel.ep=4", "parallel.ep=4 parallel.etp=1"),
    Case("expert-world-size", "launcher.ranks_per_node=1"),
    Case("experts-ep", "model.moe.num_experts=9", "model.moe.num_experts=10"),
    Case("experts-ep", "model=tiny_dense", "model=tiny_dense parallel=tp2"),
    Case("heads-tp", "parallel.tp=3", "parallel.tp=4"),
    Case("heads-tp", "parallel.tp=8"),
    Case("ffn-tp", "model.ffn_hidden_size=513"),
    Case("ffn-tp", "model.moe.ffn_hidden_size=255", "model.moe.ffn_hidden_size=255 parallel.etp=1"),
    Case("layers-pp", "parallel.pp=3", "parallel.pp=3 megatron.args.decoder_first_pipeline_num_layers=2"),
    Case("global-batch", "train.global_batch=6", "train.global_batch=8"),
    Case("sequence-parallel", "parallel.tp=1", "parallel.tp=1 parallel.sequence_parallel=false"),
    Case("sequence-parallel", "train.sequence_length=127"),
    Case("moe-sequence-parallel", "parallel.sequence_parallel=false"),
    Case("sequence-cp", "parallel.cp=2 train.sequence_length=130", "parallel.cp=2"),
    Case("gpus-per-node", "cluster=h200_x1", "cluster=gb300_x4"),
    Case("head-size", "model.hidden_size=100", "model.hidden_size=100 model.kv_channels=32"),
    Case("query-groups", "model.num_query_groups=3", "model.num_query_groups=2"),
    Case("top-k", "model.moe.topk=300"),
    Case("unused-expert-keys", "model=tiny_dense model.moe.topk=3", "model.moe.topk=3"),
    Case("layers-pp", "parallel.pp=2 parallel.decoder_first_pipeline_num_layers=4", "parallel.pp=2"),
    Case(
        "layers-pp",
        "model.num_layers=5 parallel.pp=3 parallel.decoder_first_pipeline_num_layers=2",
        "model.num_layers=5 parallel.pp=3 parallel.decoder_first_pipeline_num_layers=1",
    ),
    Case("latent-attention", "model.multi_latent_attention=true", "model=tiny_latent"),
    Case("latent-attention", "model=tiny_latent model.v_head_dim=0"),
    Case("latent-attention", "model=tiny_latent model.attention_output_gate=true"),
    Case("latent-attention", "model=tiny_latent model.num_query_groups=2"),
    Case("latent-attention", "model=tiny_latent model.rope_type=mrope"),
    Case("linear-attention", "model.experimental_attention_variant=gated_delta_net", "model=tiny_delta"),
    Case("linear-attention", "model=tiny_delta model.experimental_attention_variant=dsa"),
    Case("linear-attention", "model=tiny_delta model.linear_num_value_heads=3"),
    Case("linear-attention", "model=tiny_delta model.linear_num_key_heads=1"),
    Case("unused-attention-keys", "model.kv_lora_rank=512", "model=tiny_latent model.kv_lora_rank=512"),
    Case(
        "unused-attention-keys",
        "model.linear_attention_freq=4",
        "model=tiny_delta model.linear_attention_freq=4",
    ),
    Case("router", "model.moe.router_score_function=sigmoyd"),
    Case(
        "router",
        "model.moe.router_enable_expert_bias=true",
        "model.moe.router_enable_expert_bias=true model.moe.router_score_function=sigmoid",
    ),
    Case("router", "model.moe.router_num_groups=2"),
    Case("router", "model.moe.router_num_groups=2 model.moe.router_group_topk=3"),
    Case(
        "router",
        "model.moe.router_num_groups=3 model.moe.router_group_topk=1",
        "model.moe.router_num_groups=4 model.moe.router_group_topk=1",
    ),
    Case(
        "shared-expert-gate",
        "model.moe.shared_expert_gate=true",
        "model.moe.shared_expert_gate=true model.moe.shared_expert_ffn_hidden_size=64",
    ),
    Case(
        "zero-centred-norm",
        "model.apply_layernorm_1p=true model.normalization=LayerNorm",
        "model.apply_layernorm_1p=true",
    ),
    Case("further-tokens", "model.mtp_num_layers=0", "model.mtp_num_layers=1"),
    Case("further-tokens", "model.mtp_loss_scaling_factor=-1"),
    Case("normalization", "model.normalization=rms"),
    Case("data-named", "data=text", "data=text data.paths=[/a]"),
    Case("data-named", "data=indexed", "data=indexed data.prefix=/a"),
    Case("data-unused", "data.paths=[/a]"),
    Case("vocabulary", "data=indexed data.prefix=/a", "data=indexed data.prefix=/a model.vocab_size=99"),
    Case("vocabulary", "model.vocab_size=256", "model.vocab_size=257"),
    *(
        Case(
            "data-files",
            "data=text data.paths=[/a]",
            "data=text data.paths=[/a]",
            MachineFacts(files={"/a": bad}),
            MachineFacts(files={"/a": FileFacts(num_bytes=5)}),
        )
        for bad in (
            FileFacts(num_bytes=None),
            FileFacts(num_bytes=0),
            FileFacts(num_bytes=9, readable=False),
            FileFacts(num_bytes=None, is_folder=True),
        )
    ),
    Case(
        "data-files",
        "data=indexed data.prefix=/a",
        bad_facts=MachineFacts(files={"/a.bin": FileFacts(num_bytes=3), "/a.idx": FileFacts(num_bytes=None)}),
    ),
    Case("mock-data", "data=mock", level=Level.NOTE),
    Case("found", "", bad_facts=MachineFacts(problems=(Problem(what="megatron-core is missing."),))),
    Case(
        "cuda",
        "device=cuda",
        "device=auto",
        MachineFacts(cuda_available=False),
        MachineFacts(cuda_available=False),
    ),
    Case(
        "gpus-here",
        "",
        "launcher.ranks_per_node=2",
        MachineFacts(cuda_available=True, num_gpus=2),
        MachineFacts(cuda_available=True, num_gpus=2),
    ),
    Case("directory-absolute", "offload.directory=a", "offload.directory=/a"),
    Case(
        "directory-absolute",
        "offload.directory=a",
        "offload.directory=a offload=host",
        MachineFacts(working_directory=Path("/home/u")),
    ),
    Case("directory-absolute", "offload.directory="),
    Case("directory-absolute", "'offload.directory=\"~/x\"'"),
    Case("directory-folder", "", "", on_disk(is_folder=False), on_disk()),
    Case("directory-memory", "", "", on_disk(is_memory=True, kind="tmpfs"), on_disk()),
    Case(
        "directory-memory", "offload=mapped", "offload=host", on_disk(is_memory=True, kind="ramfs"), on_disk()
    ),
    Case("directory-pseudo", "", "", on_disk(kind="proc"), on_disk()),
    Case("directory-writable", "", "", on_disk(writable=False), on_disk(exists=False)),
    Case("directory-writable", "", "", on_disk(writable=False, exists=True), on_disk(exists=True)),
    Case("directory-space", "", "", on_disk(free_bytes=999), on_disk(free_bytes=1000)),
    Case("directory-network", "", "", on_disk(is_network=True, kind="nfs4"), on_disk(), Level.WARNING),
    Case("directory-overlay", "", "", on_disk(kind="overlay"), on_disk(), Level.NOTE),
    Case("direct-io", "", "", on_disk(direct_io=False), on_disk(direct_io=True), Level.WARNING),
    Case("direct-io", "", "offload=mapped", on_disk(direct_io=False), on_disk(), Level.WARNING),
]
IDS = [f"{case.rule}-{number}" for number, case in enumerate(CASES)]


@functools.cache
def composed(words: str) -> Composition:
    return compose("tiny", shlex.split(words))


def rule_named(name: str) -> Rule:
    return next(rule for rule in all_rules() if rule.name == name)


def found_by(case: Case, words: str, facts: MachineFacts) -> list[Problem]:
    composition = composed(words)
    return rule_named(case.rule)(composition.config, composition.written, facts)


def as_overrides(fix: str) -> list[str]:
    """Return the words of a fix that can be pasted, an empty list for one that is a sentence."""
    words = shlex.split(fix)
    pasted = [word for word in words if is_known(word.partition("=")[0]) and not word.endswith("=...")]
    return pasted if len(pasted) == len(words) else []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_finds_the_bad_case_and_passes_the_good_one(case: Case) -> None:
    problems = found_by(case, case.bad, case.bad_facts)
    assert problems
    assert {problem.level for problem in problems} == {case.level}
    assert all(problem.rule == case.rule and problem.what.endswith((".", "?")) for problem in problems)
    assert found_by(case, case.good, case.good_facts) == []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_pasting_the_fix_makes_the_rule_pass(case: Case) -> None:
    for problem in found_by(case, case.bad, case.bad_facts):
        pasted = as_overrides(problem.fix)
        if not pasted:
            # A sentence must not look as if it could be pasted.
            assert not problem.fix or "=" not in problem.fix.split()[0] or problem.fix.endswith("=...")
            continue
        # Facts follow the directory: a paste of another one is judged on a machine that has it.
        facts = case.good_facts if problem.fix.startswith("offload.directory=") else case.bad_facts
        fixed = " ".join([case.bad, *map(shlex.quote, pasted)])
        assert problem.what not in {left.what for left in found_by(case, fixed, facts)}


def test_every_rule_has_a_case_a_reason_and_its_own_name() -> None:
    names = [rule.name for rule in all_rules()]
    assert len(set(names)) == len(names)
    assert {case.rule for case in CASES} == set(names)
    assert all(rule.reason.endswith(".") for rule in all_rules())


def test_good_recipes_pass_every_rule_when_nothing_is_known_of_the_machine() -> None:
    for recipe in ("tiny", "gpt_2b9"):
        composition = compose(recipe)
        assert refuses(check(composition.config, composition.written, NOTHING_KNOWN), strict=True) == []


def test_what_only_the_machine_can_tell_is_a_note_for_a_run_meant_for_elsewhere() -> None:
    composition = composed("offload.fraction=3")
    facts = on_disk(is_memory=True, kind="tmpfs")
    levels = {p.rule: p.level for p in check(composition.config, composition.written, facts, here=False)}
    assert levels["directory-memory"] is Level.NOTE
    assert levels["fraction-range"] is Level.ERROR


def test_errors_are_told_before_warnings_and_notes() -> None:
    composition = composed("data=mock offload.chunk_mb=0 offload.windows=0")
    levels = [p.level for p in check(composition.config, composition.written, NOTHING_KNOWN)]
    assert levels == sorted(levels, key=list(Level).index)
    assert set(levels) == set(Level)


def test_a_disk_that_is_too_small_is_told_with_path_needed_and_free_and_does_not_fit() -> None:
    composition = composed("")
    facts = MachineFacts(
        directory=DirectoryFacts(
            path=Path("/m/s"), nearest=Path("/m"), mount_point=Path("/m"), free_bytes=2**26
        ),
        needed_bytes=2**28,
    )
    (problem,) = refuses(check(composition.config, composition.written, facts))
    assert problem.exit_code == 3
    for words in ("/m/s", "256.00 MiB", "64.00 MiB"):
        assert words in problem.what
    assert "192.00 MiB" in problem.fix
