"""What differs between the versions of JAX that are supported."""

from importlib.metadata import version

JAXLIB = tuple(int(x) for x in version("jaxlib").split(".")[:2])

# Flags that make XLA for CPUs compile faster; later versions have no others.
FAST_TO_COMPILE = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if JAXLIB == (0, 10)
    else ""
)
# XLA widens bfloat16 on CPUs: each scatter converts the whole table.
WIDENS_BFLOAT16 = JAXLIB < (0, 11)
# XLA for GPUs copies each table that passes through a conditional.
COPIES_BRANCHES = JAXLIB < (0, 11)
# XLA's CPU compiler compiles one formula alike for arrays of different shapes.
SAME_BITS_FOR_ALL_SHAPES = JAXLIB < (0, 12)
# What a function writes to a mutable array of its own is seen through while tracing.
SEES_THROUGH_REFS = JAXLIB >= (0, 12)
