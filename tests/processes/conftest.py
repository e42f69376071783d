"""One kernel for most files of this folder."""

from tests.kernel.conftest import module_kernel, shared_kernels

__all__ = ["module_kernel", "shared_kernels"]
