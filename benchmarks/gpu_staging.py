"""How fast gradients leave a GPU and parameters come back, beside a plain pinned copy. A command, not a test:

    python benchmarks/gpu_staging.py --json gpu.json

`registered` is what live runs do: copies between the device and a segment that CUDA knows, with the finite check
on the device. `pinned` is torch's own copy between the device and one pinned tensor: what the bus allows. `plain`
is what was done before: copies to memory CUDA does not know, and the check on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.worker import cuda_copies
from paceline.runtime.live.worker.stream_copies import StreamCopies
from paceline.tensors.layout import layout_of

SHAPES = {
    "10 layers": lambda params: [(params // 10,)] * 10,
    "320 layers": lambda params: [(params // 160 - 512,), (512,)] * 160,
}


def gigabytes_per_s(work: Callable[[], object], nbytes: int, rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return nbytes / statistics.median(times[2:]) / 1e9


def measure(shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, dict[str, float]]:
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    layout = layout_of((str(index), tensor, 0) for index, tensor in enumerate(tensors))
    folder = shared_memory.RunFolder()
    try:
        segment, other = (shared_memory.create(folder.path / name, layout) for name in ("registered", "plain"))
        if problem := cuda_copies.pin(segment, device):
            raise SystemExit(f"the segment cannot be registered: {problem}")
        registered = StreamCopies(
            tensors, layout.views(segment), layout.views(segment), cuda_copies.copy_streams_for(tensors)
        )
        plain = StreamCopies(tensors, layout.views(other), layout.views(other), {})
        pinned, flat = torch.empty(layout.numel, pin_memory=True), torch.randn(layout.numel, device=device)
        nbytes = layout.numel * layout.itemsize
        ways: dict[str, dict[str, Callable[[], object]]] = {
            "out": {
                "pinned": lambda: pinned.copy_(flat, non_blocking=True),
                "registered": lambda: registered.write(tensors),
                "plain": lambda: plain.write(tensors),
            },
            "in": {
                "pinned": lambda: flat.copy_(pinned, non_blocking=True),
                "registered": registered.load,
                "plain": plain.load,
            },
        }
        found = {
            way: {name: gigabytes_per_s(work, nbytes, rounds) for name, work in works.items()}
            for way, works in ways.items()
        }
        check(registered, tensors, segment)
        cuda_copies.unpin(segment)
    finally:
        folder.remove()
    return found


def check(transfer: StreamCopies, tensors: Sequence[Tensor], segment: Tensor) -> None:
    """What is fast must also be right."""
    assert transfer.write(tensors)
    assert torch.equal(segment, torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = {name: measure(shapes(args.params), args.rounds) for name, shapes in SHAPES.items()}
    print(f"{torch.cuda.get_device_name()}, {args.params:.0e} float32; GB/s")
    print(f"{'':12} {'':4} {'pinned':>8} {'registered':>11} {'plain':>8}")
    for name, directions in table.items():
        for direction, rates in directions.items():
            share = rates["registered"] / rates["pinned"]
            print(
                f"{name:12} {direction:4} {rates['pinned']:8.1f} {rates['registered']:11.1f} {rates['plain']:8.1f}"
                f"   {share:.0%} of pinned"
            )
    if args.json is not None:
        args.json.write_text(json.dumps({"params": args.params, "gigabytes_per_s": table}, indent=2))


if __name__ == "__main__":
    main()
