"""What saves take and leave: disk, memory, descriptors, maps."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from muon_offload_cli.checkpoints.names import SAVING
from tests.end_to_end import runs
from tests.end_to_end.saving import ONE, Started, engine_words, saving, seal_bytes
from tests.fakes.fake_torchrun import HANG_S


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Let a process stand still, so that what is seen of it is of one moment."""
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        yield
    finally:
        process.resume()


def test_ten_saves_leave_disk_memory_descriptors_and_maps_as_one_does(
    start: Callable[..., Started], tmp_path: Path, directory: Path
) -> None:
    saved = tmp_path / "saved"
    run = start(
        *ONE,
        *engine_words("disk", directory),
        *saving(saved, interval=2),
        "checkpoint.keep=2",
        "train.steps=5000",
    )
    samples: dict[int, tuple[int, int, int, int, int]] = {}

    def sampled() -> bool:
        report = run.report()
        # The first steps of any process grow its heap, saves or not; from then on it is level.
        if report is None or report.saves < 12 or report.saves in samples:
            return False
        process = psutil.Process(report.pid)
        with stopped(process):
            # Between two saves, where nothing of a save may be left.
            if (saved / SAVING).exists():
                return False
            maps = len(Path(f"/proc/{report.pid}/maps").read_text().splitlines())
            anonymous = int(
                re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{report.pid}/status").read_text())[1]  # type: ignore[index]
            )
            # Files without a name are the state's.
            state = sum(
                file.stat().st_blocks
                for file in Path(f"/proc/{report.pid}/fd").iterdir()
                if "(deleted)" in str(file.readlink())
            )
            figures = process.num_fds(), process.num_threads(), maps, anonymous, state
            samples[report.saves] = figures
        return len(samples) >= 10

    run.wait_for(sampled)
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=HANG_S)
    # The least of several, since a process may have just opened a file or started a thread.
    ordered = [samples[saves] for saves in sorted(samples)]
    first, last = (list(map(min, *part)) for part in (ordered[:5], ordered[5:]))
    assert last[0] <= first[0]
    assert last[1] <= first[1]
    assert last[2] <= first[2] + 8
    assert last[4] == first[4] > 0
    # Ten copies of the state alone would be more.
    assert last[3] <= first[3] + 8 * 1024
    # Those that are kept, and one more that is being saved or deleted.
    assert sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) < 4 * seal_bytes(saved)


BIG = (
    *ONE,
    "model=tiny_dense",
    "model.num_layers=3",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=4096",
    "model.vocab_size=16384",
    "train.sequence_length=16",
    "train.global_batch=1",
    "train.micro_batch=1",
    "offload.chunk_mb=32",
    "offload.staging_mb=64",
    "run.digest=false",
)
STATE_BYTES = 300 * 2**20
"""What the masters and momenta of `BIG` take at least; Adam's state of its embeddings takes 384 MiB."""


def test_no_copy_of_the_state_is_made_in_memory(tmp_path: Path, directory: Path) -> None:
    saved = tmp_path / "saved"
    words = *BIG, *engine_words("disk", directory), *saving(saved)
    for kind, more in (("saving", ("train.steps=1",)), ("loading", ("train.steps=2", "resume=auto"))):
        run = runs.train(tmp_path / kind, *words, *more, moe=False)
        assert run.exit_code == 0, run.output
        report = run.reports[0]
        assert report.muon_state_bytes >= STATE_BYTES
        assert report.adam_state_bytes >= STATE_BYTES
        # Buffers of 136 MiB (168 while loading) and a tensor or two. A copy of the state would be more, and
        # one of what SwiGLU's factory makes too; mapped pages of the file count as well.
        assert 0 < report.save_memory_bytes < STATE_BYTES
        # Adam's two moments are made while loading: on a CPU device they are host memory too.
        assert report.load_memory_bytes < STATE_BYTES + report.adam_state_bytes * 2 / 3
    assert report.loaded_step == 1
    assert report.load_memory_bytes > 0
