"""Rows of a `HostTable` in LMDB, for who has one: `pip install lmdb`.

    table = host.HostTable(shape, storage=LmdbRows("rows", size=1 << 40))

`size` is the most that the database may grow to; it is a file with holes.
"""

import lmdb
import numpy as np


class LmdbRows:
    def __init__(self, path, size):
        self.database = lmdb.open(str(path), map_size=size, sync=False)

    def take(self, rows):
        keys = rows.astype(">u4").tobytes()  # in the order of numbers
        keys = [keys[k : k + 4] for k in range(0, len(keys), 4)]
        with self.database.begin(buffers=True) as transaction:
            found = [np.frombuffer(transaction.get(key), np.uint32) for key in keys]
            return np.stack(found)

    def put(self, rows, records):
        keys = rows.astype(">u4").tobytes()
        with self.database.begin(write=True) as transaction:
            for k, record in enumerate(records):
                transaction.put(keys[4 * k : 4 * k + 4], record.tobytes())

    def flush(self):
        self.database.sync(True)

    def write_mark(self, mark):  # by which `restore` sees copies of another time
        with self.database.begin(write=True) as transaction:
            transaction.put(b"mark of rows", mark)  # longer than a row's key

    def read_mark(self):
        with self.database.begin() as transaction:
            return transaction.get(b"mark of rows")
