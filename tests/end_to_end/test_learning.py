"""Runs learn what their data says, and nothing of what the loss does not count."""

from __future__ import annotations

import json
import math
import random
import sysconfig
from collections import Counter
from pathlib import Path

from tests.end_to_end.runs import DP2, state, train

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


def test_examples_teach_their_responses_and_the_loss_is_the_mean_over_all_response_tokens(
    tmp_path: Path, directory: Path
) -> None:
    # Prompts of noise, which no model predicts, and responses of very different lengths.
    noise, examples = random.Random(1), tmp_path / "examples.jsonl"
    responses = ["no" * length for length in (1, 12, 2, 9, 1, 12, 3, 1)]
    with examples.open("w") as stream:
        for response in responses:
            prompt = "".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=20))
            stream.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    run = train(
        tmp_path / "run",
        *DP2,
        *state(directory),
        "data=chat",
        f"data.paths=[{examples}]",
        f"data.cache_directory={tmp_path / 'cache'}",
        "model.vocab_size=null",
        "train.steps=12",
        "train.micro_batch=1",
        "optimizer.lr=0.02",
        fault={"kind": "losses", "folder": str(tmp_path)},
    )
    assert run.exit_code == 0, run.output
    by_rank = [
        [json.loads(line) for line in (tmp_path / f"losses_{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    ]
    micro_batches = len(responses) // 2
    for record in run.records(0):
        first = (record.step - 1) * micro_batches
        step = [losses for rank in by_rank for losses in rank[first : first + micro_batches]]
        # Each letter of a response and its end.
        assert sorted(map(len, step)) == sorted(len(response) + 1 for response in responses)
        every = [loss for losses in step for loss in losses]
        assert record.loss is not None
        assert math.isclose(record.loss, sum(every) / len(every), rel_tol=1e-5)
    # Whoever also learnt the prompts would stay above half of ln 26.
    assert (run.records(0)[-1].loss or math.inf) < 1.0
