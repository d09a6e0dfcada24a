"""One run at a time saves in a checkpoint directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from muon_offload_cli.checkpoints.names import LOCK
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import wrong

_KEY = "checkpoint.directory"


@contextlib.contextmanager
def claimed(config: Config) -> Iterator[None]:
    """Hold a run's checkpoint directory, which is made if it is not there; the first node does, for all.

    The lock is the kernel's, so that it ends with this process however that ends. The file stays: to remove
    it would let two runs hold two files of one name. Where a filesystem has no locks, nothing is held.

    Args:
        config: With an absolute `checkpoint.directory`, or none.

    Raises:
        UserError: Another run holds it.
    """
    if config.checkpoint.directory is None or config.launcher.node_rank:
        yield
        return
    directory = Path(config.checkpoint.directory)
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((directory / LOCK).open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise wrong(
                f"{_KEY}={directory} is in use by another run ({file.read().strip() or 'unknown'}).",
                f"{_KEY}=/another/folder",
                _KEY,
            ) from error
        except OSError:
            # A folder that cannot be written is told by its rule, or by the save.
            pass
        else:
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        yield
