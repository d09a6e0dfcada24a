"""Checkpoints that must not be loaded: damaged ones, and those of another model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from muon_offload_cli.checkpoints.seal import Seal
from tests.end_to_end import runs
from tests.end_to_end.saving import ONE, Saved, copy_of, engine_words, losses, saving


def test_a_flipped_bit_is_named_and_never_trained_on(single: Saved, tmp_path: Path, directory: Path) -> None:
    saved = copy_of(single, tmp_path)
    file = saved / "iter_0000006" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words("disk", directory),
        *saving(saved),
        "resume=auto",
        "train.steps=9",
    )
    assert run.exit_code == 2
    assert f"error: the checkpoint file {file} is damaged between bytes " in run.output
    assert run.reports[0].steps == 0


def test_a_truncated_file_is_passed_over_by_name(single: Saved, tmp_path: Path, directory: Path) -> None:
    saved = copy_of(single, tmp_path)
    with (saved / "iter_0000006" / "__0_0.distcp").open("r+b") as stream:
        stream.truncate(100_000)
    words = *ONE, *engine_words("disk", directory), *saving(saved), "train.steps=5"
    run = runs.train(tmp_path / "run", *words, "resume=auto")
    assert run.exit_code == 0, run.output
    assert "passes over step 6" in run.output
    assert "__0_0.distcp is truncated: 100000 of " in run.output
    assert run.reports[0].loaded_step == 4
    assert losses(run)[5] == losses(single.run)[5]


def test_another_model_is_refused_by_the_names_of_its_tensors(
    single: Saved, tmp_path: Path, directory: Path
) -> None:
    saved = copy_of(single, tmp_path)
    folder = saved / "iter_0000006"
    seal = Seal.read(folder)
    assert seal is not None
    # As if sealed before seals told the model: then only its tensors do.
    replace(seal, model={}).write(folder)
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words("disk", directory),
        f"resume={saved}",
        "model.moe.ffn_hidden_size=96",
        "train.steps=9",
    )
    assert run.exit_code == 2
    assert re.search(r"error: .* is not of this model: .*mlp\.experts.* has shape \[.*\], not \[", run.output)
    assert "Traceback" not in run.output
