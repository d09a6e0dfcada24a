"""Which Megatron this is: the release, for people to read, and the flags that it takes."""

from __future__ import annotations

import argparse


def megatron_release() -> str:
    """Return the version that Megatron calls itself by, ``0.19.2``.

    Without the hash that Megatron appends: it asks git in the folder that it lies in, and in a virtual
    environment inside a checkout of some other project that is the other project's commit.

    Raises:
        ImportError: There is no megatron-core.
    """
    from megatron.core import package_info

    return str(package_info.__version__).partition("+")[0]


def parser_flags() -> frozenset[str]:
    """Return the option strings of Megatron's own parser.

    Raises:
        ImportError: This Megatron comes without its training loop.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return frozenset(option for action in parser._actions for option in action.option_strings)
