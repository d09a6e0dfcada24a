from typing import Literal

NSCoeffT = Literal["quintic", "cans"]


def newton_schulz(x, steps, coefficient_type):
    return x


def newton_schulz_tp(x, steps, coefficient_type, tp_group):
    return x
