"""Whatever is written at whatever key of whatever recipe, check-config answers cleanly and soon."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import fake_torchrun
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from muon_offload_cli.cli import main
from muon_offload_cli.config.keys import enum_members, leaf_types
from muon_offload_cli.config.locations import find_recipes, group_options
from muon_offload_cli.config.rules import exclusive, flags, pipeline, unread

# Told in processor time, so that a busy machine fails no test.
LIMIT_S = 3.0
OPTIONS = {group: sorted(options) for group, options in group_options().items()}
FLAGS = [
    *exclusive.UNSERVED,
    *unread.ADAM_FLAGS,
    *flags.OURS,
    *(pipeline.FIRST, pipeline.LAST, pipeline.LAYOUT, pipeline.LAYERS_PER_VIRTUAL, pipeline.VIRTUAL_PER_RANK),
    "make_vocab_size_divisible_by",
    "num_distributed_optimizer_instances",
    "ckpt_format",
    "cuda_graph_impl",
]

numbers = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 2147483629]),
    st.floats(),
).map(str)
words = st.sampled_from(
    [
        "null",
        "true",
        "false",
        "nan",
        "inf",
        "-inf",
        "1e309",
        "auto",
        "",
        "/",
        "~",
        "~nobody/x",
        "/dev/shm/x",
        "a",
    ]
)
patterns = st.sampled_from(
    ['"[1]*61"', '"([0]*1+[1]*3)"', '"[1]*10**9"', '"[[1]]*4"', '"Ett|ttL"', '"E|"', "[1,2]"]
)
texts = st.text(max_size=30)
values = st.one_of(
    numbers, words, patterns, texts, st.lists(words, max_size=3).map(lambda w: f"[{','.join(w)}]")
)


@st.composite
def overrides(draw: st.DrawFn) -> str:
    if draw(st.integers(0, 5)) == 0:
        group = draw(st.sampled_from(sorted(OPTIONS)))
        return f"{group}={draw(st.sampled_from(OPTIONS[group]))}"
    key = draw(st.sampled_from([*leaf_types(), *(f"megatron.args.{flag}" for flag in FLAGS)]))
    members = enum_members(key)
    if members and draw(st.booleans()):
        return f"{key}={draw(st.sampled_from(members))}"
    return f"{key}={draw(values)}"


@pytest.fixture(scope="module", autouse=True)
def _stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the probe, where it is asked, meet small stand-ins for torch and Megatron."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", fake_torchrun.environment({})["PYTHONPATH"])
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("SCRATCH", str(tmp_path_factory.mktemp("scratch")))
        yield


@pytest.fixture(autouse=True)
def _own_cache() -> None:
    """Keep what the stand-ins answer where `_stand_ins` says, apart from true answers."""


@example(recipe="tiny", words=["model.num_layers=2147483647"], options=set())
@example(recipe="tiny", words=["model.moe.num_experts=2147483646", "model.moe.topk=1"], options=set())
@example(
    recipe="tiny",
    words=["launcher.nodes=67108864", "train.global_batch=268435456", "--strict"],
    options=set(),
)
@example(
    recipe="tiny", words=["parallel.tp=2147483646", "model.num_attention_heads=2147483647"], options=set()
)
@example(recipe="tiny", words=["offload.host_memory_gb=auto", "offload.staging_mb=nan"], options=set())
@example(recipe="kimi_k2", words=["offload.host_memory_gb=auto", "cluster.host_memory_gb=inf"], options=set())
@example(recipe="tiny", words=["offload.host_memory_gb=auto", "launcher.ranks_per_node=-1"], options=set())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    recipe=st.sampled_from(sorted(find_recipes())),
    words=st.lists(overrides(), min_size=1, max_size=5),
    options=st.sets(st.sampled_from(["--strict", "--json", "--here"])),
)
def test_a_random_request_ends_with_0_2_or_3_and_no_traceback(
    recipe: str, words: list[str], options: set[str]
) -> None:
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(["check-config", f"recipe={recipe}", *words, *sorted(options)])
    assert time.process_time() - began < LIMIT_S
    assert code in (0, 2, 3), err.getvalue()
    assert "Traceback" not in err.getvalue()


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(arguments=st.lists(st.one_of(texts, overrides(), st.just("recipe=tiny")), max_size=6))
def test_random_words_end_cleanly_too(arguments: list[str]) -> None:
    # "--" keeps words that start with a dash from being read as options, which are Typer's own business.
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(["check-config", "--", *arguments])
    assert code in (0, 2, 3), err.getvalue()


def test_the_offload_directory_is_left_empty(tmp_path: Path) -> None:
    assert os.environ["SCRATCH"] != str(tmp_path)
    assert list(Path(os.environ["SCRATCH"]).iterdir()) == []
