from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from muon_offload_cli.machine.limits import rank_limits

PRINT = "from muon_offload_cli.machine.limits import rank_limits; print(rank_limits())"


def test_limits_are_the_ones_that_the_shell_set() -> None:
    shell = f"ulimit -n 200; ulimit -f 8; ulimit -v 8388608; exec '{sys.executable}' -c '{PRINT}'"
    told = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert "open_files=200, file_bytes=8192, address_bytes=8589934592" in told


def test_mappings_are_limited_by_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/max_map_count").write_text("65530\n")
    assert rank_limits(tmp_path).max_maps == 65530
    assert rank_limits(tmp_path / "nothing").max_maps is None
