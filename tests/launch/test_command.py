"""Golden texts of what is run."""

from __future__ import annotations

import errno
import os
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import UserError
from muon_offload_cli.launch.command import Setting, by_hand, environment, script, torchrun_command
from muon_offload_cli.launch.folder import (
    RunFolder,
    begin_folder,
    create_folder,
    local_ranks,
    planned_folder,
)

FOLDER = RunFolder(root=Path("/runs/a run"))


def config(**launcher: object) -> Config:
    made = Config(recipe="tiny", device=Device.cpu)
    for key, value in launcher.items():
        setattr(made.launcher, key, value)
    return made


def test_one_node_meets_at_a_port_that_torchrun_binds_itself() -> None:
    assert torchrun_command(config(ranks_per_node=4), FOLDER, python="/py") == [
        "/py",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=4",
        "--log-dir=/runs/a run/logs/torchrun",
        "-m",
        "muon_offload_cli.megatron.worker",
        "/runs/a run/resolved.yaml",
        "/runs/a run",
    ]


def test_one_node_with_a_port_of_the_users_choice() -> None:
    command = torchrun_command(config(master_port=1234), FOLDER, python="/py")
    assert command[3:6] == ["--nnodes=1", "--master-addr=127.0.0.1", "--master-port=1234"]


def test_several_nodes_meet_at_node_0() -> None:
    asked = config(nodes=2, node_rank=1, ranks_per_node=8, master_address="n0", master_port=29500)
    command = torchrun_command(asked, FOLDER, python="/py")
    assert command[3:8] == [
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=n0",
        "--master-port=29500",
        "--nproc-per-node=8",
    ]
    assert list(local_ranks(asked)) == list(range(8, 16))


def values(asked: Config, **inherited: str) -> dict[str, str | None]:
    settings = environment(asked, inherited=inherited, cores=16, base=Path("/here"))
    assert all(setting.reason for setting in settings)
    return {setting.name: setting.value for setting in settings}


def test_the_environment_of_a_cpu_rehearsal() -> None:
    assert values(config(ranks_per_node=3)) == {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "5",
        "TORCHDYNAMO_DISABLE": "1",
    }


def test_tensor_parallelism_on_gpus_limits_the_connections() -> None:
    asked = config()
    asked.device, asked.parallel.tp = Device.cuda, 2
    assert values(asked) == {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def test_more_ranks_than_cores_still_get_a_thread() -> None:
    assert values(config(ranks_per_node=64))["OMP_NUM_THREADS"] == "1"


def test_what_would_end_every_import_of_megatron_is_taken_away_where_it_is_set() -> None:
    assert values(config(), PYTHONOPTIMIZE="2", PYTHONWARNINGS="error").items() >= {
        ("PYTHONOPTIMIZE", None),
        ("PYTHONWARNINGS", None),
    }
    settings = [Setting(name="PYTHONWARNINGS", value=None, reason="why")]
    text = script(["true"], settings, metrics=Path("/r/metrics"), base=Path("/"), asked=["t"])
    assert "# why\nunset PYTHONWARNINGS\n" in text


def test_the_users_own_thread_count_stands() -> None:
    assert "OMP_NUM_THREADS" not in values(config(), OMP_NUM_THREADS="3")


def test_a_megatron_checkout_goes_before_what_the_launcher_imports() -> None:
    asked = config()
    asked.megatron.path = "megatron"
    assert values(asked, PYTHONPATH="lib:/abs")["PYTHONPATH"] == "/here/megatron:/here/lib:/abs"


def test_the_script_word_for_word() -> None:
    command = torchrun_command(config(), FOLDER, python="/py")
    settings = [Setting(name="OMP_NUM_THREADS", value="1", reason="the ranks of a node share its cores")]
    text = script(
        command,
        settings,
        metrics=FOLDER.metrics,
        base=Path("/it's here"),
        asked=["muon-offload", "train", "a\nrm -rf", "b= c"],
    )
    assert text == (
        "#!/usr/bin/env bash\n"
        "# muon-offload train $'a\\x0arm -rf' 'b= c'\n"
        "set -eu\n"
        "cd '/it'\"'\"'s here'\n"
        "if [ -n \"$(ls -A '/runs/a run/metrics')\" ]; then\n"
        "  echo '/runs/a run holds a run already; start another with muon-offload train' >&2\n"
        "  exit 2\n"
        "fi\n"
        "# the ranks of a node share its cores\n"
        "export OMP_NUM_THREADS=1\n"
        "exec /py \\\n"
        "  -m torch.distributed.run \\\n"
        "  --standalone \\\n"
        "  --local-addr=127.0.0.1 \\\n"
        "  --nproc-per-node=1 \\\n"
        "  '--log-dir=/runs/a run/logs/torchrun' \\\n"
        "  -m muon_offload_cli.megatron.worker \\\n"
        "  '/runs/a run/resolved.yaml' \\\n"
        "  '/runs/a run'\n"
    )


@given(
    words=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=4
    )
)
def test_bash_hands_on_the_very_words(words: list[str]) -> None:
    probe = ["/usr/bin/printf", "%s\\0", *words]
    settings = [Setting(name="A", value=" ".join(words), reason="r")]
    text = script(probe, settings, metrics=FOLDER.metrics, base=Path("/"), asked=["t"])
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == (words or [""])


def test_what_a_dry_run_prints_does_the_run_when_piped_into_bash(tmp_path: Path) -> None:
    folder = RunFolder(root=tmp_path / "a run")
    text = script(["cat", str(folder.resolved)], [], metrics=folder.metrics, base=tmp_path, asked=["t"])
    done = subprocess.run(["bash"], input=by_hand("a: $HOME\n", text, folder), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a: $HOME\n", "")
    assert folder.reports.is_dir()


def test_a_script_refuses_a_folder_in_which_a_run_has_written(tmp_path: Path) -> None:
    folder = RunFolder(root=tmp_path / "a run")
    folder.metrics.mkdir(parents=True)
    folder.rank_metrics(0).touch()
    text = script(["echo", "started"], [], metrics=folder.metrics, base=tmp_path, asked=["t"])
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{folder.root} holds a run already" in done.stderr


NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_two_runs_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    made = [create_folder(config(), now=NOW, base=tmp_path).root for _ in range(3)]
    assert [root.relative_to(tmp_path).as_posix() for root in made] == [
        "runs/tiny/20260102-030405",
        "runs/tiny/20260102-030405-2",
        "runs/tiny/20260102-030405-3",
    ]


def test_a_named_folder_may_be_new_or_empty(tmp_path: Path) -> None:
    asked = config()
    asked.run.directory = "mine/deep"
    (tmp_path / "mine/deep").mkdir(parents=True)
    assert create_folder(asked, now=NOW, base=tmp_path).logs.is_dir()
    with pytest.raises(UserError, match=r"run.directory=.*mine/deep is not empty"):
        create_folder(asked, now=NOW, base=tmp_path)


def test_a_script_is_written_with_the_bytes_of_its_paths(tmp_path: Path) -> None:
    folder = create_folder(config(), now=NOW, base=tmp_path)
    folder.write_script(f"cd {os.fsdecode(b'/x/\xc3\xbc\xff')}")
    assert folder.script.read_bytes() == b"cd /x/\xc3\xbc\xff"
    assert os.access(folder.script, os.X_OK)


def test_a_folder_that_takes_no_more_is_left_empty(tmp_path: Path) -> None:
    asked = config()
    asked.run.directory = str(tmp_path / "run")

    def full(folder: RunFolder) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder.script))

    with pytest.raises(
        UserError, match=r"run\.directory=.* cannot be made: No space left on device: .*run\.sh"
    ):
        begin_folder(asked, now=NOW, base=tmp_path, script=full)
    assert list((tmp_path / "run").iterdir()) == []
    assert begin_folder(asked, now=NOW, base=tmp_path, script=lambda _: "x").script.read_text() == "x"


def test_a_named_folder_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, code in (("file", 2), ("file/below", 3)):
        asked = config()
        asked.run.directory = name
        with pytest.raises(UserError, match=r"run\.directory") as caught:
            create_folder(asked, now=NOW, base=tmp_path)
        assert caught.value.exit_code == code


def test_nodes_that_share_a_file_system_do_not_share_a_folder(tmp_path: Path) -> None:
    asked = config(nodes=2, node_rank=1)
    asked.run.directory = str(tmp_path / "run")
    assert planned_folder(asked, now=NOW, base=Path("/")).root == tmp_path / "run" / "node_1"
