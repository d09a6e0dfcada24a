"""What torchrun starts on each rank: ``python -m muon_offload_cli.megatron.worker CONFIG RUN_FOLDER``.

Writes its log, metrics and report into the run folder. Exits 0 when training ended, with a user error's own
code where a person can help, and 1 with a traceback in its log otherwise.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.entry_point import ScriptExitError
from muon_offload_cli.records import RankReport


def main(arguments: list[str]) -> int:
    """Run one rank; returns its exit code."""
    config_path, folder = Path(arguments[0]), Path(arguments[1])
    rank = int(os.environ.get("RANK", "0"))
    _log_to(folder / "logs" / f"rank_{rank}.log")
    report = RankReport(rank=rank, pid=os.getpid(), host=socket.gethostname())
    report_path = folder / "reports" / f"rank_{rank}.json"
    report.write(report_path)
    try:
        _train(config_path, folder, report, report_path)
    except UserError as error:
        report.problems = [asdict(problem) for problem in error.problems]
        report.error = str(error)
        report.write(report_path)
        print(f"user error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except ScriptExitError as leaving:
        report.error = str(leaving)
        report.write(report_path)
        return leaving.code
    except BaseException as error:  # noqa: BLE001
        # The rank's boundary: the report names the cause, the log keeps the traceback.
        traceback.print_exc()
        report.error = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        report.write(report_path)
        return 1
    return 0


def _train(config_path: Path, folder: Path, report: RankReport, report_path: Path) -> None:
    from muon_offload_cli.config.yaml_files import load_config

    config = load_config(config_path)
    if config.device.name == "cpu":
        # Compiling small CPU kernels costs three times the start-up; read when torch._dynamo is imported.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    from muon_offload_cli.megatron.observer import Observer
    from muon_offload_cli.megatron.train import choose_device, train

    device = choose_device(config.device)
    if device == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    report.device = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    from muon_offload_cli.megatron.release import megatron_release

    report.megatron_version = megatron_release()
    report.write(report_path)
    metrics = folder / "metrics" / f"rank_{report.rank}.jsonl"
    script = config.megatron.entrypoint
    observer = Observer(report, report_path, metrics, config.offload.engine.name, script)
    try:
        train(config, device, observer)
    finally:
        observer.close()


class _Log(io.FileIO):
    """A log that takes what the drive has room for: a run does not end for the rest."""

    def write(self, data: Any) -> int:
        """Write, or seem to."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _log_to(path: Path) -> None:
    """Send this process's output, and that of libraries below Python, to its own log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        os.dup2(descriptor, stream.fileno())
        log = io.BufferedWriter(_Log(stream.fileno(), "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(log, "utf-8", "backslashreplace", line_buffering=True))
    os.close(descriptor)


if __name__ == "__main__":
    # Leave without waiting for threads of libraries: everything of ours is closed and written by now.
    code = main(sys.argv[1:])
    # Except processes: Megatron's checkpoint writer starts one, which would outlive this one.
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(5)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
