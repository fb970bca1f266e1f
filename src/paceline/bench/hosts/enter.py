"""Start a command on a host: enter the namespaces of its first process, fork, wait, and end as the command did.

    python enter.py HOLDER FOLDER COMMAND [ARGUMENT ...]

`nsenter` does the same but for two things: it stops when the command is stopped, and stays so at times; and the command
would outlive it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def enter(holder: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # All are opened first: with the mounts of the host /proc is another one.
    files = [f"/proc/{holder}/ns/{kind}" for kind in ("uts", "ipc", "net", "pid", "mnt")]
    for descriptor in [os.open(file, os.O_RDONLY) for file in files]:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def become(folder: str, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(folder)
    os.execvp(command[0], command)


def main() -> None:
    holder, folder, *command = sys.argv[1:]
    enter(holder)
    started = os.fork()
    if started == 0:
        try:
            become(folder, command)
        except OSError as error:
            print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the command
    code = os.waitstatus_to_exitcode(os.waitpid(started, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
