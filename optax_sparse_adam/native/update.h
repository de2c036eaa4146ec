// Updates: a source adds up the entries of a row in the cache, a formula makes an update
// of the sum, with the rows of the state. Both are called once a row, through pointers
// where they differ, so that none is compiled for the other: a call takes nanoseconds, and
// a row that is fetched from memory a hundred.

#pragma once

#include "buffers.h"

namespace {

// What is added up: entry k is `weights[k]` times row `at[k]` of `values`, or `outside` if
// there is no such row. Without `at` it is row k, without weights they are ones.
template <typename T>
struct Source {
  const T* values;
  int64_t size, width;
  const int32_t* at;
  const float* weights;
  float outside;

  // The row of entry k, or null.
  INLINE const T* Find(int64_t k) const {
    const int64_t row = at == nullptr ? k : at[k];
    return row < 0 || row >= size ? nullptr : values + row * width;
  }

  INLINE float Weight(int64_t k) const { return weights == nullptr ? 1.0f : weights[k]; }

  // Fetches some columns of it.
  template <Cache kCache>
  INLINE void Fetch(int64_t k, int64_t first, int64_t count) const {
    const T* row = Find(k);
    if (row != nullptr) Prefetch<false, kCache>(row + first, count * sizeof(T));
  }

  // Adds entry k to a sum, or begins one with it: from zero, so that there is no -0.0.
  template <typename Wide, bool kBegins>
  INLINE void AddTo(float* __restrict__ sum, int64_t k) const {
    const T* __restrict__ value = Find(k);
    const float weight = value == nullptr ? 1.0f : Weight(k);
    ByParts<Wide>(width, [&](auto part) INLINED {
      using Floats = decltype(part.Load(sum));
      const Floats before = kBegins ? Floats{} : part.Load(sum);
      const Floats addend = value == nullptr ? Floats{} + outside : part.Load(value);
      part.Store(before + weight * addend, sum);
    });
  }
};

// Makes an update of the sum of a row, in its place, and new rows of the state.
using Formula = void (*)(const void* scalars, int64_t width, float* grad,
                         float* const* state);

constexpr int kMostTables = 6;  // of a state; the places of others are null

// The update of all rows that a gradient has entries of, or without a formula their sums.
//
// Where there is a `target`, the update is added to its rows. Else it goes to `indices` and
// `out`. The rows are in ascending order of their indices; but an update in the memory of
// the values has each row in the slot of its first entry, which saves a pass over them. The
// index of all other slots is `num_rows + slot`, and their rows are zeros.
struct Update {
  Source<float> source;
  Formula formula;  // may be null
  void (*part)(const Update&, int64_t size, int64_t begin, int64_t end, int64_t place);
  const void* scalars;
  int num_tables;
  Table state[kMostTables];
  Table target;  // of float32; its data may be null
  int64_t nse, num_rows;
  const Entry* entries;  // by row
  int32_t* indices;      // of the update
  float* out;

  int64_t Run(ffi::ThreadPool& pool) const;

  INLINE bool IsInPlace() const { return out == source.values; }
};

template <typename Wide>
INLINE void UpdatePart(const Update& update, int64_t size, int64_t begin, int64_t end,
                       int64_t place) {
  const Entry* const entries = update.entries;
  const Source<float> source = update.source;
  const int64_t width = source.width;
  const bool in_place = update.IsInPlace(), adds = update.target.data != nullptr;
  const auto is_first = [entries](int64_t i) {
    return i == 0 || entries[i].row != entries[i - 1].row;
  };
  const auto fetch_to = [&](auto cache, int64_t i) __attribute__((always_inline)) {
    constexpr Cache kCache = decltype(cache)::value;
    if (i >= size) return;
    source.template Fetch<kCache>(entries[i].slot, 0, width);
    if (!is_first(i)) return;
    for (int t = 0; t < update.num_tables; ++t) {
      const Table& table = update.state[t];
      Prefetch<true, kCache>(table.Row(entries[i].row), table.RowBytes());
    }
    if (!adds) return;
    Prefetch<true, kCache>(update.target.Row(entries[i].row), width * sizeof(float));
  };
  const auto fetch_behind = [&](int64_t i) __attribute__((always_inline)) {
    fetch_to(std::integral_constant<Cache, kSecondCache>(), i + 32);
    fetch_to(std::integral_constant<Cache, kFirstCache>(), i + 4);
  };
  std::vector<float> wide((update.num_tables + 1) * width);  // rows of bfloat16, a sum
  float* rows[kMostTables] = {};
  int64_t i = begin;
  while (i < end && !is_first(i)) ++i;  // of a row that another part adds up
  while (i < end) {
    const Entry first = entries[i];
    const int64_t to = in_place ? first.slot : place++;
    float* const sum = adds ? wide.data() + update.num_tables * width
                            : update.out + to * width;
    fetch_behind(i);
    if (in_place) {
      ByParts<Wide>(width, [&](auto part) INLINED {
        part.Store(part.Load(sum) + 0.0f, sum);  // from zero: no -0.0
      });
    } else {
      source.template AddTo<Wide, true>(sum, first.slot);
    }
    if (!adds) update.indices[to] = int32_t(first.row);
    for (++i; i < size && entries[i].row == first.row; ++i) {
      fetch_behind(i);
      const int64_t slot = entries[i].slot;
      source.template AddTo<Wide, false>(sum, slot);
      if (!in_place) continue;
      std::fill_n(update.out + slot * width, width, 0.0f);  // while it is in the cache
      update.indices[slot] = int32_t(update.num_rows + slot);
    }
    if (update.formula == nullptr) continue;
    for (int t = 0; t < update.num_tables; ++t) {
      const Table& table = update.state[t];
      char* row = table.Row(first.row);
      rows[t] = reinterpret_cast<float*>(row);
      if (!table.IsLow()) continue;
      rows[t] = wide.data() + t * width;
      const Bfloat16* low = reinterpret_cast<Bfloat16*>(row);
      for (int64_t j = 0; j < width; ++j) rows[t][j] = Load(low[j]);
    }
    update.formula(update.scalars, width, sum, rows);
    for (int t = 0; t < update.num_tables; ++t) {
      const Table& table = update.state[t];
      if (!table.IsLow()) continue;
      Bfloat16* low = reinterpret_cast<Bfloat16*>(table.Row(first.row));
      for (int64_t j = 0; j < width; ++j) Store(rows[t][j], low + j);
    }
    if (!adds) continue;
    float* __restrict__ target = reinterpret_cast<float*>(update.target.Row(first.row));
    ByParts<Wide>(width, [&](auto part) INLINED {
      part.Store(part.Load(target) + part.Load(sum), target);
    });
  }
}

// Returns how many rows there are, where they are in order.
int64_t Update::Run(ffi::ThreadPool& pool) const {
  constexpr int64_t kRun = 512;  // entries in a part
  const int64_t width = source.width;
  const Entry* padding = std::partition_point(
      entries, entries + nse, [&](Entry entry) { return entry.row < num_rows; });
  const int64_t size = padding - entries;
  if (target.data != nullptr) {
    Parallel(pool, size, kRun, [&](int64_t begin, int64_t end) {
      part(*this, size, begin, end, 0);
    });
    return 0;
  }
  const bool has_slots = IsInPlace() && formula != nullptr;
  // How many rows are in front of each part: there its own rows go.
  std::vector<int64_t> before(size / kRun + 2);
  Parallel(pool, has_slots ? 0 : size, kRun, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      before[begin / kRun + 1] += i == 0 || entries[i].row != entries[i - 1].row;
    }
  });
  for (size_t k = 1; k < before.size(); ++k) before[k] += before[k - 1];
  const int64_t count = before.back();
  // Sums are in order, also in the memory of the values: by way of memory of their own.
  Update update = *this;
  std::unique_ptr<float[]> sums;
  if (IsInPlace() && !has_slots) {
    sums.reset(new float[count * width]);
    update.out = sums.get();
  }
  const int64_t written = sums ? count : nse;
  if (!has_slots) AdviseHugePages(update.out, written * width * sizeof(float));
  Parallel(pool, size, kRun, [&](int64_t begin, int64_t end) {
    part(update, size, begin, end, before[begin / kRun]);
  });
  Parallel(pool, sums ? count : 0, 1024, [&](int64_t begin, int64_t end) {
    const int64_t bytes = (end - begin) * width * sizeof(float);
    std::memcpy(out + begin * width, sums.get() + begin * width, bytes);
  });
  const int64_t others = has_slots ? nse - size : nse - count;
  Parallel(pool, others, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = has_slots ? padding[i].slot : count + i;
      indices[slot] = int32_t(num_rows + slot);
      std::fill_n(out + slot * width, width, 0.0f);
    }
  });
  return count;
}

// The formulas. Their scalars are those of a NamedTuple in Python, in its order:
// `AdamScalars` in `_optimizers/sparse_adam.py`, the others in `_calls.py`. That of
// `exact_adam` is in `exact_adam.h`. All go by parts, of the size of those of their sums: a
// CPU hands on what one store has written, and waits for the cache where a load needs two.
// Parts of sixteen are for what computes more than it waits for its rows. On an EPYC with
// AVX-512 `exact_adam` takes 0.88 of the time, `sparse_adam` the same and
// `rowwise_adagrad`, of 128 columns, 1.13 times as long.

// `sparse_adam`.
struct AdamScalars {
  float sign, one_minus_b1, one_minus_b2, eps, scale;
};

INLINE void Adam(const void* scalars, int64_t width, float* __restrict__ grad,
                 float* const* state) {
  const auto [sign, one_minus_b1, one_minus_b2, eps, scale] =
      *static_cast<const AdamScalars*>(scalars);
  float* __restrict__ mu = state[0];
  float* __restrict__ nu = state[1];
  ByParts<Eight>(width, [&](auto part) INLINED {
    const auto g = sign * part.Load(grad);
    auto m = part.Load(mu), v = part.Load(nu);
    m += one_minus_b1 * (g - m);
    v += one_minus_b2 * (g * g - v);
    part.Store(m, mu), part.Store(v, nu);
    part.Store(scale * m / (Sqrt(v) + eps), grad);
  });
}

INLINE float MeanSquare(const float* x, int64_t width) {
  float sums[8] = {};  // side by side, as the compiler may not reorder a sum
  int64_t j = 0;
  for (; j + 8 <= width; j += 8) {
    for (int i = 0; i < 8; ++i) sums[i] += x[j + i] * x[j + i];
  }
  for (; j < width; ++j) sums[j % 8] += x[j] * x[j];
  for (int i = 4; i > 0; i /= 2) {
    for (int k = 0; k < i; ++k) sums[k] += sums[k + i];
  }
  return sums[0] / float(width);
}

// `rowwise_adagrad`. The row of the table is behind the state, or null.
struct RowwiseAdagradScalars {
  float scale, eps, decay;
};

INLINE void RowwiseAdagrad(const void* scalars, int64_t width, float* __restrict__ grad,
                           float* const* state) {
  const auto [scale, eps, decay] = *static_cast<const RowwiseAdagradScalars*>(scalars);
  const float total = *state[0] += MeanSquare(grad, width);
  const float divisor = std::sqrt(total) + eps;
  const float* value = state[1];
  ByParts<Eight>(width, [&](auto part) INLINED {
    auto update = scale * (part.Load(grad) / divisor);
    if (value != nullptr) update += scale * decay * part.Load(value);
    part.Store(update, grad);
  });
}

// `rowwise_adam`. Of `b` and `1 - b` the smaller one is the weight, that of the old value
// or that of the new one, since rounding it costs less.
struct RowwiseAdamScalars {
  float scale, eps, decay, weight1, weight2, is_old1, is_old2, correction1, correction2;
};

template <typename Floats>
INLINE Floats Average(Floats old, Floats value, float weight, bool is_old) {
  return is_old ? value + weight * (old - value) : old + weight * (value - old);
}

INLINE void RowwiseAdam(const void* scalars, int64_t width, float* __restrict__ grad,
                        float* const* state) {
  const RowwiseAdamScalars& s = *static_cast<const RowwiseAdamScalars*>(scalars);
  float* __restrict__ mu = state[0];
  float& nu = *state[1];
  nu = Average(nu, MeanSquare(grad, width), s.weight2, s.is_old2 != 0);
  const float divisor = std::sqrt(nu / s.correction2) + s.eps;
  const float* value = state[2];
  ByParts<Eight>(width, [&](auto part) INLINED {
    const auto m = Average(part.Load(mu), part.Load(grad), s.weight1, s.is_old1 != 0);
    auto update = s.scale * (m / s.correction1 / divisor);
    if (value != nullptr) update += s.scale * s.decay * part.Load(value);
    part.Store(m, mu), part.Store(update, grad);
  });
}

}  // namespace
