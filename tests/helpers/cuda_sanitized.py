"""A process that the address sanitizer ends where a kernel leaves its buffers.

    LD_PRELOAD=libasan.so CUDA_ON_CPU_FLAGS=... python -m tests.helpers.cuda_sanitized

Optimisers take their steps, every week one of each number of arrays, and sums are made,
at sizes and widths that fill no chunk and no lane. With an argument a lane writes one
number too many: that is seen.
"""

import itertools
import sys

import numpy as np

from optax_sparse_adam.native._cuda import Call

from ..native.test_cuda import OPTIMIZERS, SUMS, check_sums, trained
from . import cuda_on_cpu
from .support import WEEKLY

WIDTHS, SIZES = (1, 33, 2, 129, 7, 300, 20), (5, 35, 100, 165, 30)
# Their kernels read and write the arrays of lion, adam or amsgrad.
ALIKE = {"adagrad", "rmsprop", "adamw", "nadam", "adan"}
WRONG = """
extern "C" __global__ void rows_kernel(float* out, long long size) {
  if (threadIdx.x <= size) out[threadIdx.x] = 1;
}
"""


def main():
    # Rows and bags in turn; both of two formulas.
    kept = [name for name in OPTIMIZERS if name not in ALIKE]
    names = list(enumerate([*kept, "sparse_adam", "exact_adamw"]))
    names = names if WEEKLY else names[::6]
    shapes = zip(names, itertools.cycle(WIDTHS), itertools.cycle(SIZES))  # 35 pairs
    with cuda_on_cpu.emulated() as calls:
        for (i, name), width, size in shapes:
            trained(OPTIMIZERS[name](), width, False, i % 2 == 1, size=size)
    for ops, kind, size, width in SUMS if WEEKLY else SUMS[::3]:
        check_sums(ops(), kind, size, width)
    kernels = {call.source for call in calls}
    assert len(kernels) > (25 if WEEKLY else 5), len(kernels)
    print("no call has left its buffers")


if __name__ == "__main__":
    if sys.argv[1:]:
        like = np.zeros(31, np.float32)
        call = Call(WRONG, "rows_kernel", (), (-1,), ((1, 32, 0, 31),))
        cuda_on_cpu.run(call, [like], {})
    main()
