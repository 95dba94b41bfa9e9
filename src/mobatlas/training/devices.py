"""Where models run: devices and processes, precision, signals; bf16 only where the hardware multiplies it."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mobatlas.errors import MobatlasError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

log = logging.getLogger("mobatlas")


def fast_bf16(device: torch.device) -> bool:
    """Whether matrices are multiplied faster in bf16 there; a CPU without units for it takes a hundred times as long."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        return any(bool(getattr(torch.cpu, test, lambda: False)()) for test in tests)
    return False


def trains_in_bf16(device: torch.device) -> bool:
    """Whether training is faster in bf16 there: on GPUs, and on CPUs with tiles for it (AMX).

    With AVX512-BF16 alone a training step of the preset `small` took a third more time than in 32 bits; making samples, which
    `autocast` is for, took a third less.
    """
    tiles = device.type != "cpu" or bool(
        getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    )
    return tiles and fast_bf16(device)


def autocast(device: torch.device) -> torch.autocast:
    """Mixed precision for inference, where it is faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_bf16(device))


def find_device(accelerator: str) -> tuple[str, int]:
    """The kind of device that was asked for, or the best there is, and how many there are."""
    there = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "cpu": os.cpu_count() or 1,
    }
    kind = (
        next(name for name, count in there.items() if count)
        if accelerator == "auto"
        else accelerator
    )
    if kind not in there:
        raise MobatlasError(
            f"--accelerator {kind} does not exist (known: auto, {', '.join(there)})"
        )
    if not there[kind]:
        raise MobatlasError(
            f"--accelerator {kind}: there is no such device here; pass --accelerator auto"
        )
    return kind, there[kind]


def find_devices(accelerator: str, devices: int) -> str:
    """The kind of device, after a check that there are so many; processes may share a core."""
    kind, there = find_device(accelerator)
    if devices < 1 or (kind != "cpu" and devices > there):
        raise MobatlasError(f"--devices {devices}: {kind} has 1 to {there} here")
    return kind


def fabric_on(accelerator: str, devices: int, precision: str) -> Fabric:
    """Fabric on the devices asked for, its processes running; torchrun may have started them.

    What a batch system says of tasks is not looked at: Fabric would take one task for the only process.
    """
    from lightning_fabric import Fabric  # takes seconds to import, and sampling does without it
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    kind = find_devices(accelerator, devices)
    _refuse_other_processes(devices)
    logging.getLogger("lightning_fabric").setLevel(
        logging.WARNING
    )  # each process announces itself otherwise
    fabric = Fabric(
        accelerator=kind,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision=_precision(precision, kind),
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    if devices > 1 and kind == "cpu":  # Fabric itself does so on other devices
        atexit.register(_part)
    return fabric


def _part() -> None:
    """End the threads that talk to other processes: one that still frees tensors while Python goes away aborts it."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _refuse_other_processes(devices: int) -> None:
    """Processes that were started by somebody else must be as many as there are to be, and on one machine."""
    if "LOCAL_RANK" in os.environ:
        told = {int(os.environ.get(name, devices)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        if told != {devices}:
            raise MobatlasError(
                f"--devices {devices}: the launcher started {max(told)} processes; start as many as --devices, on one machine"
            )


def _precision(asked: str, kind: str) -> Any:
    if asked not in ("auto", "32-true", "bf16-mixed"):
        raise MobatlasError(
            f"--precision {asked} does not exist (known: auto, 32-true, bf16-mixed)"
        )
    if asked != "auto":
        return asked
    return "bf16-mixed" if trains_in_bf16(torch.device(kind)) else "32-true"


@contextmanager
def signals_wait(wanted: bool) -> Iterator[list[int]]:
    """Ctrl-C and a polite kill wait for the end of the step; a second one does not."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: object) -> None:
        received.append(number)
        restore()
        log.warning("stopping after this step; a second signal stops at once")

    if wanted and threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {
            number: old for number, old in handlers.items() if old not in (None, signal.SIG_IGN)
        }
        for number in before:
            signal.signal(number, note)
    try:
        yield received
    finally:
        restore()


@contextmanager
def deterministic() -> Iterator[None]:
    """Sums in one order where there is a choice, as equal bytes need it."""
    switches: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), switches.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants to be told as well
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = False  # it is a debugging aid that costs time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        switches.fill_uninitialized_memory = fill
