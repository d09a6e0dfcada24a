"""Cases of all rules, a file for each of config/rules/: whatever is in this folder counts."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.config.rule_cases.case import Case

CASES: list[Case] = [
    case
    for module in iter_modules(__path__)
    if module.name != "case"
    for case in import_module(f"{__name__}.{module.name}").CASES
]
