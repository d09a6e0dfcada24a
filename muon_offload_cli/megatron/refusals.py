"""What Megatron refuses of a run's flags beside its parser: told as the request's fault, in its own words."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from muon_offload_cli.config.rules.settings import is_on
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import override, wrong
from muon_offload_cli.megatron.substitute import Substitutions


@contextmanager
def refusals_told(config: Config) -> Iterator[None]:
    """Raise what Megatron's own code objects to meanwhile as a `UserError`, if the request gives any flags.

    The flags whose names are in its words are those concerned; all of them, if none is.
    """
    given = {name: value for name, value in config.megatron.args.items() if is_on(value)}
    try:
        yield
    except (AssertionError, ValueError) as error:
        modules = [
            str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        # Megatron may have called the standard library: json, an enum.
        own = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
        if not given or not own or not own[-1].startswith("megatron."):
            raise
        # A user's error has no traceback, and the fault may be another's.
        traceback.print_exc()
        code = traceback.extract_tb(error.__traceback__)[-1].line or ""
        reason = (str(error).strip() or code or type(error).__name__).splitlines()[0].rstrip(".")
        words = {word.strip("_") for word in re.findall(r"\w+", f"{error} {code}".replace("-", "_"))}
        named = [name for name in given if name in words]
        if not named:
            raise wrong(
                f"Megatron refuses the flags of this run together: {reason}.",
                f"change what does not go with it among megatron.args: {', '.join(given)}",
                "megatron.args",
            ) from error
        keys = {f"megatron.args.{name}": _as_given(given[name]) for name in named}
        raise wrong(
            f"{' '.join(override(*pair) for pair in keys.items())}: Megatron refuses it: {reason}.",
            " ".join(f"{key}=null" for key in keys),
            *keys,
        ) from error


def _as_given(value: Any) -> str | list[str]:
    return [str(each) for each in value] if isinstance(value, list) else str(value)


def tell_refusals(stack: Substitutions, config: Config) -> None:
    """Tell what Megatron refuses while it builds layers, optimizer and schedule, until `stack` is closed."""
    from megatron.training import training

    for name in ("get_model", "get_megatron_optimizer", "get_optimizer_param_scheduler"):
        stack.replace(training, name, refusals_told(config)(getattr(training, name)))
