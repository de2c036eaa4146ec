// Keys of a vocabulary: found, counted, put into the index. `_vocabulary/index.py` says
// how it works, and does the same in NumPy; change both. Called through ctypes by
// `_keys.py`, outside of the interpreter's lock.

#pragma once

#include "records.h"

namespace {

constexpr int64_t kKeysOfPart = 1 << 14;  // what another thread is worth starting for

// The step at which a key was last there, and how often it was there.
struct Use {
  int32_t last, hits;
};

// What is known of a row. Side by side: of a row that is not in a cache, one access.
struct Row {
  uint64_t code;
  Use use;
};

// Two slots for each code, in one of which its row is; 0 is the row of a free slot. Six
// words, as `_keys.py` passes them.
struct Index {
  int32_t* slots;
  Row* rows;
  uint64_t num_rows, shift, multiplier, second_multiplier;

  INLINE uint64_t Mix(uint64_t code) const { return (code ^ code >> 32) * multiplier; }
  INLINE uint64_t First(uint64_t mixed) const { return mixed >> shift; }
  INLINE uint64_t Second(uint64_t mixed) const {
    return (mixed ^ mixed >> 29) * second_multiplier >> shift;
  }

  // The row in a slot. Another thread may write there: never one outside of the table.
  INLINE uint32_t RowIn(uint64_t slot) const {
    const uint32_t row = slots[slot];
    return row < num_rows ? row : 0;
  }
};

// The rows of codes, 0 for those that are not there. The slot of a key is fetched long
// before it is read, and then the code of its row long before that is compared: so some
// hundred accesses are on their way at once. With a million rows it takes half the time of
// sixteen on their way.
void FindKeys(const Index& index, const uint64_t* codes, int64_t size, int32_t* rows) {
  constexpr int64_t kAhead = 64, kMost = 4096;
  uint32_t rest[kMost];  // keys that are not in their first slot
  for (int64_t begin = 0; begin < size; begin += kMost, codes += kMost, rows += kMost) {
    const int64_t count = std::min(kMost, size - begin);
    const auto stages = [&](int64_t count, const auto& key, const auto& slot,
                            const auto& compare) {
      for (int64_t i = -2 * kAhead; i < count; ++i) {
        if (i + 2 * kAhead < count) {
          __builtin_prefetch(index.slots + slot(key(i + 2 * kAhead)));
        }
        if (0 <= i + kAhead && i + kAhead < count) {
          const int64_t k = key(i + kAhead);
          rows[k] = index.RowIn(slot(k));
          __builtin_prefetch(index.rows + rows[k]);
        }
        if (i >= 0) compare(key(i));
      }
    };
    const auto first = [&](int64_t k) { return index.First(index.Mix(codes[k])); };
    const auto second = [&](int64_t k) { return index.Second(index.Mix(codes[k])); };
    const auto is_there = [&](int64_t k) {  // no branch, which nobody could foresee
      return (rows[k] != 0) & (index.rows[rows[k]].code == codes[k]);
    };
    int64_t num_rest = 0;
    stages(count, [](int64_t i) { return i; }, first, [&](int64_t k) {
      rest[num_rest] = uint32_t(k);
      num_rest += !is_there(k);
    });
    stages(num_rest, [&](int64_t i) { return int64_t(rest[i]); }, second, [&](int64_t k) {
      if (!is_there(k)) rows[k] = 0;
    });
  }
}

// Puts a row into one of its slots; who was there goes to its other one, and so on. False
// if somebody has no slot after so many moves.
bool InsertKey(const Index& index, uint32_t row, int64_t moves) {
  uint64_t at = 0;
  for (int64_t i = 0; i < moves; ++i) {
    const uint64_t mixed = index.Mix(index.rows[row].code);
    const uint64_t first = index.First(mixed), second = index.Second(mixed);
    if (i > 0) {
      at = first ^ second ^ at;
    } else {
      at = index.slots[first] != 0 && index.slots[second] == 0 ? second : first;
    }
    row = uint32_t(std::exchange(index.slots[at], int32_t(row)));
    if (row == 0) return true;
  }
  return false;
}

void RemoveKey(const Index& index, int32_t row) {
  const uint64_t mixed = index.Mix(index.rows[row].code);
  for (const uint64_t at : {index.First(mixed), index.Second(mixed)}) {
    if (index.slots[at] == row) index.slots[at] = 0;
  }
}

// Calls `body(k)` for each row, whose code and slots are on their way.
template <typename Body>
void ByRows(const Index& index, const int32_t* rows, int64_t size, const Body& body) {
  constexpr int64_t kAhead = 16;
  for (int64_t k = 0; k < size; ++k) {
    if (k + 2 * kAhead < size) __builtin_prefetch(index.rows + rows[k + 2 * kAhead]);
    if (k + kAhead < size) {
      const uint64_t mixed = index.Mix(index.rows[rows[k + kAhead]].code);
      __builtin_prefetch(index.slots + index.First(mixed), 1);
      __builtin_prefetch(index.slots + index.Second(mixed), 1);
    }
    body(k);
  }
}

// Rows but those of no key, their uses, and which places have no key. Returns how many
// rows these are.
int64_t TakeUses(const Row* table, const int32_t* rows, int64_t size, int32_t* touched,
                 Use* uses, int64_t* absent) {
  constexpr int64_t kAhead = 64;
  int64_t count = 0;
  for (int64_t k = 0; k < size; ++k) {
    if (k + kAhead < size) __builtin_prefetch(table + rows[k + kAhead], 1);
    const int32_t row = rows[k];
    touched[count] = row;
    uses[count] = table[row].use;
    absent[k - count] = k;
    count += row != 0;
  }
  return count;
}

// Counts keys that are there; `old` is what `TakeUses` has taken. Rows may be there several
// times; those with more hits than `limit` before are not counted.
void TouchKeys(Row* table, const int32_t* rows, int64_t size, int32_t step, int32_t limit,
               const Use* old) {
  for (int64_t k = 0; k < size; ++k) {
    Use& use = table[rows[k]].use;
    use.last = step;
    use.hits += old[k].hits <= limit;
  }
}

// The first rows of a run that still have the score of their entry, the last step or the
// hits, and were not there `now`. Returns how many entries these are with what lies between
// them; 0 if there are not so many rows, or one was there.
int64_t LowestKeys(const Row* table, const int32_t* rows, const int32_t* scores,
                   int64_t size, bool by_hits, int32_t now, int64_t count,
                   int32_t* lowest) {
  constexpr int64_t kAhead = 32;
  int64_t number = 0;
  for (int64_t k = 0; k < size; ++k) {
    if (k + kAhead < size) __builtin_prefetch(table + rows[k + kAhead], 1);
    const Use use = table[rows[k]].use;
    if (use.hits == 0 || (by_hits ? use.hits : use.last) != scores[k]) continue;
    if (use.last == now) return 0;
    lowest[number++] = rows[k];
    if (number == count) return k + 1;
  }
  return 0;
}

// The different ones of `codes[places]` in the order in which they come, how often each is
// there, and which of them each is. Returns how many they are.
int64_t DistinctKeys(const uint64_t* codes, const int64_t* places, int64_t size,
                     uint64_t multiplier, uint64_t* distinct, int64_t* counts,
                     int64_t* of) {
  int bits = 4;
  while (int64_t(1) << bits < 2 * size) ++bits;
  std::vector<uint32_t> slots(int64_t(1) << bits);  // one more than which it is, or 0
  const uint64_t last = slots.size() - 1;
  int64_t number = 0;
  for (int64_t k = 0; k < size; ++k) {
    const uint64_t code = codes[places[k]];
    uint64_t at = ((code ^ code >> 32) * multiplier) >> (64 - bits);
    while (slots[at] != 0 && distinct[slots[at] - 1] != code) at = (at + 1) & last;
    if (slots[at] == 0) {
      distinct[number] = code;
      counts[number] = 0;
      slots[at] = uint32_t(++number);
    }
    of[k] = slots[at] - 1;
    ++counts[of[k]];
  }
  return number;
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" void find_keys(const Index* index, const uint64_t* codes, int64_t size,
                          int32_t* rows, int64_t threads) {
  InThreads(size, kKeysOfPart, threads, [&](int64_t begin, int64_t end) {
    FindKeys(*index, codes + begin, end - begin, rows + begin);
  });
}

extern "C" int32_t insert_keys(const Index* index, const int32_t* rows, int64_t size,
                               int64_t moves) {
  bool all = true;
  ByRows(*index, rows, size, [&](int64_t k) { all &= InsertKey(*index, rows[k], moves); });
  return all;
}

extern "C" int32_t replace_keys(const Index* index, const int32_t* rows, int64_t size,
                                int64_t free, const uint64_t* codes, int32_t step,
                                const int32_t* hits, int64_t moves) {
  ByRows(*index, rows + free, size - free,
         [&](int64_t k) { RemoveKey(*index, rows[free + k]); });
  for (int64_t k = 0; k < size; ++k) index->rows[rows[k]] = {codes[k], {step, hits[k]}};
  return insert_keys(index, rows, size, moves);
}

// Finds rows, and what `TakeUses` and `DistinctKeys` say of them. Returns how many keys have
// one, or -1 if there is no memory; `num_distinct` is of those without.
extern "C" int64_t look_up_keys(const Index* index, const uint64_t* codes, int64_t size,
                                int32_t* rows, int64_t threads, int32_t* touched, Use* uses,
                                int64_t* absent, uint64_t* distinct, int64_t* counts,
                                int64_t* of, int64_t* num_distinct) try {
  find_keys(index, codes, size, rows, threads);
  const int64_t count = TakeUses(index->rows, rows, size, touched, uses, absent);
  *num_distinct = DistinctKeys(codes, absent, size - count, index->multiplier, distinct,
                               counts, of);
  return count;
} catch (const std::bad_alloc&) {
  return -1;
}

extern "C" void touch_keys(Row* table, const int32_t* rows, int64_t size, int32_t step,
                           int32_t limit, const Use* old) {
  TouchKeys(table, rows, size, step, limit, old);
}

extern "C" int64_t lowest_keys(const Row* table, const int32_t* rows,
                               const int32_t* scores, int64_t size, int32_t by_hits,
                               int32_t now, int64_t count, int32_t* lowest) {
  return LowestKeys(table, rows, scores, size, by_hits != 0, now, count, lowest);
}

#pragma GCC visibility pop
