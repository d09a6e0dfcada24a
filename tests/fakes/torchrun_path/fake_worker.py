"""A rank that writes what a worker writes and misbehaves as FAKE_PLAN says.

FAKE_PLAN is JSON: ``{"steps": 3, "pause_s": 0.02, "ranks": {"1": {...}}}``. Keys of a rank: ``die`` (a
signal to send to itself), ``raise`` (error text), ``problems`` (user errors), ``at`` (after which step,
default 1; 0: before the first), ``after`` (only once that rank has died), ``until`` (waits until that file
exists), ``in`` (misbehaves in the run folder of this name alone), ``hang``, ``deaf`` (ignores SIGTERM),
``child`` (leaves a grandchild), ``memory`` (keeps its state in memory), ``report`` (fields of the report),
``half`` (writes lines in two halves), ``saves`` (SIGTERM ends it after its step, with exit code 0).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from muon_offload_cli.records import RankReport, StepRecord

rank = int(os.environ["RANK"])
plan = json.loads(os.environ.get("FAKE_PLAN", "{}"))
mine = plan.get("ranks", {}).get(str(rank), {})
run = Path(sys.argv[2])
steps = plan.get("steps", 3)
engine = "none" if mine.get("memory") else plan.get("engine", "disk")

log = os.open(run / "logs" / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)
if mine.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
asked = []
if mine.get("saves"):
    signal.signal(signal.SIGTERM, lambda signum, _frame: asked.append(signum))

path = run / "reports" / f"rank_{rank}.json"
report = RankReport(rank=rank, pid=os.getpid(), host="localhost", device="cpu")
report.write(path)
on_disk = 0 if mine.get("memory") else 4 << 20
report.engine, report.muon_parameters, report.muon_state_bytes = engine, 1 << 19, 4 << 20
if engine == "disk":
    report.disk_bytes, report.chunks, report.directory = on_disk, 5, "/nvme"
elif engine == "host":
    report.host_bytes, report.chunks = on_disk, 5
else:
    report.gpu_bytes = 4 << 20
report.adam_state_bytes = 1 << 20
for key, value in mine.get("report", {}).items():
    setattr(report, key, value)
report.write(path)
if mine.get("child"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def has_died(other):
    try:
        return psutil.Process(RankReport.read(path.with_name(f"rank_{other}.json")).pid).status() == "zombie"
    except FileNotFoundError:
        return False
    except psutil.NoSuchProcess:
        return True


def is_everyone_up():
    """Whether every rank is about to take steps; a deaf one is deaf by then, and children are there."""
    metrics = [run / "metrics" / f"rank_{other}.jsonl" for other in range(int(os.environ["WORLD_SIZE"]))]
    return all(path.exists() for path in metrics)


def misbehave():
    if mine.get("in", run.name) != run.name:
        return
    while not is_everyone_up():
        time.sleep(0.01)
    while "after" in mine and not has_died(mine["after"]):
        time.sleep(0.01)
    while "until" in mine and not Path(mine["until"]).exists():
        time.sleep(0.01)
    if "die" in mine:
        print(f"about to end on rank {rank}", flush=True)
        os.kill(os.getpid(), mine["die"])
        time.sleep(60)
    if "raise" in mine or "problems" in mine:
        report.error, report.problems = mine.get("raise", ""), mine.get("problems", [])
        report.write(path)
        print(f"Traceback (most recent call last):\n  somewhere\n{report.error}", flush=True)
        if not mine.get("hang"):
            sys.exit(max((p["exit_code"] for p in report.problems), default=1))
    if mine.get("hang"):
        time.sleep(600)


with (run / "metrics" / f"rank_{rank}.jsonl").open("a") as metrics:
    for step in range(1, steps + 1):
        if step - 1 == mine.get("at", 1):
            misbehave()
        time.sleep(plan.get("pause_s", 0.02))
        line = StepRecord(
            step=step,
            loss=5.0 / step if rank == 0 else None,
            grad_norm=1.5,
            seconds=0.5 + rank / 10,
            engine=engine,
            chunks=0 if engine == "none" else 5,
            bytes_read=report.disk_bytes,
            bytes_written=report.disk_bytes,
            disk_bytes=report.disk_bytes,
        ).to_json()
        if mine.get("half"):
            metrics.write(line[:30])
            metrics.flush()
            time.sleep(0.15)
            line = line[30:]
        metrics.write(line + "\n")
        metrics.flush()
        print(f"muon state step: {report.disk_bytes} on {engine}", flush=True)
        if asked:
            steps = step
            break
    if steps == mine.get("at", 1):
        misbehave()
report.steps = steps
report.steps_from_backend = 0 if engine == "none" else steps
for key, value in mine.get("report", {}).items():
    setattr(report, key, value)
report.finished = True
report.write(path)
