"""Layer patterns in Megatron's notation: ``([0]*3+[1]*45)``, or one layer in every N."""

from __future__ import annotations

import ast

from muon_offload_cli.errors import wrong

# A pattern names every layer once; anything longer is a slip such as [1]*10**9.
_LONGEST = 100_000


def moe_layers(pattern: str | None, num_layers: int) -> list[bool]:
    """Return for each layer whether its feed-forward part is a mixture of experts.

    Args:
        pattern: ``model.moe.layer_freq``: a number N (layers 0, N, 2N ...), a list expression, or None for
            every layer (``moe_freq_type`` in megatron/training/arguments.py, ``get_moe_layer_pattern`` in
            megatron/core/models/gpt).
        num_layers: How many layers there are.

    Raises:
        UserError: The pattern cannot be read, or names another number of layers.
    """
    if pattern is None:
        return [True] * num_layers
    every = _number(pattern)
    if every:
        return [index % every == 0 for index in range(num_layers)]
    return _listed("model.moe.layer_freq", pattern, num_layers)


def linear_layers(pattern: str | None, num_layers: int) -> list[bool]:
    """Return for each layer whether its attention is linear.

    Args:
        pattern: ``model.linear_attention_freq``: a number N (every N-th layer keeps softmax attention), or a
            list expression (``get_linear_attention_pattern`` in megatron/core/models/gpt/
            experimental_attention_variant_module_specs.py).
        num_layers: How many layers there are.

    Raises:
        UserError: The pattern is missing or cannot be read, or names another number of layers.
    """
    key = "model.linear_attention_freq"
    if pattern is None:
        raise wrong(f"{key} is not set: it says which layers are linear.", f"{key}=4", key)
    every = _number(pattern)
    if every:
        return [(index + 1) % every != 0 for index in range(num_layers)]
    return _listed(key, pattern, num_layers)


def _number(pattern: str) -> int:
    text = str(pattern).strip()
    return int(text) if text.isdecimal() else 0


def _listed(key: str, pattern: str, num_layers: int) -> list[bool]:
    fix = f"{key}='([0]*1+[1]*{max(num_layers - 1, 0)})'"
    try:
        value = _evaluate(ast.parse(str(pattern).strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise wrong(f"{key}={pattern} is neither a number nor a list expression.", fix, key) from error
    if not isinstance(value, list) or any(entry not in (0, 1) for entry in value):
        raise wrong(f"{key}={pattern} is no list of 0 and 1.", fix, key)
    if len(value) != num_layers:
        what = f"{key}={pattern} names {len(value)} layers, and model.num_layers={num_layers}."
        raise wrong(what, fix, key, "model.num_layers")
    return [entry == 1 for entry in value]


def _evaluate(node: ast.expr) -> int | list[int]:
    """Evaluate lists of numbers joined by ``+`` and repeated by ``*``; nothing else is looked at."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_evaluate(element) for element in node.elts]
        return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return _bounded(left, right, 1)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return _bounded(left, [], right)
        if isinstance(node.op, ast.Mult) and isinstance(left, int) and isinstance(right, list):
            return _bounded(right, [], left)
    raise ValueError(ast.dump(node))


def _bounded(left: list[int], right: list[int], times: int) -> list[int]:
    if len(left) * max(times, 0) + len(right) > _LONGEST:
        raise ValueError("too long")
    return left * times + right
