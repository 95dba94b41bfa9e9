"""Devices, processes, precision and signals of training and sampling."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mobatlas.errors import MobatlasError, refuse_faults
from mobatlas.progress import log

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies matrices in bf16; without such units it is 100 times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and (
        _cpu_supports("_is_amx_tile_supported") or _cpu_supports("_is_avx512_bf16_supported")
    )


def trains_in_bf16(device: torch.device) -> bool:
    """Whether training uses bf16 by default: on GPUs only.

    On CPUs with matrix tiles (AMX) bf16 is twice as fast. But a small autoregressive model ended
    at 2.03 instead of 1.92 nats per token, and its trajectories were a third too long.
    """
    return fast_bf16(device) and device.type != "cpu"


def _cpu_supports(test: str) -> bool:
    return bool(getattr(torch.cpu, test, lambda: False)())


def autocast(device: torch.device) -> torch.autocast:
    """Mixed precision for inference where it is faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_bf16(device))


def check_devices(accelerator: str, devices: int) -> str:
    """Return the kind of device, after a check that there are enough of it.

    On CPUs several processes may share a core.
    """
    counts = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "cpu": os.cpu_count() or 1,
    }
    available = [name for name, count in counts.items() if count]
    kind = available[0] if accelerator == "auto" else accelerator
    most = counts.get(kind, 0)
    refuse_faults(
        {
            f"--accelerator {kind} does not exist (known: auto, {', '.join(counts)})": kind
            not in counts,
            f"--accelerator {kind}: this machine has no such device; pass --accelerator auto": kind
            not in available,
            f"--devices {devices}: pass 1 to {most}, the number of {kind} devices here": devices < 1
            or (kind != "cpu" and devices > most),
        }
    )
    return kind


def launch_fabric(accelerator: str, devices: int, precision: str) -> "Fabric":
    """Start Fabric with one process per device; torchrun may have started the processes.

    Environment variables of a batch system are ignored. Otherwise Fabric would treat one of its
    tasks as the only process.
    """
    # Importing Fabric takes seconds, and sampling does not need it.
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    kind = check_devices(accelerator, devices)
    _check_launcher(devices)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # no line per process
    fabric = Fabric(
        accelerator=kind,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision=_choose_precision(precision, kind),
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    if devices > 1 and kind == "cpu":  # on other devices Fabric does so itself
        atexit.register(_end_process_group)
    return fabric


def _end_process_group() -> None:
    """End the communication threads, which can abort Python if they free tensors at its exit."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _check_launcher(devices: int) -> None:
    """Refuse a launcher such as torchrun that started another number of processes."""
    if "LOCAL_RANK" in os.environ:
        counts = {int(os.environ.get(name, devices)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        if counts != {devices}:
            raise MobatlasError(
                f"--devices {devices}: the launcher started {max(counts)} processes; start as many "
                "as --devices, on one machine"
            )


def _choose_precision(precision: str, kind: str) -> Any:
    if precision not in ("auto", "32-true", "bf16-mixed"):
        raise MobatlasError(
            f"--precision {precision} does not exist (known: auto, 32-true, bf16-mixed)"
        )
    if precision != "auto":
        return precision
    return "bf16-mixed" if trains_in_bf16(torch.device(kind)) else "32-true"


@contextmanager
def defer_signals(enabled: bool) -> Iterator[list[int]]:
    """Record the first Ctrl-C or SIGTERM, so that the step can finish; a second stops at once."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def collect(number: int, _: object) -> None:
        received.append(number)
        restore()
        log.warning("stopping after this step; a second signal stops at once")

    if enabled and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                previous[number] = signal.signal(number, collect)
    try:
        yield received
    finally:
        restore()


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, so that equal runs give equal bytes."""
    switches: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    fill = switches.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it as well
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = False  # a debugging aid that costs time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        switches.fill_uninitialized_memory = fill
