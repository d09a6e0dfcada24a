"""Cases of config/rules/pipeline.py."""

from __future__ import annotations

from tests.config.rule_cases.case import ARGS, Case

FIRST = f"{ARGS}decoder_first_pipeline_num_layers"
LAST = f"{ARGS}decoder_last_pipeline_num_layers"
VIRTUAL = f"{ARGS}num_virtual_stages_per_pipeline_rank"
LAYERS_PER_VIRTUAL = f"{ARGS}num_layers_per_virtual_pipeline_stage"

CASES = [
    Case("layers-pp", "parallel.pp=3", "parallel.pp=3 megatron.args.decoder_first_pipeline_num_layers=2"),
    Case(
        "layers-pp",
        "parallel.pp=3",
        f"parallel.pp=3 {ARGS}account_for_embedding_in_pipeline_split=true "
        f"{ARGS}account_for_loss_in_pipeline_split=true",
    ),
    Case("layers-pp", f"parallel.pp=2 {ARGS}account_for_loss_in_pipeline_split=true", "parallel.pp=2"),
    *(
        Case("pipeline-counts", f"{ARGS}{flag}={bad}", f"{ARGS}{flag}=1")
        for flag, bad in (
            ("decoder_first_pipeline_num_layers", "0"),
            ("decoder-last-pipeline-num-layers", "-1"),
            ("num_virtual_stages_per_pipeline_rank", "two"),
            ("num_layers_per_virtual_pipeline_stage", "1.5"),
        )
    ),
    Case(
        "uneven-pipeline",
        f"parallel.pp=2 {FIRST}=4",
        f"parallel.pp=2 {FIRST}=3",
    ),
    Case(
        "uneven-pipeline",
        f"parallel.pp=3 {LAST}=1",
        f"parallel.pp=3 {LAST}=2",
    ),
    Case("uneven-pipeline", f"{FIRST}=1", ""),
    Case(
        "uneven-pipeline",
        f"parallel.pp=2 {FIRST}=1 {LAST}=1",
        f"parallel.pp=2 {FIRST}=1 {LAST}=3",
    ),
    Case(
        "uneven-pipeline",
        f"parallel.pp=2 {FIRST}=1 {ARGS}account_for_loss_in_pipeline_split=true",
        f"parallel.pp=2 {FIRST}=1",
    ),
    Case(
        "pipeline-layout",
        f"parallel.pp=2 '{ARGS}pipeline_model_parallel_layout=\"Et|tt|tL\"'",
        f"parallel.pp=2 '{ARGS}pipeline_model_parallel_layout=\"Ett|ttL\"'",
    ),
    Case(
        "pipeline-layout",
        f"'{ARGS}pipeline_model_parallel_layout=\"Ett|ttL\"' {VIRTUAL}=2",
        "",
    ),
    Case(
        "virtual-pipeline",
        f"{VIRTUAL}=2",
        f"parallel.pp=2 {VIRTUAL}=2",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=3",
        f"parallel.pp=2 {LAYERS_PER_VIRTUAL}=1",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=2 {LAYERS_PER_VIRTUAL}=1",
        "",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=2 {ARGS}no_overlap_p2p_communication=true",
        f"parallel.pp=4 {VIRTUAL}=1 {ARGS}no_overlap_p2p_communication=true",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {LAYERS_PER_VIRTUAL}=1 {FIRST}=1",
        f"parallel.pp=2 {VIRTUAL}=1 {FIRST}=1",
    ),
    Case(
        "virtual-pipeline",
        "parallel.pp=2 parallel.num_virtual_stages_per_pipeline_rank=3",
        "parallel.pp=2 parallel.num_virtual_stages_per_pipeline_rank=2",
    ),
    Case(
        "uneven-pipeline",
        "parallel.pp=2 parallel.decoder_first_pipeline_num_layers=4",
        "parallel.pp=2 parallel.decoder_first_pipeline_num_layers=1",
    ),
    *(
        Case("pipeline-layout", f"parallel.pp=2 '{ARGS}pipeline_model_parallel_layout=\"{bad}\"'")
        for bad in ("Ett|ttx", "Ett|tL", "Et*3|(t|)*1L", "E(t)*99999999|tL", f"Et*{'9' * 5000}|L")
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=2 {FIRST}=1",
        f"parallel.pp=2 {VIRTUAL}=2 {FIRST}=2",
    ),
    Case(
        "virtual-batches",
        f"parallel.pp=2 train.global_batch=2 {VIRTUAL}=2",
        f"parallel.pp=2 train.global_batch=4 {VIRTUAL}=2",
    ),
    Case(
        "uneven-pipeline",
        "model.num_layers=5 parallel.pp=3 parallel.decoder_first_pipeline_num_layers=2",
        "model.num_layers=5 parallel.pp=3 parallel.decoder_first_pipeline_num_layers=1",
    ),
]
