"""Facts are what the machine shows, and looking at it leaves nothing behind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.gathering import gather_facts, look_at_directory, resolve_directory
from muon_offload_cli.config.inputs import look_at_pretrained
from muon_offload_cli.errors import UserError
from muon_offload_cli.tokens.preparation import prepare


def test_a_directory_that_does_not_exist_is_judged_by_its_nearest_parent_and_not_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    config = compose("tiny", [f"offload.directory={target}"]).config
    (directory,) = gather_facts(config, probe=False).directories
    assert (directory.path, directory.nearest, directory.exists) == (target, tmp_path.resolve(), False)
    assert directory.writable
    assert directory.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_each_of_several_directories_is_looked_at_and_all_know_their_filesystem(tmp_path: Path) -> None:
    config = compose("tiny", [f"offload.directory=[{tmp_path}/a,/proc/a,{tmp_path}/b]"]).config
    first, second, third = gather_facts(config, probe=False, write=True).directories
    assert first.device == third.device != second.device
    assert (first.kind, second.kind) == (third.kind, "proc")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_directory_is_seen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = compose("tiny", [f"offload.directory={tmp_path}/file/state"]).config
    (directory,) = gather_facts(config, probe=False).directories
    assert not directory.is_folder


def test_data_files_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "full.txt").write_text("abc")
    (tmp_path / "empty.txt").touch()
    names = [str(tmp_path / name) for name in ("full.txt", "empty.txt", "missing.txt", ".")]
    config = compose("tiny", ["data=text", f"data.paths=[{','.join(names)}]", "offload=none"]).config
    facts = gather_facts(config, probe=False)
    assert facts.directories == ()
    assert [facts.files[name].num_bytes for name in names] == [3, 0, None, None]
    assert facts.files[names[3]].is_folder


def test_a_script_is_looked_at_and_a_megatron_beside_it_is_told_unless_it_is_the_one_in_use(
    tmp_path: Path,
) -> None:
    (tmp_path / "pretrain.py").write_text("pass")
    words = [f"megatron.entrypoint={tmp_path}/pretrain.py", "offload=none"]
    facts = gather_facts(compose("tiny", words).config, probe=False)
    assert facts.files[f"{tmp_path}/pretrain.py"].num_bytes == 4
    assert facts.megatron_beside_script is None
    for part in ("core", "training"):
        (tmp_path / "megatron" / part).mkdir(parents=True)
    assert gather_facts(compose("tiny", words).config, probe=False).megatron_beside_script == str(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    words.append(f"megatron.path={tmp_path}/link")
    assert gather_facts(compose("tiny", words).config, probe=False).megatron_beside_script is None


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (b"raise SystemExit('was run')", ""),
        (b"import sys\nimport os; x = '\\d'", ""),
        (importlib.util.MAGIC_NUMBER + bytes(20), ""),
        (b"import os\ndef f(:\n", "is not Python: line 2: invalid syntax"),
        (b"x = 1\nreturn x\n", "is not Python: line 2: 'return' outside function"),
        (b"\x89\xff\x00\x01" * 9, "is not Python: "),
        (b"x = '\xff'", "is not Python: "),
        (b"# nothing\n\n", "has no statement, only comments"),
        (b"#!/bin/python\n'What it does.'\n", "has no statement, only comments"),
    ],
)
def test_a_script_is_compiled_and_nothing_of_it_is_run(tmp_path: Path, source: bytes, why: str) -> None:
    script = tmp_path / "pretrain.py"
    script.write_bytes(source)
    config = compose("tiny", [f"megatron.entrypoint={script}", "offload=none"]).config
    found = gather_facts(config, probe=False).files[str(script)].not_python
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_the_default_directory_is_filled_in_for_engines_that_keep_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRATCH", "/mnt/x")
    assert resolve_directory(compose("tiny").config).offload.directory == ["/mnt/x/muon_offload"]
    assert resolve_directory(compose("tiny", ["offload=host"]).config).offload.directory is None
    assert resolve_directory(compose("tiny", ["offload.directory=/a"]).config).offload.directory == ["/a"]


def test_a_symlink_into_memory_is_seen_through(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    (tmp_path / "link").symlink_to("/dev/shm")
    config = compose("tiny", [f"offload.directory={tmp_path}/link/state"]).config
    (directory,) = gather_facts(config, probe=False).directories
    assert directory.is_memory
    assert directory.nearest == Path("/dev/shm").resolve()


def test_a_link_that_leads_nowhere_is_seen_also_on_the_way(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    for below in ("", "state"):
        known = look_at_directory(link / below, write=False)
        assert known.dangling == (tmp_path / "gone" / below)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="cannot be looked at"):
        look_at_directory(tmp_path / "loop", write=False)
    (tmp_path / "gone").mkdir()
    assert look_at_directory(link / "state", write=False).dangling is None


def test_nothing_is_written_to_views_of_the_kernel() -> None:
    known = look_at_directory(Path("/proc/sys"), write=True)
    assert (known.kind, known.write_error, known.direct_io) == ("proc", None, None)


def test_the_write_test_runs_only_when_asked_for_and_leaves_nothing(tmp_path: Path) -> None:
    config = compose("tiny", [f"offload.directory={tmp_path}/state"]).config
    (untried,) = gather_facts(config, probe=False).directories
    (tried,) = gather_facts(config, probe=False, write=True).directories
    assert (untried.write_error, tried.write_error) == (None, "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_megatron_is_not_probed(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    facts = gather_facts(compose("tiny", [f"megatron.path={tmp_path}"]).config, probe=True)
    assert facts.megatron_missing == ("megatron/training",)
    assert facts.megatron is None


@pytest.mark.parametrize("path", ["~nobody_of_that_name/x", "/a\0b", "/" + "x" * 5000])
def test_paths_that_cannot_be_looked_at_are_no_megatron_and_no_file(path: str) -> None:
    config = compose("tiny", ["data=text"]).config
    config.megatron.path, config.data.paths = path, [path]
    facts = gather_facts(config, probe=False)
    assert facts.megatron_missing == ("megatron/core", "megatron/training")
    assert facts.files[path].num_bytes is None


def test_the_folder_of_a_pretrained_model_is_looked_at(tmp_path: Path) -> None:
    assert look_at_pretrained(tmp_path).weight_files == 0
    assert not look_at_pretrained(tmp_path).tokenizer
    for name in ("model-1-of-2.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}')
    found = look_at_pretrained(tmp_path)
    assert (found.weight_files, found.missing) == (1, ("model-2-of-2.safetensors",))
    assert found.tokenizer
    index.write_text("{")
    assert look_at_pretrained(tmp_path).missing == (index.name,)


def test_what_is_installed_for_it_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "megatron/bridge"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = look_at_pretrained(tmp_path)
    assert (found.bridge, found.transformers) == (True, True)


def test_every_folder_that_a_run_names_to_write_into_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    words = ["run.directory=/proc/x", "checkpoint.directory=new", "data.cache_directory=file"]
    config = compose("tiny", ["offload=none", *words]).config
    folders = gather_facts(config, probe=False).folders
    assert (folders["run.directory"].kind, folders["data.cache_directory"].is_folder) == ("proc", False)
    saved = folders["checkpoint.directory"]
    assert (saved.path, saved.nearest, saved.writable) == (tmp_path / "new", tmp_path.resolve(), True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    config.run.directory = "/a\0b"
    (problem,) = gather_facts(config, probe=False).problems
    assert problem.what.startswith("run.directory=/a")
    assert problem.fix == "run.directory=/a/folder/that/you/may/write"


def test_a_cache_of_the_users_own_that_cannot_be_made_is_looked_at_before_tokens_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("tiny", ["data=stdlib"]).config
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    found = gather_facts(config, probe=False).folders["data.cache_directory"]
    assert (found.path, found.kind) == (Path("/proc/muon-offload"), "proc")
    with pytest.raises(
        UserError, match=r"data.cache_directory=/proc/muon-offload cannot be written"
    ) as caught:
        prepare(config.data)
    assert caught.value.exit_code == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "muon-offload").mkdir()
    assert "data.cache_directory" not in gather_facts(config, probe=False).folders


def test_a_directory_named_twice_is_looked_at_once(tmp_path: Path) -> None:
    config = compose("tiny", [f"offload.directory=[{tmp_path}/a,{tmp_path}//a]"]).config
    assert [each.path for each in gather_facts(config, probe=False).directories] == [tmp_path / "a"]


def test_a_default_folder_that_cannot_be_looked_at_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    config = compose("tiny", ["data=stdlib"]).config
    (problem,) = gather_facts(config, probe=False, folders=("data.cache_directory",)).problems
    assert problem.keys == ("data.cache_directory",)
    assert gather_facts(config, probe=False, folders=()).problems == ()
