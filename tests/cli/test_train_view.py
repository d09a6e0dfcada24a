"""What train draws."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from muon_offload_cli.cli.train_view import PIPE_WIDTH, TrainView, figures_of, make_console
from muon_offload_cli.config.rules import MachineFacts, PlannedFacts
from muon_offload_cli.config.schema import Config, DataSource, Engine
from muon_offload_cli.launch.figures import StepSeen
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.follow import RankReported
from muon_offload_cli.launch.preview import NOTHING_KNOWN, preview
from muon_offload_cli.launch.verdict import RankVerdict, Verdict
from muon_offload_cli.records import RankReport

STEP = StepSeen(
    step=7,
    loss=1.25,
    grad_norm=0.5,
    learning_rate=1e-3,
    seconds=0.5,
    read_bytes_per_s=3 << 30,
    write_bytes_per_s=1 << 30,
    wait_s=0.0,
)


def config(engine: Engine) -> Config:
    made = Config(recipe="r")
    made.train.steps, made.train.sequence_length, made.train.global_batch = 30, 128, 16
    made.optimizer.lr = 1e-3
    made.model.name, made.model.num_layers, made.model.hidden_size = "m", 2, 64
    made.offload.engine, made.offload.directory = engine, ["/nvme"]
    return made


def shown(
    asked: Config, tmp_path_factory: pytest.TempPathFactory, facts: MachineFacts = NOTHING_KNOWN
) -> str:
    folder = RunFolder(root=tmp_path_factory.getbasetemp())
    return "\n".join(text for _, text in preview(asked, folder, facts))


def test_rings_are_shown_as_large_as_the_plan_makes_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    asked = config(Engine.disk)
    assert "staging 192.00 MiB" in shown(asked, tmp_path_factory)
    asked.launcher.ranks_per_node = 4
    facts = MachineFacts(planned=PlannedFacts(staging_bytes=4 * 28 * 2**20))
    assert "staging 28.00 MiB" in shown(asked, tmp_path_factory, facts)


@pytest.mark.parametrize(
    ("engine", "read", "unread"),
    [
        (Engine.none, [], ["chunk", "/nvme", "windows", "staging", "io_threads"]),
        (Engine.host, ["chunk"], ["/nvme", "staging", "io_threads"]),
        (Engine.mapped, ["chunk", "/nvme"], ["staging", "io_threads"]),
        (Engine.disk, ["chunk", "/nvme", "staging", "io_threads"], ["host_memory_gb"]),
    ],
)
def test_the_plan_names_only_settings_that_the_engine_reads(
    engine: Engine, read: list[str], unread: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = shown(config(engine), tmp_path_factory)
    assert [word for word in read if word not in text] == []
    assert [word for word in unread if word in text] == []


def test_the_plan_names_only_the_data_source_that_is_used(tmp_path_factory: pytest.TempPathFactory) -> None:
    asked = config(Engine.disk)
    asked.data.source, asked.data.paths, asked.data.prefix = DataSource.indexed, ["/unused.txt"], "/set"
    text = shown(asked, tmp_path_factory)
    assert "/set" in text
    assert "/unused.txt" not in text


def test_figures_that_no_rank_of_this_node_has_are_left_out() -> None:
    bare = StepSeen(
        step=1,
        loss=None,
        grad_norm=None,
        learning_rate=None,
        seconds=0.5,
        read_bytes_per_s=0,
        write_bytes_per_s=0,
        wait_s=0,
    )
    assert figures_of(bare) == "0.50 s"
    assert figures_of(STEP) == "loss 1.2500  grad norm 0.500  0.50 s  read 3.00 GiB/s  write 1.00 GiB/s"


@pytest.mark.parametrize("width", [40, 120])
def test_a_terminal_gets_a_live_line_with_all_figures(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    view = TrainView(console, total_steps=30)
    with view.live():
        view.see(STEP)
    assert "7/30 " in out.getvalue()
    assert "read 3.00 GiB/s" in out.getvalue()
    assert "write 1.00 GiB/s" in out.getvalue()


def test_a_pipe_gets_whole_lines_and_a_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    view = TrainView(make_console(), total_steps=30)
    reason = "kept its state in memory: offload.engine=disk was asked for, none was attached" * 3
    row = RankVerdict(
        rank=0, fine=False, verdict=reason, disk_bytes=1 << 40, host_bytes=1 << 40, gpu_bytes=1 << 40
    )
    view.see(STEP)
    view.table(Verdict(success=False, exit_code=4, headline="h", ranks=[row]), "disk")
    out = capsys.readouterr().out
    assert out.startswith("step 7/30  loss 1.2500")
    assert reason in out
    assert "…" not in out


@pytest.mark.parametrize(
    ("directories", "named"),
    [
        (("/nvme0/x", "/nvme1/x"), True),
        (("/nvme0/x, /nvme1/x",) * 2, True),
        (("/nvme0/x", "/nvme0/x"), False),
    ],
)
def test_the_table_names_directories_where_there_are_several(
    capsys: pytest.CaptureFixture[str], directories: tuple[str, ...], named: bool
) -> None:
    rows = [
        RankVerdict(rank=rank, fine=True, verdict="fine", directory=directory)
        for rank, directory in enumerate(directories)
    ]
    view = TrainView(make_console(), total_steps=30)
    view.table(Verdict(success=True, exit_code=0, headline="h", ranks=rows), "disk")
    out = capsys.readouterr().out
    assert [directory in out for directory in directories] == [named] * 2


def test_a_narrow_terminal_gets_each_rank_with_its_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [RankVerdict(rank=3, fine=True, verdict="fine", disk_bytes=1 << 20, steps=2, steps_from_backend=2)]
    view = TrainView(make_console(), total_steps=2)
    view.table(Verdict(success=True, exit_code=0, headline="h", ranks=rows), "disk")
    assert capsys.readouterr().out.splitlines() == [
        "rank 3",
        "  disk             1.00 MiB",
        "  steps from disk  2/2",
        "  verdict          fine",
    ]


def test_a_pipe_is_as_wide_as_its_reader_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert make_console().width == 70
    monkeypatch.setenv("COLUMNS", "wide")
    assert make_console().width == PIPE_WIDTH


def test_a_note_of_all_ranks_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = TrainView(make_console(), total_steps=30)
    for rank in range(4):
        view.see(
            RankReported(report=RankReport(rank=rank, notes=["O_DIRECT is refused on /nvme: buffered I/O"]))
        )
    assert capsys.readouterr().out == "note: O_DIRECT is refused on /nvme: buffered I/O\n"


def test_control_characters_and_bytes_that_are_no_text_are_made_visible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    TrainView(make_console(), total_steps=1).line("a\x1b[2Jb\t/r\udcfe")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\t/r\\xfe\n"
