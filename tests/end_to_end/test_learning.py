"""A run learns: its loss falls below what a model that ignores the context can reach."""

from __future__ import annotations

import math
import sysconfig
from collections import Counter
from pathlib import Path

from tests.end_to_end.runs import state, train

MODULES = ("argparse.py", "inspect.py", "typing.py", "pathlib.py", "subprocess.py", "tarfile.py")


def test_the_loss_falls_clearly_below_the_unigram_entropy(tmp_path: Path, directory: Path) -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library / name for name in MODULES if (library / name).exists()]
    counts = Counter(b"".join(path.read_bytes() for path in paths))
    total = sum(counts.values())
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    assert total > 100_000
    run = train(
        tmp_path / "run",
        "launcher=one_rank",
        "parallel=data",
        *state(directory),
        "data=text",
        f"data.paths=[{','.join(map(str, paths))}]",
        f"data.cache_directory={tmp_path / 'cache'}",
        "model.vocab_size=null",
        "train.steps=30",
        "train.sequence_length=128",
        "train.micro_batch=8",
        "train.global_batch=16",
        "optimizer.lr=0.02",
    )
    assert run.exit_code == 0, run.output
    losses = [record.loss for record in run.records(0)]
    assert len(losses) == 30
    last = [loss for loss in losses[-5:] if loss is not None]
    assert len(last) == 5
    assert max(last) < entropy - 0.3, (losses, entropy)
    first = losses[0]
    assert first is not None
    assert first > entropy + 0.5
