"""Choosing the checkpoint that a run goes on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muon_offload_cli.checkpoints.names import SAVING, SEAL, step_folder
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.shapes import shapes_of
from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.launch.resume import _usable, settle_checkpoints
from tests.checkpoints import forged


def settle(tmp_path: Path, *words: str) -> tuple[Config, list[Problem]]:
    given = ["train.steps=100", f"checkpoint.directory={tmp_path / 'c'}", *words]
    return settle_checkpoints(compose("tiny", given).config, tmp_path)


def chosen(config: Config) -> tuple[str | None, int | None]:
    return config.resume.source, config.resume.step


def refused(tmp_path: Path, *words: str) -> Problem:
    with pytest.raises(UserError) as raised:
        settle(tmp_path, *words)
    (problem,) = raised.value.problems
    return problem


NEW = [(), ("resume=none",), ("resume=null",)]


@pytest.mark.parametrize("words", NEW)
def test_a_run_starts_anew_unless_it_is_told_otherwise(tmp_path: Path, words: tuple[str, ...]) -> None:
    forged.write_files(step_folder(tmp_path / "c" / SAVING, 8))
    config, notes = settle(tmp_path, *words)
    assert (chosen(config), notes) == ((None, None), [])


@pytest.mark.parametrize("words", NEW)
def test_a_new_run_is_not_saved_among_anothers_checkpoints(tmp_path: Path, words: tuple[str, ...]) -> None:
    forged.save(tmp_path / "c", 4)
    problem = refused(tmp_path, *words)
    assert f"checkpoint.directory={tmp_path / 'c'} holds checkpoints (the last of step 4)" in problem.what
    assert "a run with resume=none starts anew" in problem.what
    assert problem.fix == "resume=auto; or checkpoint.directory=/another/folder"
    assert chosen(settle(tmp_path, *words, "checkpoint.directory=null")[0]) == (None, None)
    (step_folder(tmp_path / "c", 4) / ".metadata").unlink()
    assert refused(tmp_path, *words).fix == "checkpoint.directory=/another/folder"


def test_a_run_that_goes_on_from_elsewhere_is_not_saved_among_anothers_checkpoints(tmp_path: Path) -> None:
    for name in ("c", "other"):
        forged.save(tmp_path / name, 4)
    problem = refused(tmp_path, "resume=other")
    assert "a run with resume=other goes on from others" in problem.what
    assert problem.fix.startswith("resume=auto; or ")
    problem = refused(tmp_path, "resume=other", "resume.weights_only=true")
    assert problem.fix.startswith("resume=auto resume.weights_only=false; or ")
    # The same folder by another name; a run that takes weights alone begins anew there too.
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert chosen(settle(tmp_path, "resume=link")[0]) == (str(tmp_path / "link"), 4)
    for own in ("link", "c/iter_0000004"):
        problem = refused(tmp_path, f"resume={own}", "resume.weights_only=true")
        assert f"a run with resume={own} starts anew" in problem.what


def test_a_home_of_nobody_is_a_name_like_any_other(tmp_path: Path) -> None:
    config, _ = settle(tmp_path, "checkpoint.directory='~nosuch/c'", "resume=none")
    assert config.checkpoint.directory == str(tmp_path / "~nosuch/c")


def test_a_folder_that_cannot_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged.save(tmp_path / "c", 4)

    def closed(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("muon_offload_cli.launch.resume.Path.exists", closed)
        with pytest.raises(UserError, match="cannot be looked at: Permission denied"):
            _usable(str(tmp_path / "c"), tmp_path)
    monkeypatch.setattr("muon_offload_cli.launch.resume.has_optimizer", closed)
    assert "cannot be read: Permission denied" in refused(tmp_path, "resume=auto").what


def test_a_checkpoint_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    forged.save(tmp_path / "c", 4)
    problem = refused(tmp_path, f"checkpoint.directory={tmp_path}/c/iter_0000004", "resume=auto")
    assert "is a checkpoint itself" in problem.what
    assert problem.fix == f"checkpoint.directory={tmp_path}/c"


def test_auto_takes_the_newest(tmp_path: Path) -> None:
    for step in (4, 20, 6):
        forged.save(tmp_path / "c", step)
    config, notes = settle(tmp_path, "resume=auto")
    assert chosen(config) == (str(tmp_path / "c"), 20)
    assert [note.what for note in notes] == [
        f"resume=auto takes step 20 of {tmp_path / 'c'} and goes on from it."
    ]


def test_auto_passes_over_an_incomplete_one_and_says_why(tmp_path: Path) -> None:
    forged.save(tmp_path / "c", 4)
    (forged.save(tmp_path / "c", 6) / "__0_0.distcp").write_bytes(b"short")
    forged.write_files(step_folder(tmp_path / "c" / SAVING, 8))
    config, notes = settle(tmp_path, "resume=auto")
    assert chosen(config) == (str(tmp_path / "c"), 4)
    assert "passes over step 6" in notes[0].what
    assert "__0_0.distcp is truncated: 5 of 10240 bytes" in notes[0].what
    assert "passes over step 8" in notes[1].what
    assert "its save was interrupted" in notes[1].what


def test_auto_starts_anew_where_nothing_was_saved_yet(tmp_path: Path) -> None:
    config, notes = settle(tmp_path, "resume=auto")
    assert chosen(config) == (None, None)
    assert "starts anew" in notes[0].what


def test_auto_refuses_to_start_anew_over_damaged_checkpoints(tmp_path: Path) -> None:
    (forged.save(tmp_path / "c", 4) / "__0_0.distcp").unlink()
    problem = refused(tmp_path, "resume=auto")
    assert "no checkpoint in" in problem.what
    assert "step 4: __0_0.distcp is missing" in problem.what


def test_a_number_is_a_step_of_the_run_itself(tmp_path: Path) -> None:
    for step in (4, 6):
        forged.save(tmp_path / "c", step)
    assert chosen(settle(tmp_path, "resume=6")[0]) == (str(tmp_path / "c"), 6)
    problem = refused(tmp_path, "resume=5")
    assert "there is no step 5" in problem.what
    assert "Complete steps: 4, 6." in problem.what
    assert problem.fix == "resume=6"


def test_a_run_goes_back_to_an_earlier_step_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        forged.save(tmp_path / "c", step)
    for source in ("2", "c/iter_0000002"):
        problem = refused(tmp_path, f"resume={source}")
        assert "keeps later ones (4, 6)" in problem.what
        assert problem.fix == f"checkpoint.directory={tmp_path}/c_from_2 resume={tmp_path}/c/iter_0000002"
    config, _ = settle(tmp_path, *problem.fix.split())
    assert chosen(config) == (str(tmp_path / "c"), 2)
    # A later one that cannot be used is in nobody's way.
    for step in (4, 6):
        (tmp_path / f"c/iter_000000{step}/__0_0.distcp").unlink()
    assert chosen(settle(tmp_path, "resume=2")[0]) == (str(tmp_path / "c"), 2)


def test_a_path_is_a_directory_or_one_step_of_it(tmp_path: Path) -> None:
    for step in (4, 6):
        forged.save(tmp_path / "other", step)
    other = tmp_path / "other"
    assert chosen(settle(tmp_path, f"resume={other}")[0]) == (str(other), 6)
    assert chosen(settle(tmp_path, "resume=other")[0]) == (str(other), 6)
    assert chosen(settle(tmp_path, f"resume={other}/iter_0000004")[0]) == (str(other), 4)
    assert chosen(settle(tmp_path, f"resume={other}", "resume.step=4")[0]) == (str(other), 4)


def test_what_plain_megatron_saved_is_taken(tmp_path: Path) -> None:
    forged.save_plain(tmp_path / "other", 4)
    assert chosen(settle(tmp_path, "resume=other")[0]) == (str(tmp_path / "other"), 4)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path, "resume=/nowhere/at/all").what
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refused(tmp_path, "resume=empty").what
    (tmp_path / "file").touch()
    assert "that is a file, not a folder" in refused(tmp_path, f"resume={tmp_path}/file").what


@pytest.mark.parametrize("word", ["-1", "2.5", "true", "'~nobody_of_that_name'", ""])
def test_a_word_that_is_no_checkpoint_gets_the_ones_that_are(tmp_path: Path, word: str) -> None:
    forged.save(tmp_path, 4)
    problem = refused(tmp_path, f"resume={word}")
    assert ("none of auto, none and a step's number" if word else "is empty") in problem.what
    assert problem.fix == "resume=auto"
    assert (
        refused(tmp_path, f"resume={word}", "checkpoint.directory=null").fix == "resume=/path/to/checkpoints"
    )


@pytest.mark.parametrize("save", [forged.save, forged.save_plain])
def test_weights_alone_cannot_be_gone_on_from(tmp_path: Path, save: Callable[..., object]) -> None:
    save(tmp_path / "other", 4, optimizer=False)
    problem = refused(tmp_path, "resume=other")
    assert "saved without optimizer state (checkpoint.optimizer=false)" in problem.what
    assert "resume.weights_only=true" in problem.fix
    assert chosen(settle(tmp_path, "resume=other", "resume.weights_only=true")[0])[1] == 4


def test_another_model_is_refused_by_its_keys(tmp_path: Path) -> None:
    same = shapes_of(compose("tiny", []).config)
    saved = same | {"model.num_layers": 9, "model.moe.ffn_hidden_size": 7, "model.kv_channels": 32}
    forged.save(tmp_path / "c", 4, model=saved)
    weights = (f"resume={tmp_path}/c", "resume.weights_only=true", "checkpoint.directory=null")
    for words in (("resume=auto",), weights):
        with pytest.raises(UserError) as raised:
            settle(tmp_path, *words)
        layers, experts = raised.value.problems
        assert (
            f"was saved with model.num_layers=9, and this run has model.num_layers={same['model.num_layers']}"
            in (layers.what)
        )
        assert (layers.fix, experts.fix) == ("model.num_layers=9", "model.moe.ffn_hidden_size=7")
    # Null is filled in by Megatron, perhaps with just what was saved.
    assert same["model.kv_channels"] is None


def test_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    forged.save(tmp_path / "c", 100)
    problem = refused(tmp_path, "resume=auto")
    assert "is the end of train.steps=100: nothing is left to train" in problem.what
    assert problem.fix == "train.steps=200"
    assert "is beyond train.steps=50: " in refused(tmp_path, "resume=auto", "train.steps=50").what


def test_the_vocabulary_stays_padded_as_it_was_saved(tmp_path: Path) -> None:
    forged.save(tmp_path / "c", 4, padded_vocabulary=512)
    config, notes = settle(tmp_path, "resume=auto", "parallel=data")
    assert config.model.make_vocab_size_divisible_by == 512
    assert any("padded to 512" in note.what for note in notes)
    same, _ = settle(tmp_path, "resume=auto", "parallel=tp2_ep2")
    assert same.model.make_vocab_size_divisible_by == 128


def test_a_place_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as raised:
        settle(tmp_path, f"checkpoint.directory={tmp_path}/file/c")
    assert "is a file" in str(raised.value)


def test_relative_places_are_made_absolute(tmp_path: Path) -> None:
    config, _ = settle(tmp_path, "checkpoint.directory=saved/here")
    assert config.checkpoint.directory == str(tmp_path / "saved" / "here")


def test_an_unreadable_seal_is_passed_over(tmp_path: Path) -> None:
    forged.save(tmp_path / "c", 4)
    (forged.save(tmp_path / "c", 6) / SEAL).write_text("{")
    assert chosen(settle(tmp_path, "resume=auto")[0])[1] == 4
