"""Megatron's own data sets and schedules take what the provider and the forward step give them."""

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import global_vars

from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.data.forward_step import get_batch, loss_function, make_forward_step
from muon_offload_cli.megatron.data.provider import dataset_config, make_datasets_provider
from muon_offload_cli.tokens.preparation import PreparedTokens, prepare

SEQUENCE_LENGTH = 8


@pytest.fixture
def args(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Megatron's globals and a process group of one, without its parser."""
    args = SimpleNamespace(
        seed=1,
        seq_length=SEQUENCE_LENGTH,
        split=None,
        data_cache_path=None,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=False,
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        metadata_path=None,
        vocab_size=257,
        padded_vocab_size=None,
        pad_vocab_size=True,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
        rank=0,
    )
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    global_vars.set_args(args)
    global_vars._GLOBAL_TOKENIZER = build_tokenizer(args)
    yield args
    global_vars.destroy_global_vars()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedTokens:
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    return prepare(
        DataConfig(
            source=DataSource.text, paths=[str(tmp_path / "a.txt")], cache_directory=str(tmp_path / "cache")
        )
    )


def files_under(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_the_null_tokenizer_of_257_tokens_ends_documents_as_the_bytes_do(args):
    tokenizer = global_vars.get_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert args.padded_vocab_size == 512


def test_samples_are_the_text_with_labels_one_token_ahead(args, prepared, tmp_path):
    before = files_under(tmp_path)
    train, valid, test = make_datasets_provider(prepared)([100, 0, 0])
    assert (valid, test) == (None, None)
    assert len(train) >= 100
    sample = train[0]
    start = int(sample["tokens"][0])
    stream = [*range(200), 256] * 2
    assert sample["tokens"].tolist() == stream[start : start + SEQUENCE_LENGTH]
    assert sample["labels"].tolist() == stream[start + 1 : start + 1 + SEQUENCE_LENGTH]
    assert "attention_mask" not in sample
    assert files_under(tmp_path) == before, "sample indices must not be written beside the data"


def test_a_split_of_the_user_s_own_is_kept(args, prepared):
    args.split = "1,2,3"
    assert dataset_config(args, prepared.prefix).split == "1,2,3"


def test_a_cache_of_the_user_s_own_is_used(args, prepared, tmp_path):
    args.data_cache_path = str(tmp_path / "indices")
    make_datasets_provider(prepared)([100, 0, 0])
    assert files_under(tmp_path / "indices")


def test_mock_data_gives_samples_of_the_vocabulary(args):
    train, *_ = make_datasets_provider(prepare(DataConfig(source=DataSource.mock)))([10, 0, 0])
    assert 0 <= int(train[0]["tokens"].min()) <= int(train[0]["tokens"].max()) <= 256


def test_a_configuration_field_that_this_megatron_lacks_is_left_out(args, prepared, monkeypatch):
    args.context_parallel_size = 1
    known = dict(GPTDatasetConfig.__dataclass_fields__)
    assert "context_parallel_size" in known
    del known["context_parallel_size"]
    monkeypatch.setattr(GPTDatasetConfig, "__dataclass_fields__", known)
    assert dataset_config(args, prepared.prefix).context_parallel_size is None


def test_flags_that_need_another_kind_of_batch_are_refused_all_at_once(args, prepared):
    args.sft = True
    args.fim_data = True
    with pytest.raises(UserError) as caught:
        make_datasets_provider(prepared)([10, 0, 0])
    assert [problem.keys for problem in caught.value.problems] == [
        ("megatron.args.sft",),
        ("megatron.args.fim_data",),
    ]


def test_a_stage_in_the_middle_of_the_pipeline_reads_nothing(args, prepared, monkeypatch):
    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda **_: False)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda **_: False)
    assert make_datasets_provider(prepared)([100, 0, 0]) == [None, None, None]
    args.mtp_num_layers = 1
    assert make_datasets_provider(prepared)([100, 0, 0])[0] is not None


def test_the_provider_has_what_megatron_looks_for(prepared):
    provider = make_datasets_provider(prepared)
    assert provider.is_distributed
    assert "vp_stage" in inspect.signature(provider).parameters


class UniformModel(torch.nn.Module):
    """Gives every token the same probability, and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(257))
        self.called_with: tuple[Any, ...] = ()

    def forward(self, tokens, position_ids, attention_mask, *, labels=None, loss_mask=None, **padding):
        self.called_with = (tokens, position_ids, attention_mask, labels, loss_mask, *padding.values())
        if labels is None:
            return self.logits
        return -torch.log_softmax(self.logits, dim=0)[labels]


def test_a_forward_step_sums_the_cross_entropy_and_counts_the_tokens(args, prepared):
    train, *_ = make_datasets_provider(prepared)([100, 0, 0])
    loader = torch.utils.data.DataLoader(train, batch_size=2)
    output, loss = make_forward_step()(iter(loader), UniformModel())
    total, num_tokens, report = loss(output)
    assert total.requires_grad
    assert (num_tokens.item(), num_tokens.dtype) == (2 * SEQUENCE_LENGTH, torch.int32)
    assert total.item() == pytest.approx(2 * SEQUENCE_LENGTH * math.log(257))
    assert report["lm loss"].tolist() == pytest.approx([total.item(), 2 * SEQUENCE_LENGTH])


@pytest.mark.parametrize("stages", [1, 2])
def test_examples_reach_megatron_s_loop_with_the_mask_of_their_responses(args, tmp_path, monkeypatch, stages):
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab", "response": "c"}\n')
    prepared = prepare(
        DataConfig(
            source=DataSource.chat, paths=[str(tmp_path / "a.jsonl")], cache_directory=str(tmp_path / "cache")
        )
    )
    before = files_under(tmp_path)
    train, *_ = make_datasets_provider(prepared)([3, 0, 0])
    assert len(train) >= 3
    loader = torch.utils.data.DataLoader(train, batch_size=2)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: stages)
    model = UniformModel()
    output, loss = make_forward_step()(iter(loader), model)
    total, num_tokens, _ = loss(output)
    # "c" and its end, predicted by "b" and "c".
    assert num_tokens.item() == 2 * 2
    assert total.item() == pytest.approx(2 * 2 * math.log(257))
    padding = [False] * 3 + [True] * (SEQUENCE_LENGTH - 3)
    assert [mask.tolist() for mask in model.called_with[5:]] == ([[padding] * 2] if stages == 1 else [])
    assert files_under(tmp_path) == before


def test_a_stage_in_the_middle_of_the_pipeline_steps_without_a_batch(args):
    model = UniformModel()
    output, _ = make_forward_step()(None, model)
    assert output is model.logits
    assert model.called_with == (None,) * 5


@pytest.mark.parametrize("per_token", [False, True])
def test_megatron_s_schedule_takes_the_loss_and_leaves_the_report_alone(per_token):
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    output = torch.tensor([[1.0, 50.0, 2.0, 6.0]], requires_grad=True)
    store: list[Any] = []
    loss, num_tokens = forward_step_calc_loss(
        model=None,
        output_tensor=output,
        loss_func=lambda output: loss_function(mask, output),
        config=SimpleNamespace(calculate_per_token_loss=per_token, timers=None),
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=2,
        forward_data_store=store,
        cp_group_size=1,
        is_last_stage=True,
    )
    assert loss.item() == pytest.approx(9.0 if per_token else 9.0 / 3 / 2)
    assert num_tokens.item() == 3
    assert store[0]["lm loss"].tolist() == [9.0, 3.0]


def test_context_parallel_ranks_get_their_part_of_the_sequence(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: "group")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {"group": 2}[group])
    sample = {"tokens": torch.arange(8)[None], "labels": torch.arange(1, 9)[None], "other": torch.zeros(1)}
    parts = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        batch = get_batch(iter([dict(sample)]), torch.device("cpu"))
        assert batch.tokens is not None
        assert batch.labels is not None
        assert torch.equal(batch.labels, batch.tokens + 1)
        parts.append(batch.tokens[0].tolist())
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]]
