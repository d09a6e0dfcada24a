"""``muon-offload`` as it is, except that ranks run `tests.end_to_end.worker`, which can misbehave."""

from __future__ import annotations

import functools
import sys

from muon_offload_cli.cli import train
from muon_offload_cli.cli.main import run
from muon_offload_cli.launch.command import torchrun_command

if __name__ == "__main__":
    train.torchrun_command = functools.partial(torchrun_command, worker="tests.end_to_end.worker")  # type: ignore[attr-defined]
    sys.exit(run(sys.argv[1:]))
