"""A device that reads what the host uploads as late as it may, so that a host that does not wait for it spoils what it reads."""

from functools import partial

import torch

from transom_worker.uploads import PinnedUploads, Read


class _LateRead:
    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._read: partial[torch.Tensor] | None = partial(device.copy_, host)

    def synchronize(self) -> None:
        if self._read is not None:
            self._read()
            self._read = None


class LateUploads(PinnedUploads):
    """Uploads to a CPU's tensors, which have their numbers when the host waits for them, or the test asks."""

    def __init__(self, *, per_step: int = 1) -> None:
        super().__init__(torch.device("cpu"), per_step=per_step)
        self._reads: list[Read] = []
        self.copied: list[int] = []  # bytes of each copy

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 77, dtype=torch.uint8)

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Read]:
        device_bytes = torch.full_like(host, 99)
        self._reads.append(_LateRead(host, device_bytes))
        self.copied.append(len(host))
        return device_bytes, self._reads[-1]

    def arrive(self) -> None:
        for read in self._reads:
            read.synchronize()


class PromptUploads(LateUploads):
    """As `LateUploads`, but the device reads at once."""

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Read]:
        copied = super().copy(host)
        copied[1].synchronize()
        return copied
