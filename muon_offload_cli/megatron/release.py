"""Which release of Megatron this is, for people to read; what it can do is asked in `probe`."""

from __future__ import annotations


def megatron_release() -> str:
    """Return the version that Megatron calls itself by, ``0.19.2``.

    Without the hash that Megatron appends: it asks git in the folder that it lies in, and in a virtual
    environment inside a checkout of some other project that is the other project's commit.

    Raises:
        ImportError: There is no megatron-core.
    """
    from megatron.core import package_info

    return str(package_info.__version__).partition("+")[0]
