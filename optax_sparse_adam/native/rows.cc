// Lookups of rows, the sums of a row-sparse gradient, Adam on the rows that it touches,
// and its update of a table, for CPUs.
//
// Lookups copy each row as a whole. `sum_rows` and `adam_rows` do what `touched_rows` and
// `map_rows` do in XLA, in one pass and in place: the gradient's buffer becomes the sums,
// or the update. They return `(rows, data, ..., count)`: the index of each slot, the sum
// or the update of its row, and how many rows are touched. `sum_rows` has the touched
// rows in front, in ascending order. `adam_rows` leaves each row in the slot of its first
// entry, which saves a pass over the values. All other slots are padding: the index is
// `num_rows + slot`, the values are zeros. Entries are added in their order, so that the
// sums are those of XLA bit for bit on any number of threads.
//
// `add_rows` and `put_rows` write rows into a table, in place. Tables and moments are
// float32 or bfloat16, the arithmetic is in float32.

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
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Any = ffi::AnyBuffer;

constexpr int64_t kMaxRow = std::numeric_limits<int32_t>::max();

// Calls `body(begin, end)` on parts of [0, size), here and on the free threads of the
// pool. A thread that comes late finds nothing left to do: nobody waits for its start,
// so that there is no deadlock in a pool whose threads all wait here.
void Parallel(ffi::ThreadPool& pool, int64_t size, int64_t grain,
              const std::function<void(int64_t, int64_t)>& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable all_done;
  };
  const int64_t parts = (size + grain - 1) / grain;
  auto shared = std::make_shared<Shared>();
  auto work = [shared, parts, size, grain, &body] {
    int64_t mine = 0;
    for (int64_t part; (part = shared->next.fetch_add(1)) < parts; ++mine) {
      body(part * grain, std::min(size, (part + 1) * grain));
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

// The upper half of a float, which is rounded to nearest, ties to even, as in XLA.
struct Bfloat16 {
  uint16_t bits;
};

float Load(float x) { return x; }

float Load(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

void Store(float x, float* to) { *to = x; }

void Store(float x, Bfloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = x == x ? rounded : (bits >> 16) | 0x40;  // NaN stays NaN
}

// Fetches a row of numbers before it is needed.
template <typename T>
void PrefetchRow(const T* row, int64_t width) {
  for (int64_t j = 0; j < width; j += 64 / sizeof(T)) __builtin_prefetch(row + j, 1);
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
  std::vector<char> needed(size), moved(size);
  for (uint32_t row : from) {
    if (row < size) needed[row] = 1;
  }
  // Fills row `k`, then the hole that this leaves, and so on: chains that share no row.
  Parallel(pool, size, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < size) PrefetchRow(data + from[k + kAhead] * width, width);
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

  void Clear(int64_t slot) const {
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

// Adds up the entries of each row, calls `middle(row, sums)`, and leaves in `data` what
// it makes of the sums: where the first entry of the row was, or in order.
template <typename Middle>
void ForEachRow(ffi::ThreadPool& pool, const Gradient& grad, const Middle& middle) {
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
  const auto fetch = [&](int64_t i) {
    if (i >= size) return;
    PrefetchRow(data + entries[i].slot * width, width);
    if (is_first(i)) middle.Prefetch(entries[i].row);
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
        if (!Middle::kInOrder) grad.Clear(entries[i].slot);  // while it is in the cache
      }
      if (!Middle::kInOrder) grad.rows[slot] = row;
      middle(row, sum);
    }
    touched += mine;
  });
  *grad.count = touched;
  if (Middle::kInOrder) return Order(pool, grad, entries.get(), size);
  Parallel(pool, nse - size, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) grad.Clear(padding[i].slot);
  });
}

struct Sum {
  static constexpr bool kInOrder = true;
  void Prefetch(int64_t) const {}
  void operator()(int64_t, float*) const {}
};

// The formula of `_adam`, with moments of types that may differ.
template <typename Mu, typename Nu>
struct Adam {
  static constexpr bool kInOrder = false;
  Mu* mu;
  Nu* nu;
  int64_t width;
  float sign, one_minus_b1, one_minus_b2, eps, scale;

  void Prefetch(int64_t row) const {
    PrefetchRow(mu + row * width, width);
    PrefetchRow(nu + row * width, width);
  }

  void operator()(int64_t row, float* __restrict__ grad) const {
    Mu* __restrict__ old_m = mu + row * width;
    Nu* __restrict__ old_v = nu + row * width;
    for (int64_t j = 0; j < width; ++j) {
      const float g = sign * grad[j];
      float m = Load(old_m[j]), v = Load(old_v[j]);
      m += one_minus_b1 * (g - m);
      v += one_minus_b2 * (g * g - v);
      Store(m, old_m + j);
      Store(v, old_v + j);
      grad[j] = scale * m / (std::sqrt(v) + eps);
    }
  }
};

template <typename Mu, typename Nu>
Adam(Mu*, Nu*, int64_t, float, float, float, float, float) -> Adam<Mu, Nu>;

// Why a buffer is not what the kernel is going to read or write, which is memory that
// nobody else checks; empty if it is. Its type is checked by XLA.
template <typename Buffer>
std::string Misfit(const char* name, const Buffer& buffer, int64_t num_rows,
                   int64_t width) {
  const auto sizes = buffer.dimensions();
  const int64_t count = buffer.element_count();
  if (sizes.size() > 0 && sizes[0] == num_rows && count == num_rows * width) return "";
  std::string shape;
  for (int64_t size : sizes) shape += std::to_string(size) + ", ";
  return std::string("The kernel takes ") + name + " of " + std::to_string(num_rows) +
         " rows of " + std::to_string(width) + " numbers, got the shape [" +
         shape.substr(0, shape.empty() ? 0 : shape.size() - 2) + "]. ";
}

ffi::Error Invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
}

// Calls `function` with the numbers of a table, a pointer to their type.
template <typename Function>
ffi::Error WithType(const Any& table, const Function& function) {
  void* data = table.untyped_data();
  if (table.element_type() == ffi::F32) return function(static_cast<float*>(data));
  if (table.element_type() == ffi::BF16) return function(static_cast<Bfloat16*>(data));
  return Invalid("The kernel takes tables of float32 or bfloat16, got another type.");
}

// Why a table is not updated where it is.
std::string Elsewhere(const char* name, const Any& old, const Any& updated) {
  if (old.untyped_data() == updated.untyped_data() &&
      old.element_type() == updated.element_type()) {
    return "";
  }
  return std::string("The kernel updates ") + name + " in place, got two buffers. ";
}

// The buffers of a gradient of a table, and of what becomes of it.
std::string Misfit(const Ints& indices, const Floats& given, const Ints& rows,
                   const Floats& data, int64_t num_rows, int64_t width) {
  const int64_t nse = indices.element_count();
  if (nse < 1 || num_rows < 1 || width < 1 || num_rows + nse > kMaxRow) {
    return "The kernel takes at least one entry and one number, and ids of padding "
           "that are int32, got " + std::to_string(nse) + " entries of a table of " +
           std::to_string(num_rows) + " rows of " + std::to_string(width) +
           " numbers. ";
  }
  return Misfit("indices", indices, nse, 1) + Misfit("data", given, nse, width) +
         Misfit("new indices", rows, nse, 1) + Misfit("new data", data, nse, width);
}

template <typename Middle>
ffi::Error Run(ffi::ThreadPool& pool, const Ints& indices, const Floats& given,
               int64_t num_rows, int64_t width, Ints& rows, Floats& data,
               ffi::BufferR0<ffi::S32>& count, const Middle& middle) {
  const std::string misfit = Misfit(indices, given, rows, data, num_rows, width);
  if (!misfit.empty()) return Invalid(misfit);
  if (given.typed_data() != data.typed_data()) {
    return Invalid("The kernel updates data in place, got two buffers.");
  }
  const int64_t nse = indices.element_count();
  const Gradient grad{indices.typed_data(), nse, num_rows, width, rows.typed_data(),
                      data.typed_data(),    count.typed_data()};
  try {
    ForEachRow(pool, grad, middle);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory to sort the ids");
  }
  return ffi::Error::Success();
}

// The inputs but `factors` are the buffers of the outputs, in their order.
ffi::Error AdamRows(ffi::ThreadPool pool, Ints indices, Floats given, Any old_mu,
                    Any old_nu, Floats factors, int64_t num_rows, int64_t width,
                    ffi::Result<Ints> rows, ffi::Result<Floats> data,
                    ffi::Result<Any> mu, ffi::Result<Any> nu,
                    ffi::Result<ffi::BufferR0<ffi::S32>> count) {
  const std::string misfit =
      Misfit("mu", old_mu, num_rows, width) + Misfit("nu", old_nu, num_rows, width) +
      Misfit("new mu", *mu, num_rows, width) + Misfit("new nu", *nu, num_rows, width) +
      Misfit("factors", factors, 5, 1) + Elsewhere("mu", old_mu, *mu) +
      Elsewhere("nu", old_nu, *nu);
  if (!misfit.empty()) return Invalid(misfit);
  const float* f = factors.typed_data();
  return WithType(*mu, [&](auto* m) {
    return WithType(*nu, [&](auto* v) {
      const Adam adam{m, v, width, f[0], f[1], f[2], f[3], f[4]};
      return Run(pool, indices, given, num_rows, width, *rows, *data, *count, adam);
    });
  });
}

ffi::Error SumRows(ffi::ThreadPool pool, Ints indices, Floats given, int64_t num_rows,
                   int64_t width, ffi::Result<Ints> rows, ffi::Result<Floats> data,
                   ffi::Result<ffi::BufferR0<ffi::S32>> count) {
  return Run(pool, indices, given, num_rows, width, *rows, *data, *count, Sum{});
}

// Copies rows of numbers of type `T`, whatever these mean.
template <typename T>
void CopyRows(ffi::ThreadPool& pool, const T* table, const int32_t* index,
              int64_t size, int64_t num_rows, int64_t width, bool clamps, T fill,
              T* out) {
  constexpr int64_t kAhead = 8;  // rows to fetch ahead
  const auto row = [&](int64_t k) {
    return std::clamp<int64_t>(index[k], 0, num_rows - 1);
  };
  AdviseHugePages(out, size * width * sizeof(T));
  Parallel(pool, size, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < size) PrefetchRow(table + row(k + kAhead) * width, width);
      if (clamps || row(k) == index[k]) {
        std::memcpy(out + k * width, table + row(k) * width, width * sizeof(T));
      } else {
        std::fill_n(out + k * width, width, fill);
      }
    }
  });
}

// `table[indices]`. An index outside of the table reads the row that is next to it, or
// in place of a row the number whose bits are `fill`.
ffi::Error TakeRows(ffi::ThreadPool pool, Any table, Ints indices, int64_t num_rows,
                    int64_t width, bool clamps, int64_t fill, ffi::Result<Any> rows) {
  const int64_t size = indices.element_count();
  if (num_rows < 1 || width < 1) return Invalid("The kernel takes no empty table.");
  const std::string misfit = Misfit("a table", table, num_rows, width);
  if (!misfit.empty()) return Invalid(misfit);
  if (int64_t(rows->element_count()) != size * width ||
      rows->element_type() != table.element_type()) {
    return Invalid("The kernel returns as many rows as there are indices.");
  }
  const auto copy = [&](auto fill) {
    using T = decltype(fill);
    CopyRows(pool, static_cast<const T*>(table.untyped_data()), indices.typed_data(),
             size, num_rows, width, clamps, fill, static_cast<T*>(rows->untyped_data()));
    return ffi::Error::Success();
  };
  switch (ffi::ByteWidth(table.element_type())) {
    case 2: return copy(uint16_t(fill));
    case 4: return copy(uint32_t(fill));
  }
  return Invalid("The kernel looks up numbers of two or four bytes.");
}

// Calls `write(row of the table, row of the values)` for each slot that has a row.
// `indices` are unique.
template <typename T, typename U, typename Write>
void WriteRows(ffi::ThreadPool& pool, T* table, const int32_t* indices, const U* values,
               int64_t nse, int64_t num_rows, int64_t width, const Write& write) {
  constexpr int64_t kAhead = 16;  // slots to fetch ahead
  const auto inside = [&](int64_t k) { return indices[k] >= 0 && indices[k] < num_rows; };
  Parallel(pool, nse, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < nse && inside(k + kAhead)) {
        PrefetchRow(table + indices[k + kAhead] * width, width);
      }
      if (inside(k)) write(table + indices[k] * width, values + k * width);
    }
  });
}

// The table and what goes into it; the result is the buffer of the table.
std::string Misfit(const Any& table, const Ints& indices, const Any& values,
                   int64_t num_rows, int64_t width, const Any& updated) {
  const int64_t nse = indices.element_count();
  if (nse < 1 || num_rows < 1 || width < 1) return "The kernel writes no empty rows. ";
  return Misfit("a table", table, num_rows, width) + Misfit("rows", values, nse, width) +
         Misfit("indices", indices, nse, 1) +
         Misfit("a new table", updated, num_rows, width) +
         Elsewhere("a table", table, updated);
}

// `table.at[indices].add(values)`, each sum rounded once. Padding is dropped.
ffi::Error AddRows(ffi::ThreadPool pool, Any table, Ints indices, Any values,
                   int64_t num_rows, int64_t width, ffi::Result<Any> updated) {
  const std::string misfit = Misfit(table, indices, values, num_rows, width, *updated);
  if (!misfit.empty()) return Invalid(misfit);
  const int64_t nse = indices.element_count();
  return WithType(table, [&](auto* to) {
    return WithType(values, [&](auto* from) {
      const auto add = [width](auto* __restrict__ row, const auto* __restrict__ value) {
        for (int64_t j = 0; j < width; ++j) Store(Load(row[j]) + Load(value[j]), row + j);
      };
      WriteRows(pool, to, indices.typed_data(), from, nse, num_rows, width, add);
      return ffi::Error::Success();
    });
  });
}

// `table.at[indices].set(values)`, of one type. Padding is dropped.
ffi::Error PutRows(ffi::ThreadPool pool, Any table, Ints indices, Any values,
                   int64_t num_rows, int64_t width, ffi::Result<Any> updated) {
  std::string misfit = Misfit(table, indices, values, num_rows, width, *updated);
  if (table.element_type() != values.element_type()) {
    misfit += "The kernel writes rows of the type of the table, got another one. ";
  }
  if (!misfit.empty()) return Invalid(misfit);
  const int64_t nse = indices.element_count();
  return WithType(table, [&](auto* to) {
    const auto* from = static_cast<decltype(to)>(values.untyped_data());
    const auto copy = [width](auto* row, const auto* value) {
      std::memcpy(row, value, width * sizeof(*row));
    };
    WriteRows(pool, to, indices.typed_data(), from, nse, num_rows, width, copy);
    return ffi::Error::Success();
  });
}

}  // namespace

// All else is hidden by -fvisibility=hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(adam_rows, AdamRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Ret<Ints>()
                                  .Ret<Floats>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<ffi::BufferR0<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(sum_rows, SumRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Ret<Ints>()
                                  .Ret<Floats>()
                                  .Ret<ffi::BufferR0<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(take_rows, TakeRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<bool>("clamps")
                                  .Attr<int64_t>("fill")
                                  .Ret<Any>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(add_rows, AddRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Arg<Any>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Ret<Any>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(put_rows, PutRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Arg<Any>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Ret<Any>());

#pragma GCC visibility pop
