// Lookups of rows, the sums of a row-sparse gradient, and Adam and exact Adam on the rows
// that it touches, for CPUs.
//
// Lookups copy each row as a whole, or bring it up to date on the way. The other functions do what `touched_rows` and
// `map_rows` do in XLA, in one pass and in place: the gradient's buffer becomes the sums,
// or the update. They return `(rows, data, ..., count)`: the touched rows in ascending
// order, then padding, `num_rows + slot`; their sums or updates, then zeros; how many
// rows are touched. Entries are added in their order, so that the sums are those of XLA
// bit for bit on any number of threads.

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
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

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

struct Entry {
  uint32_t row, slot;
};

// The entries inside of the table by row, those of one row in their order: radix sort.
std::vector<Entry> Sorted(const int32_t* indices, int64_t nse, int64_t num_rows) {
  constexpr int kBits = 11;
  std::vector<Entry> entries;
  entries.reserve(nse);
  for (int64_t slot = 0; slot < nse; ++slot) {
    if (indices[slot] < 0 || indices[slot] >= num_rows) continue;
    entries.push_back({uint32_t(indices[slot]), uint32_t(slot)});
  }
  std::vector<Entry> other(entries.size());
  for (int shift = 0; (num_rows - 1) >> shift > 0; shift += kBits) {
    const auto digit = [shift](const Entry& entry) {
      return (entry.row >> shift) & ((1 << kBits) - 1);
    };
    uint32_t position[(1 << kBits) + 1] = {};
    for (const Entry& entry : entries) ++position[digit(entry) + 1];
    for (int i = 0; i < 1 << kBits; ++i) position[i + 1] += position[i];
    for (const Entry& entry : entries) other[position[digit(entry)]++] = entry;
    entries.swap(other);
  }
  return entries;
}

// Moves row `from[k]` to row `k` for all k, in place. No two rows are moved from one.
void MoveRows(float* data, int64_t width, int64_t nse,
              const std::vector<uint32_t>& from) {
  const int64_t size = from.size();
  const auto copy = [width](float* to, const float* row) {
    std::memcpy(to, row, width * sizeof(float));
  };
  std::vector<char> needed(nse), moved(size);
  for (uint32_t row : from) needed[row] = 1;
  // Fills row `k`, then the hole that this leaves, and so on, up to `last`.
  std::vector<float> spare(width);
  const auto fill = [&](int64_t k, int64_t last) {
    while (k < size) {
      moved[k] = 1;
      if (from[k] == last) return copy(data + k * width, spare.data());
      copy(data + k * width, data + from[k] * width);
      k = from[k];
    }
  };
  for (int64_t k = 0; k < size; ++k) {
    if (!needed[k]) fill(k, nse);
  }
  for (int64_t k = 0; k < size; ++k) {  // what is left are circles
    if (moved[k] || from[k] == k) continue;
    copy(spare.data(), data + k * width);
    fill(k, k);
  }
}

// Adds up the entries of each row, calls `middle(row, sums)`, and leaves in `data` what
// it makes of the sums: touched rows first, in ascending order, then zeros.
template <typename Middle>
void ForEachRow(ffi::ThreadPool& pool, const int32_t* indices, int64_t nse,
                int64_t num_rows, int64_t width, int32_t* rows, float* data,
                int32_t* count, const Middle& middle) {
  constexpr int64_t kAhead = 4;  // rows to fetch ahead
  const std::vector<Entry> entries = Sorted(indices, nse, num_rows);
  std::vector<uint32_t> starts, from;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i > 0 && entries[i].row == entries[i - 1].row) continue;
    starts.push_back(i);
    from.push_back(entries[i].slot);
  }
  const int64_t size = from.size();
  starts.push_back(entries.size());
  Parallel(pool, size, 256, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < size) {
        middle.Prefetch(entries[starts[k + kAhead]].row);
        const float* next = data + from[k + kAhead] * width;
        for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(next + j, 1);
      }
      float* __restrict__ sum = data + from[k] * width;
      for (int64_t j = 0; j < width; ++j) sum[j] += 0.0f;  // from zero: no -0.0
      for (uint32_t i = starts[k] + 1; i < starts[k + 1]; ++i) {
        const float* __restrict__ addend = data + entries[i].slot * width;
        for (int64_t j = 0; j < width; ++j) sum[j] += addend[j];
      }
      rows[k] = entries[starts[k]].row;
      middle(rows[k], sum);
    }
  });
  MoveRows(data, width, nse, from);
  Parallel(pool, nse - size, 1024, [&](int64_t begin, int64_t end) {
    const int64_t bytes = (end - begin) * width * sizeof(float);
    std::memset(data + (size + begin) * width, 0, bytes);
    for (int64_t k = size + begin; k < size + end; ++k) rows[k] = num_rows + k;
  });
  *count = size;
}

struct Sum {
  void Prefetch(int64_t) const {}
  void operator()(int64_t, float*) const {}
};

// The formula of `_adam_rows`.
struct Adam {
  float *mu, *nu;
  int64_t width;
  float sign, one_minus_b1, one_minus_b2, eps, scale;

  void Prefetch(int64_t row) const {
    for (int64_t j = 0; j < width; j += 16) {
      __builtin_prefetch(mu + row * width + j, 1);
      __builtin_prefetch(nu + row * width + j, 1);
    }
  }

  void operator()(int64_t row, float* __restrict__ grad) const {
    float* __restrict__ m = mu + row * width;
    float* __restrict__ v = nu + row * width;
    for (int64_t j = 0; j < width; ++j) {
      const float g = sign * grad[j];
      m[j] += one_minus_b1 * (g - m[j]);
      v[j] += one_minus_b2 * (g * g - v[j]);
      grad[j] = scale * m[j] / (std::sqrt(v[j]) + eps);
    }
  }
};

// Functions over the numbers of a row, compiled for AVX2 as well, which most CPUs have
// and the flags do not ask for. The same numbers: no multiplication is contracted with
// an addition in either.
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#define FOR_AVX2 __attribute__((target("avx2")))
#else
#define HAS_AVX2 false
#define FOR_AVX2
#endif
#define INLINE inline __attribute__((always_inline))

constexpr int64_t kPart = 64;  // numbers of a row that are computed at a time

// The way that rows have still to go: see `_rows/ways.py`, `way_of`.
struct Way {
  const float* coefficients;  // of the powers of z
  int64_t size, nodes;        // those that are not zero, and all
  float centre;

  Way(const float* coefficients, int64_t nodes, float centre)
      : coefficients(coefficients), size(nodes), nodes(nodes), centre(centre) {
    while (size > 1 && coefficients[size - 1] == 0) --size;
  }

  // Of `sign * mu` and `scale * root`, for at most `kPart` numbers. One loop after the
  // other, each of which a compiler vectorizes, as the number of coefficients is known
  // only here.
  INLINE void operator()(const float* __restrict__ mu, float sign,
                         const float* __restrict__ root, float scale, int64_t n,
                         float* __restrict__ way) const {
    float z[kPart], factor[kPart];
    const float c = centre, half = std::sqrt(centre);
    for (int64_t i = 0; i < n; ++i) {
      const float s = root[i] * scale, inverse = 1.0f / (s + c);
      factor[i] = mu[i] * sign * inverse;
      z[i] = (s - c) * inverse;
      way[i] = 0.0f;
    }
    for (int64_t i = 0; nodes % 2 == 1 && i < n; ++i) {
      const float s = std::sqrt(root[i] * scale);
      z[i] = (s - half) / (s + half);
    }
    for (int64_t k = (size - 1) / 4 * 4; k >= 0; k -= 4) {
      float a[4] = {};
      std::memcpy(a, coefficients + k, std::min<int64_t>(4, size - k) * sizeof(float));
      const float c0 = a[0], c1 = a[1], c2 = a[2], c3 = a[3];
      for (int64_t i = 0; i < n; ++i) {
        way[i] = (((way[i] * z[i] + c3) * z[i] + c2) * z[i] + c1) * z[i] + c0;
      }
    }
    for (int64_t i = 0; i < n; ++i) way[i] *= factor[i];
  }
};

// The state of all rows, and the numbers that bring one up to date: `move_rows` of
// `_rows/resting_rows.py`. Without weight decay, `high` and `low` are null.
struct RestingRows {
  static constexpr int64_t kNumbers = 6;

  float *mu, *nu;
  int32_t* last;
  float *high, *low;
  int64_t width;
  const float* numbers;  // as `native._calls._numbers_of_rows` lists them
  int64_t nodes;
  int32_t count, since;
  Way behind{numbers + kNumbers, nodes, numbers[2]};
  Way ahead{numbers + kNumbers + nodes, nodes, numbers[3]};

  struct Row {
    const Way* way;
    float power1, power2;  // of the moments
    float sign, root;      // of the moments in the way
    float log_decay;
  };

  // Inline, because GCC 12 takes a function that only fetches for one without effects,
  // and drops its calls.
  INLINE void Prefetch(int64_t row, bool writes) const {
    for (int64_t j = 0; j < width; j += 16) {
      if (writes) {
        __builtin_prefetch(mu + row * width + j, 1);
        __builtin_prefetch(nu + row * width + j, 1);
      } else {
        __builtin_prefetch(mu + row * width + j);
        __builtin_prefetch(nu + row * width + j);
      }
    }
    __builtin_prefetch(last + row);
  }

  Row Find(int64_t row) const {
    const float steps = float(count - last[row]);
    const bool is_value = last[row] <= since;
    const float power1 = std::exp(steps * numbers[0]);
    const float power2 = std::exp(steps * numbers[1]);
    Row found{is_value ? &behind : &ahead, power1, power2, is_value ? -1.0f : power1,
              is_value ? 1.0f : power2, 0.0f};
    if (high != nullptr) {
      found.log_decay = (numbers[4] - high[row]) + (numbers[5] - low[row]);
    }
    return found;
  }
};

INLINE void ReadRow(const RestingRows& rows, int64_t row, const float* table,
                    float* __restrict__ out) {
  const RestingRows::Row now = rows.Find(row);
  const float decay = rows.high == nullptr ? 1.0f : std::exp(now.log_decay);
  for (int64_t j = 0; j < rows.width; j += kPart) {
    const int64_t place = row * rows.width + j, n = std::min(kPart, rows.width - j);
    const float* nu = rows.nu + place;
    const float* value = table + place;
    float root[kPart], by[kPart];
    for (int64_t i = 0; i < n; ++i) root[i] = std::sqrt(nu[i]);
    (*now.way)(rows.mu + place, now.sign, root, now.root, n, by);
    if (rows.high == nullptr) {
      for (int64_t i = 0; i < n; ++i) out[j + i] = value[i] + by[i];
    } else {
      for (int64_t i = 0; i < n; ++i) out[j + i] = decay * value[i] + by[i];
    }
  }
}

FOR_AVX2 void ReadRowAvx2(const RestingRows& rows, int64_t row, const float* table,
                          float* out) {
  ReadRow(rows, row, table, out);
}

void ReadRowPlain(const RestingRows& rows, int64_t row, const float* table,
                  float* out) {
  ReadRow(rows, row, table, out);
}

// The formula of `_optimizers/exact_formula.py`.
struct ExactAdam {
  static constexpr int64_t kNumbers = 9;

  RestingRows rows;
  const float* table;    // read where rows decay
  const float* numbers;  // as `native._calls.exact_adam_rows` lists them
  Way after{numbers + kNumbers, rows.nodes, numbers[6]};
  bool has_avx2 = HAS_AVX2;

  INLINE void Prefetch(int64_t row) const {
    rows.Prefetch(row, true);
    if (rows.high == nullptr) return;
    for (int64_t j = 0; j < rows.width; j += 16) {
      __builtin_prefetch(table + row * rows.width + j);
    }
  }

  INLINE void Update(int64_t row, float* grad) const {
    const RestingRows::Row now = rows.Find(row);
    const float one_minus_b1 = numbers[0], one_minus_b2 = numbers[1];
    const float size = numbers[2], grad_size = numbers[3], eps = numbers[4];
    float decay = 1.0f, loss = 0.0f;
    if (rows.high != nullptr) {
      decay = std::exp(numbers[5]);
      loss = std::expm1(now.log_decay + numbers[5]);
    }
    for (int64_t j = 0; j < rows.width; j += kPart) {
      const int64_t place = row * rows.width + j, n = std::min(kPart, rows.width - j);
      float* __restrict__ g = grad + j;
      float* __restrict__ mu = rows.mu + place;
      float* __restrict__ nu = rows.nu + place;
      float root[kPart], by[kPart], way[kPart];
      for (int64_t i = 0; i < n; ++i) root[i] = std::sqrt(nu[i]);
      (*now.way)(mu, now.sign, root, now.root, n, by);
      for (int64_t i = 0; i < n; ++i) {
        const float m = mu[i] * now.power1, v = nu[i] * now.power2 * now.power2;
        mu[i] = m + one_minus_b1 * (g[i] - m);
        nu[i] = v + one_minus_b2 * (g[i] * g[i] - v);
        root[i] = std::sqrt(nu[i]);
      }
      after(mu, 1.0f, root, 1.0f, n, way);
      if (rows.high != nullptr) {
        const float* value = table + place;
        for (int64_t i = 0; i < n; ++i) by[i] = decay * by[i] + loss * value[i];
      }
      for (int64_t i = 0; i < n; ++i) {
        const float move = size * mu[i] + grad_size * g[i];
        g[i] = -move / (root[i] + eps) - way[i] + by[i];
      }
    }
    rows.last[row] = rows.count + 1;
    if (rows.high != nullptr) {
      rows.high[row] = numbers[7];
      rows.low[row] = numbers[8];
    }
  }

  FOR_AVX2 void UpdateAvx2(int64_t row, float* grad) const { Update(row, grad); }
  void UpdatePlain(int64_t row, float* grad) const { Update(row, grad); }

  void operator()(int64_t row, float* grad) const {
    has_avx2 ? UpdateAvx2(row, grad) : UpdatePlain(row, grad);
  }
};

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

// The buffers of a gradient of a table: those of the results are those of the inputs.
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
  try {
    ForEachRow(pool, indices.typed_data(), indices.element_count(), num_rows, width,
               rows.typed_data(), data.typed_data(), count.typed_data(), middle);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory to sort the ids");
  }
  return ffi::Error::Success();
}

// The inputs but `factors` are the buffers of the outputs, in their order.
ffi::Error AdamRows(ffi::ThreadPool pool, Ints indices, Floats given, Floats old_mu,
                    Floats old_nu, Floats factors, int64_t num_rows, int64_t width,
                    ffi::Result<Ints> rows, ffi::Result<Floats> data,
                    ffi::Result<Floats> mu, ffi::Result<Floats> nu,
                    ffi::Result<ffi::BufferR0<ffi::S32>> count) {
  const std::string misfit =
      Misfit("mu", old_mu, num_rows, width) + Misfit("nu", old_nu, num_rows, width) +
      Misfit("new mu", *mu, num_rows, width) + Misfit("new nu", *nu, num_rows, width) +
      Misfit("factors", factors, 5, 1);
  if (!misfit.empty()) return Invalid(misfit);
  if (old_mu.typed_data() != mu->typed_data() ||
      old_nu.typed_data() != nu->typed_data()) {
    return Invalid("The kernel updates the moments in place, got other buffers.");
  }
  const float* f = factors.typed_data();
  const Adam adam{mu->typed_data(), nu->typed_data(), width, f[0], f[1], f[2],
                  f[3], f[4]};
  return Run(pool, indices, given, num_rows, width, *rows, *data, *count, adam);
}

ffi::Error SumRows(ffi::ThreadPool pool, Ints indices, Floats given, int64_t num_rows,
                   int64_t width, ffi::Result<Ints> rows, ffi::Result<Floats> data,
                   ffi::Result<ffi::BufferR0<ffi::S32>> count) {
  return Run(pool, indices, given, num_rows, width, *rows, *data, *count, Sum{});
}

// `table[indices]`. An index outside of the table reads the row that is next to it, or
// `fill` in place of a row.
ffi::Error TakeRows(ffi::ThreadPool pool, Floats table, Ints indices, int64_t num_rows,
                    int64_t width, bool clamps, float fill,
                    ffi::Result<Floats> rows) {
  constexpr int64_t kAhead = 8;  // rows to fetch ahead
  const int64_t size = indices.element_count();
  if (num_rows < 1 || width < 1) return Invalid("The kernel takes no empty table.");
  const std::string misfit = Misfit("a table", table, num_rows, width);
  if (!misfit.empty()) return Invalid(misfit);
  if (int64_t(rows->element_count()) != size * width) {
    return Invalid("The kernel returns as many rows as there are indices.");
  }
  const int32_t* index = indices.typed_data();
  const auto row = [&](int64_t k) {
    return std::clamp<int64_t>(index[k], 0, num_rows - 1);
  };
  const float* data = table.typed_data();
  float* out = rows->typed_data();
  Parallel(pool, size, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < size) {
        const float* next = data + row(k + kAhead) * width;
        for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(next + j);
      }
      if (clamps || row(k) == index[k]) {
        std::memcpy(out + k * width, data + row(k) * width, width * sizeof(float));
      } else {
        std::fill_n(out + k * width, width, fill);
      }
    }
  });
  return ffi::Error::Success();
}

// Calls of exact Adam take `(high, low, table)`, or `(high, low)`, behind the rest where
// rows decay, and nothing where they do not.
std::string Decays(const ffi::RemainingArgs& more, size_t wanted, int64_t num_rows,
                   int64_t width, std::vector<const float*>& found) {
  if (more.size() == 0) return found.resize(wanted), "";
  if (more.size() != wanted) return "The kernel takes all arrays of a decay or none. ";
  for (size_t i = 0; i < wanted; ++i) {
    const auto buffer = more.get<Floats>(i);
    if (buffer.has_error()) return buffer.error().message();
    const std::string misfit = i < 2 ? Misfit("a decay", *buffer, num_rows, 1)
                                     : Misfit("a table", *buffer, num_rows, width);
    if (!misfit.empty()) return misfit;
    found.push_back(buffer->typed_data());
  }
  return "";
}

// The inputs up to `last`, and the decays, are the buffers of the outputs.
ffi::Error ExactAdamRows(ffi::ThreadPool pool, Ints indices, Floats given,
                         Floats old_mu, Floats old_nu, Ints old_last, Floats numbers,
                         Ints steps, ffi::RemainingArgs more, int64_t num_rows,
                         int64_t width, int64_t nodes, ffi::Result<Ints> rows,
                         ffi::Result<Floats> data, ffi::Result<Floats> mu,
                         ffi::Result<Floats> nu, ffi::Result<Ints> last,
                         ffi::Result<ffi::BufferR0<ffi::S32>> count,
                         ffi::RemainingRets decays) {
  std::vector<const float*> others;
  const int64_t first = RestingRows::kNumbers, second = ExactAdam::kNumbers;
  if (nodes < 1) return Invalid("The kernel takes one node of a way at least.");
  const std::string misfit =
      Misfit("mu", old_mu, num_rows, width) + Misfit("nu", old_nu, num_rows, width) +
      Misfit("new mu", *mu, num_rows, width) + Misfit("new nu", *nu, num_rows, width) +
      Misfit("last", old_last, num_rows, 1) + Misfit("new last", *last, num_rows, 1) +
      Misfit("numbers", numbers, first + second + 3 * nodes, 1) +
      Misfit("steps", steps, 2, 1) + Decays(more, 3, num_rows, width, others);
  if (!misfit.empty()) return Invalid(misfit);
  bool in_place = old_mu.typed_data() == mu->typed_data() &&
                  old_nu.typed_data() == nu->typed_data() &&
                  old_last.typed_data() == last->typed_data() &&
                  decays.size() == (more.size() > 0 ? 2 : 0);
  float* logs[2] = {};
  for (size_t i = 0; in_place && i < decays.size(); ++i) {
    auto result = decays.get<Floats>(i);
    in_place = result.has_value() && (*result)->typed_data() == others[i] &&
               Misfit("a new decay", **result, num_rows, 1).empty();
    if (in_place) logs[i] = (*result)->typed_data();
  }
  if (!in_place) {
    return Invalid("The kernel updates the state in place, got other buffers.");
  }
  const float* n = numbers.typed_data();
  const int32_t* step = steps.typed_data();
  const RestingRows resting{mu->typed_data(), nu->typed_data(), last->typed_data(),
                            logs[0], logs[1], width, n, nodes, step[0], step[1]};
  const ExactAdam adam{resting, others[2], n + first + 2 * nodes};
  return Run(pool, indices, given, num_rows, width, *rows, *data, *count, adam);
}

// `TakeRows` of rows that are brought up to date. A row that was read shortly before is
// copied.
ffi::Error TakeRowsNow(ffi::ThreadPool pool, Floats table, Floats mu, Floats nu,
                       Ints last, Floats numbers, Ints steps, Ints indices,
                       ffi::RemainingArgs more, int64_t num_rows, int64_t width,
                       int64_t nodes, bool clamps, float fill,
                       ffi::Result<Floats> rows) {
  constexpr int64_t kAhead = 8;         // rows to fetch ahead
  constexpr int64_t kRemembered = 1024;  // rows, by the last bits of their ids
  std::vector<const float*> others;
  if (num_rows < 1 || width < 1) return Invalid("The kernel takes no empty table.");
  if (nodes < 1) return Invalid("The kernel takes one node of a way at least.");
  const std::string misfit =
      Misfit("a table", table, num_rows, width) + Misfit("mu", mu, num_rows, width) +
      Misfit("nu", nu, num_rows, width) + Misfit("last", last, num_rows, 1) +
      Misfit("numbers", numbers, RestingRows::kNumbers + 2 * nodes, 1) +
      Misfit("steps", steps, 2, 1) + Decays(more, 2, num_rows, width, others);
  if (!misfit.empty()) return Invalid(misfit);
  const int64_t size = indices.element_count();
  if (int64_t(rows->element_count()) != size * width) {
    return Invalid("The kernel returns as many rows as there are indices.");
  }
  const int32_t* step = steps.typed_data();
  const RestingRows resting{mu.typed_data(), nu.typed_data(), last.typed_data(),
                            const_cast<float*>(others[0]),
                            const_cast<float*>(others[1]), width,
                            numbers.typed_data(), nodes, step[0], step[1]};
  const auto read = HAS_AVX2 ? ReadRowAvx2 : ReadRowPlain;
  const int32_t* index = indices.typed_data();
  const auto row = [&](int64_t k) {
    return std::clamp<int64_t>(index[k], 0, num_rows - 1);
  };
  const float* data = table.typed_data();
  float* out = rows->typed_data();
  Parallel(pool, size, 2048, [&](int64_t begin, int64_t end) {
    int64_t places[kRemembered];  // where rows were read to
    std::fill_n(places, kRemembered, -1);
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < end) {
        const int64_t next = row(k + kAhead);
        resting.Prefetch(next, false);
        for (int64_t j = 0; j < width; j += 16) {
          __builtin_prefetch(data + next * width + j);
        }
      }
      int64_t& place = places[row(k) % kRemembered];
      if (!clamps && row(k) != index[k]) {
        std::fill_n(out + k * width, width, fill);
      } else if (place >= 0 && row(place) == row(k)) {
        std::memcpy(out + k * width, out + place * width, width * sizeof(float));
      } else {
        read(resting, row(k), data, out + k * width);
        place = k;
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

// All else is hidden by -fvisibility=hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(adam_rows, AdamRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Ret<Ints>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
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
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<bool>("clamps")
                                  .Attr<float>("fill")
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(exact_adam_rows, ExactAdamRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .RemainingArgs()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("nodes")
                                  .Ret<Ints>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Ints>()
                                  .Ret<ffi::BufferR0<ffi::S32>>()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(take_rows_now, TakeRowsNow,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .RemainingArgs()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("nodes")
                                  .Attr<bool>("clamps")
                                  .Attr<float>("fill")
                                  .Ret<Floats>());

#pragma GCC visibility pop
