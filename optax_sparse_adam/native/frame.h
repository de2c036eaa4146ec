// What the functions of the kernel share: threads, types of numbers, and the frame of all
// updates, which adds up the entries of each row and calls a formula with the sums.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Any = ffi::AnyBuffer;

constexpr int64_t kMaxRow = std::numeric_limits<int32_t>::max();

// Functions over the numbers of a row are compiled for AVX2 as well, which most CPUs have
// and the flags do not ask for: all that is inline in a `body` of `Parallel`. The same
// numbers: no multiplication is contracted with an addition in either.
#define INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#define FOR_AVX2 __attribute__((target("avx2"), flatten))
#else
#define HAS_AVX2 false
#define FOR_AVX2 __attribute__((flatten))
#endif

template <typename Body>
FOR_AVX2 void CallAvx2(const Body& body, int64_t begin, int64_t end) {
  body(begin, end);
}

template <typename Body>
__attribute__((flatten)) void Call(const Body& body, int64_t begin, int64_t end) {
  body(begin, end);
}

// Calls `body(begin, end)` on parts of [0, size), here and on the free threads of the
// pool. A thread that comes late finds nothing left to do: nobody waits for its start,
// so that there is no deadlock in a pool whose threads all wait here.
template <typename Body>
void Parallel(ffi::ThreadPool& pool, int64_t size, int64_t grain, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable all_done;
  };
  const auto call = HAS_AVX2 ? CallAvx2<Body> : Call<Body>;
  const int64_t parts = (size + grain - 1) / grain;
  if (parts <= 1) return size > 0 ? call(body, 0, size) : void();
  auto shared = std::make_shared<Shared>();
  auto work = [shared, parts, size, grain, call, &body] {
    int64_t mine = 0;
    for (int64_t part; (part = shared->next.fetch_add(1)) < parts; ++mine) {
      call(body, part * grain, std::min(size, (part + 1) * grain));
    }
    if (mine == 0) return;  // `body` may be gone
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->done += mine;
    if (shared->done == parts) shared->all_done.notify_one();
  };
  const int64_t helpers = std::min(pool.num_threads(), parts) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  } catch (const std::bad_alloc&) {
    // Those that have begun need `body`: do the rest here.
  }
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done == parts; });
}

using Eight = float __attribute__((vector_size(32)));

// The upper half of a float, which is rounded to nearest, ties to even, as in XLA.
struct Bfloat16 {
  uint16_t bits;
};

INLINE float Load(float x) { return x; }

INLINE float Load(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

INLINE void Store(float x, float* to) { *to = x; }

INLINE void Store(float x, Bfloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = x == x ? rounded : (bits >> 16) | 0x40;  // NaN stays NaN
}

// Fetches a row of numbers before it is read, or written. Always inline, as are all that
// only fetch: GCC 12 takes such a function for one without effects, and drops its calls.
template <bool kWrites, typename T>
INLINE void PrefetchRow(const T* row, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(T);
  int64_t j = 0;
  for (; j + 4 * kLine <= width; j += 4 * kLine) {
    for (int64_t i = 0; i < 4; ++i) __builtin_prefetch(row + j + i * kLine, kWrites);
  }
  for (; j < width; j += kLine) __builtin_prefetch(row + j, kWrites);
}

// Calls `function` with the width as a constant where it is one of these, and with 0 else.
template <int64_t... kWidths, typename Function>
void WithWidth(int64_t width, const Function& function) {
  const auto call = [&](auto known) { return function(known), true; };
  if (!((width == kWidths && call(std::integral_constant<int64_t, kWidths>())) || ...)) {
    function(std::integral_constant<int64_t, 0>());
  }
}

// Asks for huge pages in a buffer that the kernel is the first to write. What is larger
// than 32 MB the C library maps afresh at each step, and to have its pages of 4 kB mapped
// and cleared one by one takes longer than to write them. It is advice, for the whole
// pages inside of the buffer, and may be refused.
void AdviseHugePages(void* data, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = (uintptr_t(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (uintptr_t(data) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

struct Entry {
  uint32_t row, slot;
};

// All entries by row, those of one row in their order, and at last padding, with
// `num_rows` for a row: radix sort. The entries are cut into pieces, which are counted
// and moved in parallel; the order does not depend on how many they are.
std::unique_ptr<Entry[]> Sorted(ffi::ThreadPool& pool, const int32_t* indices,
                                int64_t nse, int64_t num_rows) {
  // A million rows are 20 bits: two passes, by the lower ten and then by the upper ten.
  int bits = 1;
  while (num_rows >> bits > 0) ++bits;
  const int passes = (bits + 10) / 11, digit_bits = (bits + passes - 1) / passes;
  const int64_t digits = 1 << digit_bits;
  const int64_t grain = std::max<int64_t>(8192, nse / (2 * pool.num_threads()) + 1);
  const int64_t pieces = (nse + grain - 1) / grain;
  std::unique_ptr<Entry[]> entries(new Entry[nse]), other(new Entry[nse]);
  Parallel(pool, nse, grain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const bool inside = indices[slot] >= 0 && indices[slot] < num_rows;
      entries[slot] = {uint32_t(inside ? indices[slot] : num_rows), uint32_t(slot)};
    }
  });
  std::vector<uint32_t> positions(pieces * digits);
  for (int shift = 0; shift < bits; shift += digit_bits) {
    const auto digit = [=](Entry entry) { return (entry.row >> shift) & (digits - 1); };
    std::fill(positions.begin(), positions.end(), 0);
    Parallel(pool, nse, grain, [&](int64_t begin, int64_t end) {
      uint32_t* counts = positions.data() + begin / grain * digits;
      for (int64_t i = begin; i < end; ++i) ++counts[digit(entries[i])];
    });
    // From counts to places: by digit, and within a digit by piece. So entries of one
    // digit stay in their order, on which the next pass depends.
    uint32_t position = 0;
    for (int64_t i = 0; i < digits; ++i) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        position += std::exchange(positions[piece * digits + i], position);
      }
    }
    Parallel(pool, nse, grain, [&](int64_t begin, int64_t end) {
      uint32_t* next = positions.data() + begin / grain * digits;
      for (int64_t i = begin; i < end; ++i) {
        other[next[digit(entries[i])]++] = entries[i];
      }
    });
    entries.swap(other);
  }
  return entries;
}

// Moves row `from[k]` to row `k` for all k, in place. No two rows are moved from one.
void MoveRows(ffi::ThreadPool& pool, float* data, int64_t width,
              const std::vector<uint32_t>& from) {
  constexpr int64_t kAhead = 4;  // rows to fetch ahead
  const int64_t size = from.size();
  const auto copy = [width](float* to, const float* row) {
    std::memcpy(to, row, width * sizeof(float));
  };
  // `from` [2, 3, 1]: row 0 is not needed, so it takes row 2, 2 takes 1, and 1 takes 3,
  // which lies behind. [1, 0] is a circle: 0 is kept aside, and 1 takes that.
  std::vector<char> needed(size), moved(size);
  for (uint32_t row : from) {
    if (row < size) needed[row] = 1;
  }
  // Fills row `k`, then the hole that this leaves, and so on: chains that share no row.
  Parallel(pool, size, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < size) PrefetchRow<false>(data + from[k + kAhead] * width, width);
      if (needed[k]) continue;
      for (int64_t hole = k; hole < size; hole = from[hole]) {
        moved[hole] = 1;
        copy(data + hole * width, data + from[hole] * width);
      }
    }
  });
  std::vector<float> spare(width);
  for (int64_t k = 0; k < size; ++k) {  // what is left are circles
    if (moved[k] || from[k] == k) continue;
    copy(spare.data(), data + k * width);
    int64_t hole = k;
    for (; from[hole] != k; hole = from[hole]) {
      moved[hole] = 1;
      copy(data + hole * width, data + from[hole] * width);
    }
    moved[hole] = 1;
    copy(data + hole * width, spare.data());
  }
}

// The entries of a gradient, whose `data` become the sums of `rows`. These may lie where
// the indices do.
struct Gradient {
  const int32_t* indices;
  int64_t nse, num_rows, width;
  int32_t* rows;
  float* data;
  int32_t* count;

  INLINE void Clear(int64_t slot) const {
    rows[slot] = num_rows + slot;
    std::fill_n(data + slot * width, width, 0.0f);
  }
};

// Brings the sums into ascending order of their rows, and clears the slots behind.
void Order(ffi::ThreadPool& pool, const Gradient& grad, const Entry* entries,
           int64_t size) {
  std::vector<uint32_t> from;
  for (int64_t i = 0; i < size; ++i) {
    if (i > 0 && entries[i].row == entries[i - 1].row) continue;
    grad.rows[from.size()] = entries[i].row;
    from.push_back(entries[i].slot);
  }
  MoveRows(pool, grad.data, grad.width, from);
  const int64_t count = from.size();
  Parallel(pool, grad.nse - count, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t slot = count + begin; slot < count + end; ++slot) grad.Clear(slot);
  });
}

// Adds up the entries of each row, calls `row_fn(row, sums)`, and leaves in `data` what
// it makes of the sums: where the first entry of the row was, or in order.
template <typename RowFn>
void ForEachRow(ffi::ThreadPool& pool, const Gradient& grad, const RowFn& row_fn) {
  constexpr int64_t kAhead = 8;  // entries to fetch ahead
  const int64_t nse = grad.nse, width = grad.width;
  float* data = grad.data;
  const std::unique_ptr<Entry[]> entries =
      Sorted(pool, grad.indices, nse, grad.num_rows);
  const Entry* padding = std::partition_point(
      entries.get(), entries.get() + nse,
      [&](Entry entry) { return entry.row < grad.num_rows; });
  const int64_t size = padding - entries.get();
  const auto is_first = [&entries](int64_t i) {
    return i == 0 || entries[i].row != entries[i - 1].row;
  };
  const auto fetch = [&](int64_t i) __attribute__((always_inline)) {
    if (i >= size) return;
    PrefetchRow<true>(data + entries[i].slot * width, width);
    if (is_first(i)) row_fn.Prefetch(entries[i].row);
  };
  std::atomic<int32_t> touched{0};
  Parallel(pool, size, 512, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    while (i < end && !is_first(i)) ++i;  // of a row that another part adds up
    int32_t mine = 0;
    for (; i < end; ++mine) {
      const int64_t row = entries[i].row, slot = entries[i].slot;
      fetch(i + kAhead);
      float* __restrict__ sum = data + slot * width;
      for (int64_t j = 0; j < width; ++j) sum[j] += 0.0f;  // from zero: no -0.0
      for (++i; i < size && entries[i].row == row; ++i) {
        fetch(i + kAhead);
        const float* __restrict__ addend = data + entries[i].slot * width;
        for (int64_t j = 0; j < width; ++j) sum[j] += addend[j];
        if (!RowFn::kInOrder) grad.Clear(entries[i].slot);  // while it is in the cache
      }
      if (!RowFn::kInOrder) grad.rows[slot] = row;
      row_fn(row, sum);
    }
    touched += mine;
  });
  *grad.count = touched;
  if (RowFn::kInOrder) return Order(pool, grad, entries.get(), size);
  Parallel(pool, nse - size, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) grad.Clear(padding[i].slot);
  });
}

}  // namespace
