"""A worker's script: it prints what a script can find out about its process, or ends in some way, as DEED says."""

import atexit
import ctypes
import faulthandler
import gc
import json
import locale
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings


def square(number):
    return os.getppid(), number * number


def numbers():
    import numpy
    import torch

    return [random.random(), numpy.random.random(), torch.rand(()).item(), torch.initial_seed()]


def state():
    before = sys.modules["__main__"]
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
    files = [os.fstat(number).st_mode for number in descriptors]
    deathly = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(deathly))
    import numpy
    import torch
    from sklearn.datasets import load_digits
    from threadpoolctl import threadpool_info

    threads = [thread.name for thread in threading.enumerate()]
    tasks = len(os.listdir("/proc/self/task"))
    numpy.ones((400, 400)) @ numpy.ones((400, 400))
    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # sets TORCHINDUCTOR_CACHE_DIR
    load_digits()
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(square, (7,))
    return {
        "main": [__name__, __file__, before.__file__, before.square is square],
        "python": [sys.executable, sys.argv, sys.orig_argv, sys.path, sys.warnoptions, str(sys.flags), sys._xoptions],
        "environment": dict(os.environ),
        "process": [os.getcwd(), os.getppid(), os.getpgrp(), os.getsid(0), os.nice(0), os.umask(0o22), deathly.value],
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")],
        "scheduling": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
        "masked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "streams": [
            [
                one.encoding,
                one.errors,
                one.line_buffering,
                one.write_through,
                one.isatty(),
                one.seekable(),
                one.fileno(),
            ]
            for one in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "open": [descriptors, files],
        "threads": [threads, tasks, threading.current_thread() is threading.main_thread()],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype().itemsize],
        "pools": sorted([one["internal_api"], one["num_threads"]] for one in threadpool_info()),
        "collector": [gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval()],
        "others": [faulthandler.is_enabled(), locale.setlocale(locale.LC_ALL), multiprocessing.get_start_method()],
        "family": [multiprocessing.current_process().name, multiprocessing.parent_process()],
        "warnings": sorted({str(entry[:2]) for entry in warnings.filters}),
        "loaded": [batch[0].tolist() for batch in loader],
        "spawned": [spawned[0] == os.getpid(), spawned[1]],
    }


if __name__ == "__main__":
    atexit.register(print, "at exit")
    if os.environ["DEED"] in ("exit", "say", "fail"):
        threading.Thread(target=lambda: threading.Event().wait(0.2) or print("a thread has ended")).start()
    match os.environ["DEED"]:
        case "state":
            print(json.dumps(state(), default=str))
        case "numbers":
            print(json.dumps(numbers()))
        case "forked":
            print("paceline.fork_server_process" in sys.modules)
        case "exit":
            sys.exit(3)
        case "say":
            sys.exit("in words")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            faulthandler.enable()
            ctypes.string_at(0)
        case "fail":
            raise ValueError("as asked")
        case "sleep":
            print("asleep")
            threading.Event().wait(600)
