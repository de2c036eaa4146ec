"""What a `Vocabulary` does, with dictionaries and sorted lists: an oracle."""

import heapq
from collections import Counter


class OracleStore:
    """Keys in rows from 1 on."""

    def __init__(self, rows, score):
        self.row_of, self.last, self.hits = {}, {}, {}
        self.free, self.rows, self.score = [*range(1, rows)], rows, score

    def grow(self, rows):
        for row in range(self.rows, rows):
            heapq.heappush(self.free, row)
        self.rows = max(self.rows, rows)

    def remove(self, key):
        heapq.heappush(self.free, self.row_of.pop(key))
        del self.last[key], self.hits[key]

    def expire(self, bound):
        gone = [key for key in self.row_of if self.last[key] < bound]
        gone.sort(key=self.row_of.get)
        for key in gone:
            self.remove(key)
        return gone

    def place(self, keys, hits, step):
        """The keys that had to go."""
        order = [
            (self.score(self.last[key], self.hits[key]), row, key)
            for key, row in self.row_of.items()
            if self.last[key] != step  # of this step none goes
        ]
        heapq.heapify(order)
        rows, gone = [], []
        for _ in keys:
            if self.free:
                rows.append(heapq.heappop(self.free))
                continue
            _, row, key = heapq.heappop(order)
            rows.append(row)
            gone.append(key)
            del self.row_of[key], self.last[key], self.hits[key]
        for key, row, count in zip(keys, rows, hits, strict=True):
            self.row_of[key], self.last[key], self.hits[key] = row, step, count
        return gone


class TooMany(Exception):
    """A batch with more different keys than rows."""


class Oracle:
    """As `Vocabulary`, slowly. Keys are whatever can be hashed; `None` is no key."""

    def __init__(self, rows, *, min_hits=1, score=None, ttl=None, waiting=None):
        self.main = OracleStore(rows, score or (lambda last, hits: last))
        self.waiting = OracleStore((waiting or rows) + 1, lambda last, hits: last)
        self.min_hits, self.ttl, self.changed, self.gone = min_hits, ttl, {}, []
        self.step = 0
        self.lost, self.dropped = -1, 0  # of `gone`, the step of the last one dropped

    def assign(self, keys, step):
        """Rows of the keys, fresh rows, and keys that had to go."""
        main, waiting = self.main, self.waiting
        counts = Counter(key for key in keys if key is not None)
        known = [key for key in counts if key in main.row_of]
        hits = {}
        for key in counts:
            if key not in main.row_of:
                old = waiting.hits.get(key, 0)
                if old and self.ttl is not None and waiting.last[key] < step - self.ttl:
                    old = 0
                hits[key] = old + counts[key]
        enter = [key for key in hits if hits[key] >= self.min_hits]
        wait = [key for key in hits if hits[key] < self.min_hits]
        of_step = {*known, *enter, *(k for k in main.last if main.last[k] == step)}
        if len(enter) > len(main.free) and len(of_step) > main.rows - 1:
            raise TooMany(len(of_step))
        of_step = {k for k in waiting.last if waiting.last[k] == step} - {*enter}
        of_step |= {*wait}
        if wait and len(of_step) > waiting.rows - 1:
            raise TooMany(len(of_step))

        for key in known:
            main.last[key] = step
            main.hits[key] += counts[key]
        gone, period = [], max(1, (self.ttl or 0) // 8)
        if self.ttl is not None and step // period > self.step // period:
            gone = main.expire(step - self.ttl)
        self.step = step
        gone += main.place(enter, [hits[key] for key in enter], step)
        fresh = [main.row_of[key] for key in enter]
        self.changed |= dict.fromkeys(fresh, step)
        for key in enter:
            if key in waiting.row_of:
                waiting.remove(key)
        old = [key for key in wait if key in waiting.row_of]
        for key in old:
            waiting.last[key], waiting.hits[key] = step, hits[key]
        new = [key for key in wait if key not in waiting.row_of]
        waiting.place(new, [hits[key] for key in new], step)
        self.gone += [(step, key) for key in gone]
        return self.find(keys), fresh, gone

    def keep_tombstones(self, size):
        self.dropped = max(self.dropped, len(self.gone) - size)
        if self.dropped:
            self.lost = self.gone[self.dropped - 1][0]

    def find(self, keys):
        return [self.main.row_of.get(key, 0) for key in keys]

    def changed_since(self, step, others=()):
        """Pairs of row and key by row, and tombstones; of `others`, whenever it was."""
        pairs = [(row, key) for key, row in self.main.row_of.items()]
        pairs = [
            (row, key)
            for row, key in sorted(pairs)
            if self.changed[row] >= step or key in others
        ]
        gone = dict.fromkeys(key for at, key in self.gone if at >= step)
        gone |= dict.fromkeys(sorted(others, key=lambda key: key % 2**64))
        return pairs, [key for key in gone if key not in self.main.row_of]
