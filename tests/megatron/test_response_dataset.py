"""Samples of examples: the loss mask at its borders, by hand, and through Megatron's own data loading."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.rehearsal import rehearse
from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.data.response_dataset import ResponseDataset, make_sample
from muon_offload_cli.tokens import verification
from muon_offload_cli.tokens.preparation import PreparedTokens, prepare
from muon_offload_cli.tokens.verification import look_at_data, shortest_sequence, write_tokens

END = 256


def lists(sample: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    return tuple([int(x) for x in sample[key]] for key in ("tokens", "labels", "loss_mask"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("counted", "length", "labels", "mask"),
    [
        # Prompt 11 12, response 13 14: place 1 (token 12) predicts 13 and counts, what is behind is padding.
        ([0, 0, 1, 1], 6, [12, 13, 14, 0, 0, 0], [0, 1, 1, 0, 0, 0]),
        # As long as the sample and its last label: nothing is cut, nothing padded.
        ([0, 0, 1, 1], 3, [12, 13, 14], [0, 1, 1]),
        # One too long: the response loses its end.
        ([0, 0, 1, 1], 2, [12, 13], [0, 1]),
        # The prompt fills the sample.
        ([0, 0, 1, 1], 1, [12], [0]),
        # Nothing predicts the first token of a response without a prompt.
        ([1, 1, 1, 1], 4, [12, 13, 14, 0], [1, 1, 1, 0]),
        # Two turns: what the other side says between them does not count.
        ([0, 1, 0, 1], 4, [12, 13, 14, 0], [1, 0, 1, 0]),
    ],
)
def test_the_mask_is_that_of_the_label(
    counted: list[int], length: int, labels: list[int], mask: list[int]
) -> None:
    sample = make_sample(np.array([11, 12, 13, 14]), np.array(counted), length)
    padding = [0] * (length - 3)
    assert lists(sample) == ([11, 12, 13][:length] + padding, labels, mask)
    assert sample["position_ids"].tolist() == list(range(length))
    assert sample["padding_mask"].tolist() == [False] * min(3, length) + [True] * (length - 3)


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 40))
def test_as_many_labels_count_as_there_are_response_tokens_that_fit_behind_another(
    counted: list[bool], length: int
) -> None:
    tokens = np.arange(100, 100 + len(counted))
    sample = make_sample(tokens, np.array(counted), length)
    assert sample["loss_mask"].sum() == sum(counted[1 : length + 1])
    for place in np.flatnonzero(sample["loss_mask"]):
        assert sample["labels"][place] == sample["tokens"][place] + 1
        assert counted[sample["labels"][place] - 100]


def write(tmp_path: Path, *pairs: tuple[str, str]) -> DataConfig:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
    return DataConfig(source=DataSource.chat, paths=[str(path)], cache_directory=str(tmp_path / "cache"))


def dataset(
    prepared: PreparedTokens, length: int, *, samples: int | None = None, seed: int = 1
) -> ResponseDataset:
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        tokenizer=SimpleNamespace(eod=END, vocab_size=257, unique_identifiers={}),
        path_to_cache="",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=1,
        data_parallel_size=1,
    )
    low = ResponseDataset.build_low_level_dataset(str(prepared.prefix), config)
    indices = np.arange(ResponseDataset.numel_low_level_dataset(low))
    return ResponseDataset(low, str(prepared.prefix), indices, samples, Split.train, config)


def test_each_sample_holds_one_example_and_padding(tmp_path: Path) -> None:
    prepared = prepare(write(tmp_path, ("ab", "c"), ("x", "yz")))
    assert prepared.examples
    samples = dataset(prepared, 5)
    found = {tuple(map(tuple, lists(samples[place]))) for place in range(len(samples))}
    a, b, c, x, y, z = b"abcxyz"
    assert found == {
        ((a, b, c, 0, 0), (b, c, END, 0, 0), (0, 1, 1, 0, 0)),
        ((x, y, z, 0, 0), (y, z, END, 0, 0), (1, 1, 1, 0, 0)),
    }


def test_an_epoch_has_every_example_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    prepared = prepare(write(tmp_path, *[(letter, "!") for letter in "abcdefgh"]))
    first = dataset(prepared, 4, samples=16)
    firsts = [int(first[place]["tokens"][0]) for place in range(len(first))]
    assert sorted(firsts[:8]) == sorted(firsts[8:]) == [*b"abcdefgh"]
    assert firsts[:8] != firsts[8:]
    again = dataset(prepared, 4, samples=16)
    assert [int(again[place]["tokens"][0]) for place in reversed(range(16))] == firsts[::-1]
    other = dataset(prepared, 4, samples=16, seed=2)
    assert [int(other[place]["tokens"][0]) for place in range(16)] != firsts


def test_an_example_whose_prompt_fills_the_sequence_is_left_out(tmp_path: Path) -> None:
    prepared = prepare(write(tmp_path, ("abcd", "x"), ("abcde", "x")))
    kept = dataset(prepared, 4)
    assert len(kept) == 1
    assert lists(kept[0]) == ([*b"abcd"], [*b"bcdx"], [0, 0, 0, 1])


def run(tmp_path: Path, length: int, *pairs: tuple[str, str]) -> Any:
    data = write(tmp_path, *pairs)
    return compose(
        "tiny",
        [
            "data=chat",
            f"data.paths={data.paths}",
            f"data.cache_directory={data.cache_directory}",
            f"train.sequence_length={length}",
        ],
    ).config


def test_what_the_sequence_length_cuts_is_told_before_the_run(tmp_path: Path) -> None:
    pairs = (("abcd", "x"), ("abcde", "x"), ("a", "wxyz"), ("a", "x"))
    notes = [problem.what for problem in write_tokens(run(tmp_path, 4, *pairs))]
    assert notes == [
        "train.sequence_length=4: 1 of 4 examples have a longer prompt and are left out.",
        "train.sequence_length=4: 2 of 4 examples lose the end of their response.",
    ]
    config = run(tmp_path, 6, *pairs)
    assert write_tokens(config) == []


def test_a_run_without_any_response_left_is_refused_with_a_length_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run(tmp_path, 4, ("abcde", "x"), ("abcdef", "x"))
    looked = look_at_data(config)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UserError, match="every prompt is longer") as caught:
        write_tokens(config)
    (problem,) = caught.value.problems
    assert problem.fix == "train.sequence_length=8"
    assert looked == (problem,)
    monkeypatch.setattr(verification, "LOOKED_AT_BYTES", 10)
    # What is not looked at may hold a shorter one.
    assert look_at_data(config) == ()
    monkeypatch.undo()
    config.train.sequence_length = 8
    assert write_tokens(config) == []
    assert look_at_data(config) == ()


@pytest.mark.parametrize(("tp", "cp", "length"), [(1, 1, 7), (2, 1, 8), (4, 3, 12), (1, 2, 8)])
def test_the_length_that_keeps_examples_whole_divides_as_the_parallel_sizes_want(
    tmp_path: Path, tp: int, cp: int, length: int
) -> None:
    config = run(tmp_path, 4, ("abc", "wxyz"), ("a", "x"))
    config.parallel.tp, config.parallel.cp, config.parallel.sequence_parallel = tp, cp, tp > 1
    (problem,) = write_tokens(config)
    assert problem.fix == f"train.sequence_length={length} keeps every example whole"


def test_a_rehearsal_keeps_a_sequence_that_reaches_a_response(tmp_path: Path) -> None:
    config = run(tmp_path, 1024, ("a" * 99, "x"), ("b" * 500, "x"))
    assert shortest_sequence(config) == 99
    small = rehearse(config, shortest=shortest_sequence(config)).config
    assert small.train.sequence_length == 100
    assert [problem.what.split(": ")[1] for problem in write_tokens(small)] == [
        "1 of 2 examples have a longer prompt and are left out."
    ]
    assert shortest_sequence(compose("tiny").config) == 0


def test_a_vocabulary_smaller_than_the_tokens_is_refused(tmp_path: Path) -> None:
    config = run(tmp_path, 8, ("a", "x"))
    config.model.vocab_size = 100
    with pytest.raises(UserError, match="vocab_size=100 is less than the tokenizer's 257"):
        write_tokens(config)


def test_looking_at_data_finds_bad_lines_and_pairs_and_writes_nothing(tmp_path: Path) -> None:
    config = run(tmp_path, 8, ("a", "x"))
    assert look_at_data(config) == ()
    Path(config.data.paths[0]).write_text('{"prompt": "a"}\n')
    (problem,) = look_at_data(config)
    assert "a.jsonl line 1 has no response" in problem.what
    config.data.source = DataSource.text
    (problem,) = look_at_data(config)
    assert "line 1 has no field 'text'" in problem.what
    config.data.source = DataSource.indexed
    config.data.prefix = str(tmp_path / "set")
    (tmp_path / "set.idx").write_bytes(b"x")
    (tmp_path / "set.bin").write_bytes(b"x")
    (problem,) = look_at_data(config)
    assert "is damaged" in problem.what
    assert not (tmp_path / "cache").exists()


def test_samples_collate_in_torch_s_loader(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(
        dataset(prepare(write(tmp_path, ("ab", "c"), ("x", "yz"))), 5), batch_size=2
    )
    (batch,) = loader
    assert batch["tokens"].shape == batch["loss_mask"].shape == (2, 5)
    assert (batch["tokens"].dtype, batch["loss_mask"].dtype) == (torch.int64, torch.float32)
