"""Tables beyond the device: in host memory, in files, in a storage of your own.

A `HostTable` stands for an array among the parameters, and a `HostTrainer` does the
steps of `make_train_step` on the rows that each batch looks up. Loss, model and
optimiser are unchanged, and so is every bit. Imported by choice: `from
optax_sparse_adam import host_tables`.
"""

from ._nnx import nnx_tables as nnx_tables
from ._reset import BatchWithReset as BatchWithReset
from ._snapshot import Snapshot as Snapshot
from ._stateful import Stateful as Stateful
from ._store import Storage as Storage
from ._table import HostTable as HostTable
from ._trainer import HostTrainer as HostTrainer
