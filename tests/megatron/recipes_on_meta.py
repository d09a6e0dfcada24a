"""Run by test_exact.py in a process of its own: Megatron's verdict on each shipped recipe, as JSON.

For every recipe one rank of each pipeline stage is built on the meta device in a world of full size; the
ranks of one stage differ in their experts and in their parts of matrices alone, so that the whole model's
size follows from them.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from typing import Any

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.exact import describe


def verdict(config: Config) -> dict[str, Any]:
    parallel = config.parallel
    world = config.launcher.nodes * config.launcher.ranks_per_node
    first_of_stage = range(0, world, world // parallel.pp)
    built = describe(config, list(first_of_stage))["ranks"]
    etp = parallel.etp or parallel.tp
    sizes = {"all": 0, "mtp": 0, "muon": 0}
    for stage, rank in enumerate(first_of_stage):
        for entry in built[str(rank)]:
            name = entry["name"].split(":")[-1]
            if name.startswith("embedding.") and stage:
                continue  # a copy of the first stage's, for the layer that predicts a further token
            size = math.prod(entry["shape"])
            if entry["expert"]:
                size *= parallel.ep
            if entry["tensor_parallel"]:
                size *= etp if entry["expert"] else parallel.tp
            sizes["all"] += size
            sizes["mtp"] += size * name.startswith("mtp.")
            sizes["muon"] += size * (entry["optimizer"] == "muon")
    return sizes


def main() -> None:
    warnings.simplefilter("ignore")
    answers: dict[str, Any] = {}
    for words in json.loads(sys.argv[1]):
        key = " ".join(words)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answers[key] = verdict(compose(words[0], words[1:]).config)
        except UserError as error:
            answers[key] = {"problem": str(error)}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
