"""What Megatron objects to only as it builds things is told by the flags that its words name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.refusals import refusals_told, tell_refusals
from muon_offload_cli.megatron.substitute import Substitutions

RECOMPUTE = ("megatron.args.recompute_granularity=selective", "megatron.args.recompute_modules=[nope,moe]")
SCHEDULE = ("megatron.args.log_interval=2", "megatron.args.min_lr=2")


def build_layers(*_: Any) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    given: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["nope", "moe"]}
    TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **given)


def build_schedule(*_: Any) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    # A bare assert.
    OptimizerParamScheduler(None, 0.0, 1.0, 2.0, 1, 9, "linear", 0.0, 0.0, 9, "constant")


def read_layers(*_: Any) -> None:
    scope = {"__name__": "megatron.training.arguments"}
    exec("import json\ndef read(layers):\n    json.loads(layers)", scope)
    scope["read"]("{")


def test_what_the_standard_library_objects_to_for_megatron_is_told_too() -> None:
    with pytest.raises(UserError) as refused, refusals_told(compose("tiny", SCHEDULE).config):
        read_layers()
    assert "Expecting property name" in refused.value.problems[0].what


def test_flags_that_are_off_are_not_given() -> None:
    config = compose("tiny", ("megatron.args.min_lr=null",)).config
    with pytest.raises(AssertionError), refusals_told(config):
        build_schedule()


@pytest.mark.parametrize(
    ("build", "words", "what", "fix"),
    [
        (
            build_layers,
            RECOMPUTE,
            "megatron.args.recompute_modules=[nope,moe]: Megatron refuses it: Invalid choices",
            "megatron.args.recompute_modules=null",
        ),
        (
            build_schedule,
            SCHEDULE,
            "megatron.args.min_lr=2: Megatron refuses it: assert self.max_lr >= self.min_lr.",
            "megatron.args.min_lr=null",
        ),
        (
            build_layers,
            SCHEDULE,
            "Megatron refuses the flags of this run together: Invalid choices",
            "change what does not go with it among megatron.args: log_interval, min_lr",
        ),
    ],
)
def test_a_refusal_names_the_flags_that_it_speaks_of_and_all_where_it_speaks_of_none(
    build: Callable[[], None], words: list[str], what: str, fix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as refused, refusals_told(compose("tiny", words).config):
        build()
    (problem,) = refused.value.problems
    assert problem.what.startswith(what)
    assert (problem.fix, problem.exit_code) == (fix, 2)
    # For whoever doubts it.
    assert "Traceback" in capfd.readouterr().err


def fail() -> None:
    raise ValueError("recompute_modules")


@pytest.mark.parametrize(("build", "words"), [(build_layers, ()), (fail, RECOMPUTE)])
def test_what_no_flag_of_the_request_has_caused_stays_what_it_is(
    build: Callable[[], None], words: tuple[str, ...]
) -> None:
    with pytest.raises((AssertionError, ValueError)), refusals_told(compose("tiny", words).config):
        build()


@pytest.mark.parametrize("name", ["get_model", "get_megatron_optimizer", "get_optimizer_param_scheduler"])
def test_megatrons_loop_builds_its_parts_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from megatron.training import training

    monkeypatch.setattr(training, name, build_layers)
    with Substitutions() as stack:
        tell_refusals(stack, compose("tiny", RECOMPUTE).config)
        for _ in range(2):
            with pytest.raises(UserError, match="recompute_modules"):
                getattr(training, name)("model")
    assert getattr(training, name) is build_layers
