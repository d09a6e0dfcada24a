"""A small torchrun: ranks in sessions of their own, the others ended when one fails, the same last words."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).parents[2] / "fake_worker.py"

BLOCK = """{title}
  time      : 2026-11-29_16:48:30
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : whatever"""


def main(arguments):
    num_ranks = int(next(a for a in arguments if a.startswith("--nproc-per-node=")).partition("=")[2])
    rest = arguments[arguments.index("-m") + 2 :]
    asked = []
    # Before there are ranks: whoever ends this process by SIGTERM must find them ended too.
    signal.signal(signal.SIGTERM, lambda signum, _frame: asked.append(signum))
    ranks = [
        subprocess.Popen([sys.executable, str(WORKER), *rest], env=environment, start_new_session=True)
        for environment in (
            os.environ | {"RANK": str(r), "WORLD_SIZE": str(num_ranks)} for r in range(num_ranks)
        )
    ]
    while not asked:
        codes = [rank.poll() for rank in ranks]
        bad = [r for r, code in enumerate(codes) if code]
        if bad:
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.02)
    else:
        stop(ranks)
        return 1
    first = bad[0]
    print(
        f"E1129 16:48:30.742000 4908 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
        f"(exitcode: {codes[first]}) local_rank: {first} (pid: {ranks[first].pid}) of binary: python",
        flush=True,
    )
    stop(ranks)
    others = [r for r in range(num_ranks) if r != first and ranks[r].returncode]
    print("Failures:")
    for number, r in enumerate(others, 1):
        print(BLOCK.format(title=f"[{number}]:", rank=r, code=ranks[r].returncode, pid=ranks[r].pid))
    print("-" * 60 + "\nRoot Cause (first observed failure):")
    print(BLOCK.format(title="[0]:", rank=first, code=codes[first], pid=ranks[first].pid), flush=True)
    return 1


def stop(ranks):
    patience_s = float(os.environ.get("FAKE_TORCHRUN_PATIENCE_S", "2"))
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    for rank in ranks:
        try:
            rank.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
