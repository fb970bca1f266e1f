"""Shares memory of the GPU between processes: `shared_memory_script.py FOLDER`. Says in JSON what each has seen.

A process of its own, which never touches CUDA: its forks do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from paceline.runtime.live.storage import device_segments
from paceline.runtime.live.storage.cuda_memory import CudaDevice
from paceline.tensors.layout import Entry, Layout

LAYOUT = Layout((Entry("a", (1_000_003,), 0),), "float32")


def owner(path: Path, mine: Connection) -> None:
    device = CudaDevice.at(0)
    segments = device_segments.DeviceSegments()
    vector = segments.create(path, LAYOUT, device).fill_(1.0)
    device.settle()
    mine.send(device.name)
    mine.recv()
    mine.send(vector.sum().item() / len(vector))
    signal.pause()


def user(path: Path, mine: Connection, writes: bool) -> None:
    torch.zeros(1, device="cuda")
    vector = device_segments.attach(path, LAYOUT, writes)
    mine.send(vector[-1].item())
    while mine.recv() == "add":
        try:
            vector.add_(1.0)
            torch.cuda.synchronize()
            mine.send(vector.mean().item())
        except RuntimeError as error:
            mine.send(str(error).splitlines()[0])
            os._exit(0)
    del vector
    mine.send("gone")


def main() -> None:
    path = Path(sys.argv[1]) / "segment"
    fork = get_context("fork")

    def begin(target, *given) -> tuple[object, Connection]:
        ours, theirs = fork.Pipe()
        process = fork.Process(target=target, args=(path, theirs, *given), daemon=True)
        process.start()
        return process, ours

    making, maker = begin(owner)
    found = {"device": maker.recv()}
    _, writer = begin(user, True)
    _, reader = begin(user, False)
    found["seen"] = [writer.recv(), reader.recv()]
    writer.send("add")
    found["added"] = writer.recv()
    maker.send("look")
    found["owner"] = maker.recv()
    reader.send("add")
    found["fault"] = reader.recv()
    os.kill(making.pid, signal.SIGKILL)
    making.join()
    writer.send("add")
    found["orphan"] = writer.recv()
    try:
        device_segments.fetch(path)
        found["gone"] = False
    except FileNotFoundError:
        found["gone"] = True
    writer.send("end")
    writer.recv()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
