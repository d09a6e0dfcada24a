"""A small process between the launcher and torchrun that leaves no process behind.

Torchrun starts each rank in a session of its own, so no signal to one process group reaches them all,
and a launcher that is killed with SIGKILL can clean nothing up. This process can: it adopts every
orphan below it (child subreaper), holds the read end of a pipe whose write end only the launcher has,
and ends the whole tree when that pipe closes, which the kernel does however the launcher ended.

Run as ``python -m muon_offload_cli.launch.leash GRACE_S COMMAND...`` with that pipe as standard input.
Closing the pipe asks for an end (SIGTERM, SIGKILL after the grace); SIGTERM to this process ends the
grace at once. The exit code is the command's; 128 + n if signal n ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

POLL_S = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class _Hurry:
    """Whether a signal asked for an end without grace."""

    asked = False

    def handle(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked = True


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        # Refused only by kernels before 3.4; without it the pipe still ends what it can see.
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _before_exec() -> None:
    # Ignored signals stay ignored across exec, and torchrun has handlers of its own for these.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # If this process itself is killed, torchrun gets SIGTERM and ends its ranks.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _all_gone(child: subprocess.Popen[bytes]) -> bool:
    """Reap what has ended; whether nothing is left below this process.

    The kernel says so: what outlives its parent becomes a child of this process, the subreaper. A list of
    processes cannot: those whose parent ends while the list is made are missing in it.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        if ended is None:
            return False
        if ended.si_pid == child.pid and child.returncode is None:
            child.poll()
        else:
            os.waitpid(ended.si_pid, 0)


def end_tree(child: subprocess.Popen[bytes], *, grace_s: float, hurry: _Hurry) -> None:
    """Send SIGTERM to everything below this process, then SIGKILL until nothing is left.

    Processes stuck in the kernel do not die of SIGKILL either; after 10 s they are given up.
    """
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not hurry.asked:
        if _all_gone(child):
            return
        time.sleep(POLL_S)
    deadline = time.monotonic() + 10
    while not _all_gone(child) and time.monotonic() < deadline:
        _signal_all(signal.SIGKILL)
        time.sleep(POLL_S)


def _signal_all(signum: signal.Signals) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signum)


def main(arguments: list[str]) -> int:
    """Run the command in `arguments` to its end, or until the pipe closes; return its exit code."""
    grace_s, command = float(arguments[0]), arguments[1:]
    hurry = _Hurry()
    signal.signal(signal.SIGTERM, hurry.handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_before_exec
    )
    code = child.poll()
    while code is None and not hurry.asked:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        code = child.poll()
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    end_tree(child, grace_s=grace_s, hurry=hurry)
    code = child.poll() if code is None else code
    if code is None:
        return 128 + signal.SIGKILL
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
