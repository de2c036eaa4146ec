"""The kernel for NVIDIA GPUs, which is imported where there may be one."""

from typing import Any

from ..native import _gpu
from .row_ops import RowOps


class CudaKernel:
    """Makes `CudaOps`."""

    @staticmethod
    def available() -> bool:
        """Whether the kernel may be used in this process."""
        if not _gpu.wanted():
            return False
        from ..native import _cuda

        return _cuda.available()

    @staticmethod
    def replaces(method: str, *operands: Any, **flags: Any) -> bool:
        """As `RowOps.replaces`."""
        from .cuda_ops import CudaOps

        return CudaOps.replaces(method, *operands, **flags)

    def __new__(cls, **attributes: Any) -> RowOps:  # type: ignore[misc]
        from .cuda_ops import CudaOps

        return CudaOps(**attributes)
