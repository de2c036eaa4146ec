// What the functions of the kernel share: threads, types of numbers, sorted entries.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
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

// What goes over the numbers of rows is compiled for AVX2 as well, which most CPUs have
// and the flags do not ask for: `FASTEST(function)` is the one for this CPU, with all that
// is inline in it. The same numbers: no multiplication is contracted with an addition.
// `FASTEST_OF(function)` is `function<Sixteen>` on a CPU with AVX-512, else
// `function<Eight>`, of what goes over them by `ByParts`.
#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of lambdas
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#define HAS_AVX512 (__builtin_cpu_supports("avx512f") && HAS_AVX2)
#define FOR_AVX2 __attribute__((target("avx2"), flatten))
#define FOR_AVX512 __attribute__((target("avx2,avx512f"), flatten))
#else
#define HAS_AVX2 false
#define HAS_AVX512 false
#define FOR_AVX2 __attribute__((flatten))
#define FOR_AVX512 __attribute__((flatten))
#endif
#define FASTEST(function) Choose<function>(function)
#define FASTEST_OF(function) \
  (HAS_AVX512 ? Widest<function<Sixteen>>(function<Sixteen>) : FASTEST(function<Eight>))

// Numbers of a row side by side. All that has them is inline, so that they are never
// passed in one way or the other.
#pragma GCC diagnostic ignored "-Wpsabi"
using Four = float __attribute__((vector_size(16)));
using Eight = float __attribute__((vector_size(32)));
using Sixteen = float __attribute__((vector_size(64)));

// Numbers of a row from its place `at` on: as many as a `Floats` has, or of four `n`,
// filled up with zeros. These go through registers: what is put together in memory cannot
// be read as a whole until all of it has arrived there.
template <typename Floats>
struct Part {
  static constexpr int64_t kSize = sizeof(Floats) / sizeof(float);
  int64_t at, n;

  INLINE Floats Load(const float* row) const {
    Floats x = {};
    if (n == kSize) {
      std::memcpy(&x, row + at, sizeof(x));
    } else if constexpr (kSize == 4) {
      x = Floats{row[at], n > 1 ? row[at + 1] : 0.0f, n > 2 ? row[at + 2] : 0.0f, 0.0f};
    }
    return x;
  }

  INLINE void Store(Floats x, float* row) const {
    if (n == kSize) {
      std::memcpy(row + at, &x, sizeof(x));
    } else if constexpr (kSize == 4) {
      row[at] = x[0];
      if (n > 1) row[at + 1] = x[1];
      if (n > 2) row[at + 2] = x[2];
    }
  }
};

// Calls `body` for all parts of a row.
template <typename Wide, typename Body>
INLINE void ByParts(int64_t width, const Body& body) {
  int64_t j = 0;
  if constexpr (sizeof(Wide) > sizeof(Eight)) {
    for (; j + 16 <= width; j += 16) body(Part<Wide>{j, 16});
  }
  for (; j + 8 <= width; j += 8) body(Part<Eight>{j, 8});
  for (; j < width; j += 4) body(Part<Four>{j, std::min<int64_t>(4, width - j)});
}

template <typename Floats>
INLINE Floats Sqrt(Floats x) {
  constexpr int n = sizeof(x) / 4;
  float roots[n];
  std::memcpy(roots, &x, sizeof(x));
  for (int i = 0; i < n; ++i) roots[i] = std::sqrt(roots[i]);
  std::memcpy(&x, roots, sizeof(x));
  return x;
}

template <auto kFunction, typename... Args>
FOR_AVX512 void InAvx512(Args... args) {
  kFunction(args...);
}

template <auto kFunction, typename... Args>
FOR_AVX2 void InAvx2(Args... args) {
  kFunction(args...);
}

template <auto kFunction, typename... Args>
__attribute__((flatten)) void Plainly(Args... args) {
  kFunction(args...);
}

template <auto kFunction, typename... Args>
auto Choose(void (*)(Args...)) {
  return HAS_AVX2 ? InAvx2<kFunction, Args...> : Plainly<kFunction, Args...>;
}

template <auto kFunction, typename... Args>
auto Widest(void (*)(Args...)) {
  return InAvx512<kFunction, Args...>;
}

// Calls `body(begin, end)` on parts of [0, size), here and on the free threads of the
// pool. A thread that comes late finds nothing left to do: nobody waits for its start,
// so that there is no deadlock in a pool whose threads all wait here.
//
// What `body` throws, which is for want of memory, is thrown here when all parts have
// ended: on a thread of the pool it would end the process, and here it would leave the
// helpers with a `body` that is gone. The parts that have not begun are left out.
void Parallel(ffi::ThreadPool& pool, int64_t size, int64_t grain,
              const std::function<void(int64_t, int64_t)>& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable all_done;
  };
  const int64_t parts = (size + grain - 1) / grain;
  if (parts <= 1) return size > 0 ? body(0, size) : void();
  auto shared = std::make_shared<Shared>();
  auto work = [shared, parts, size, grain, &body] {
    int64_t mine = 0;
    for (int64_t part; (part = shared->next.fetch_add(1)) < parts; ++mine) {
      if (shared->failed) continue;
      try {
        body(part * grain, std::min(size, (part + 1) * grain));
      } catch (...) {
        shared->failed = true;
      }
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
  if (shared->failed) throw std::bad_alloc();
}

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

// Which cache to fetch to, as the compiler numbers them.
enum Cache { kSecondCache = 2, kFirstCache = 3 };

// Fetches a row of so many bytes before it is read, or written: to the second cache, as
// few lines can be on their way to the first one, and an AMD EPYC waits where they would be
// more. Steps took 0.76 to 0.97 of their time. Who fetches far ahead may fetch a row again,
// shortly before it is used, from there to the first cache. Always inline, as are all that
// only fetch: GCC 12 takes such a function for one without effects, and drops its calls.
template <bool kWrites, Cache kCache = kSecondCache>
INLINE void Prefetch(const void* row, int64_t bytes) {
  const char* line = static_cast<const char*>(row);
  int64_t j = 0;
  for (; j + 256 <= bytes; j += 256) {
    for (int64_t i = 0; i < 256; i += 64) __builtin_prefetch(line + j + i, kWrites, kCache);
  }
  for (; j < bytes; j += 64) __builtin_prefetch(line + j, kWrites, kCache);
}

// Asks for huge pages in a buffer that the kernel is the first to write. What is larger
// than 32 MB the C library maps afresh at each step (see `keep_memory`), and to have its
// pages of 4 kB mapped and cleared one by one takes longer than to write them. It is
// advice, for the whole pages inside of the buffer, and may be refused.
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

// Writes all entries by row, those of one row in their order, and at last padding, with
// `num_rows` for a row: radix sort. The entries are cut into pieces, which are counted
// and moved in parallel; the order does not depend on how many they are.
void Sort(ffi::ThreadPool& pool, const int32_t* indices, int64_t nse, int64_t num_rows,
          Entry* sorted) {
  // A million rows are 20 bits: two passes, by the lower ten and then by the upper ten.
  int bits = 1;
  while (num_rows >> bits > 0) ++bits;
  const int passes = (bits + 10) / 11, digit_bits = (bits + passes - 1) / passes;
  const int64_t digits = 1 << digit_bits;
  const int64_t grain = std::max<int64_t>(8192, nse / (2 * pool.num_threads()) + 1);
  const int64_t pieces = (nse + grain - 1) / grain;
  std::unique_ptr<Entry[]> memory(new Entry[nse]);
  Entry* entries = passes % 2 ? memory.get() : sorted;  // so that the last pass ends there
  Entry* other = passes % 2 ? sorted : memory.get();
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
    std::swap(entries, other);
  }
}

}  // namespace
