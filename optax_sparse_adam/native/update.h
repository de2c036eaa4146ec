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

  INLINE void Fetch(int64_t k) const {
    const int64_t row = at == nullptr ? k : at[k];
    if (row < 0 || row >= size) return;
    Prefetch<false>(values + row * width, width * sizeof(T));
  }

  // Adds entry k to a sum, or begins one with it: from zero, so that there is no -0.0.
  template <bool kBegins>
  INLINE void AddTo(float* __restrict__ sum, int64_t k) const {
    const int64_t row = at == nullptr ? k : at[k];
    const float weight = weights == nullptr ? 1.0f : weights[k];
    if (row < 0 || row >= size) {
      for (int64_t j = 0; j < width; ++j) sum[j] = (kBegins ? 0.0f : sum[j]) + outside;
      return;
    }
    const T* __restrict__ value = values + row * width;
    for (int64_t j = 0; j < width; ++j) {
      sum[j] = (kBegins ? 0.0f : sum[j]) + weight * Load(value[j]);
    }
  }
};

// Makes an update of the sum of a row, in its place, and new rows of the state.
using Formula = void (*)(const void* scalars, int64_t width, float* grad,
                         float* const* state);

constexpr int kMostTables = 6;  // of a state; the places of others are null

// The update of all rows that a gradient has entries of, or without a formula their sums.
//
// The rows are in ascending order of their indices; but an update in the memory of the
// values has each row in the slot of its first entry, which saves a pass over them. The
// index of all other slots is `num_rows + slot`. In memory of its own an update is not
// written there, since few callers read that: see `Clear`.
struct Update {
  Source<float> source;
  Formula formula;  // may be null
  const void* scalars;
  int num_tables;
  Table state[kMostTables];
  int64_t nse, num_rows;
  int32_t* indices;  // of the entries, and of the update
  float* out;

  int64_t Run(ffi::ThreadPool& pool) const;

  INLINE bool IsInPlace() const { return out == source.values; }
  INLINE bool HasSlots() const { return IsInPlace() && formula != nullptr; }
};

INLINE void UpdatePart(const Update& update, const Entry* entries, int64_t size,
                       int64_t begin, int64_t end, int64_t place) {
  constexpr int64_t kAhead = 8;  // entries to fetch ahead
  const Source<float> source = update.source;
  const int64_t width = source.width;
  const bool in_place = update.IsInPlace(), has_slots = update.HasSlots();
  const auto is_first = [entries](int64_t i) {
    return i == 0 || entries[i].row != entries[i - 1].row;
  };
  const auto fetch = [&](int64_t i) __attribute__((always_inline)) {
    if (i >= size) return;
    source.Fetch(entries[i].slot);
    if (!is_first(i)) return;
    for (int t = 0; t < update.num_tables; ++t) {
      const Table& table = update.state[t];
      Prefetch<true>(table.Row(entries[i].row), table.RowBytes());
    }
  };
  std::vector<float> wide(update.num_tables * width);  // rows of bfloat16
  float* rows[kMostTables] = {};
  int64_t i = begin;
  while (i < end && !is_first(i)) ++i;  // of a row that another part adds up
  while (i < end) {
    const Entry first = entries[i];
    const int64_t to = has_slots ? first.slot : place++;
    float* const sum = update.out + (in_place ? first.slot : to) * width;
    fetch(i + kAhead);
    if (in_place) {
      for (int64_t j = 0; j < width; ++j) sum[j] += 0.0f;  // from zero: no -0.0
    } else {
      source.template AddTo<true>(sum, first.slot);
    }
    update.indices[to] = int32_t(first.row);
    for (++i; i < size && entries[i].row == first.row; ++i) {
      fetch(i + kAhead);
      const int64_t slot = entries[i].slot;
      source.template AddTo<false>(sum, slot);
      if (!has_slots) continue;
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
  }
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
      if (k + kAhead < size) {
        Prefetch<false>(data + from[k + kAhead] * width, width * sizeof(float));
      }
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

// Returns how many rows there are, where they are in order.
int64_t Update::Run(ffi::ThreadPool& pool) const {
  constexpr int64_t kRun = 512;  // entries in a part
  const int64_t width = source.width;
  const auto entries = Sorted(pool, indices, nse, num_rows);
  const Entry* padding =
      std::partition_point(entries.get(), entries.get() + nse,
                           [&](Entry entry) { return entry.row < num_rows; });
  const int64_t size = padding - entries.get();
  const auto is_first = [&](int64_t i) {
    return i == 0 || entries[i].row != entries[i - 1].row;
  };
  // How many rows are in front of each part: there its own rows go.
  std::vector<int64_t> before(size / kRun + 2);
  Parallel(pool, HasSlots() ? 0 : size, kRun, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) before[begin / kRun + 1] += is_first(i);
  });
  for (size_t part = 1; part < before.size(); ++part) before[part] += before[part - 1];
  const int64_t count = before.back();
  if (!IsInPlace()) AdviseHugePages(out, nse * width * sizeof(float));
  const auto part = FASTEST(UpdatePart);
  Parallel(pool, size, kRun, [&](int64_t begin, int64_t end) {
    part(*this, entries.get(), size, begin, end, before[begin / kRun]);
  });
  if (IsInPlace() && !HasSlots()) {
    std::vector<uint32_t> from;
    for (int64_t i = 0; i < size; ++i) {
      if (is_first(i)) from.push_back(entries[i].slot);
    }
    MoveRows(pool, out, width, from);
  }
  Parallel(pool, HasSlots() ? nse - size : nse - count, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = HasSlots() ? padding[i].slot : count + i;
      indices[slot] = int32_t(num_rows + slot);
      if (IsInPlace()) std::fill_n(out + slot * width, width, 0.0f);
    }
  });
  return count;
}

// The formulas; their scalars are those of `_calls.py`, in their order.

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
  for (int64_t j = 0; j < width; ++j) {
    const float g = sign * grad[j];
    mu[j] += one_minus_b1 * (g - mu[j]);
    nu[j] += one_minus_b2 * (g * g - nu[j]);
    grad[j] = scale * mu[j] / (std::sqrt(nu[j]) + eps);
  }
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
  for (int64_t j = 0; j < width; ++j) grad[j] = scale * (grad[j] / divisor);
  const float* value = state[1];
  for (int64_t j = 0; value != nullptr && j < width; ++j) {
    grad[j] += scale * decay * value[j];
  }
}

// `rowwise_adam`. Of `b` and `1 - b` the smaller one is the weight, that of the old value
// or that of the new one, since rounding it costs less.
struct RowwiseAdamScalars {
  float scale, eps, decay, weight1, weight2, is_old1, is_old2, correction1, correction2;
};

INLINE float Average(float old, float value, float weight, bool is_old) {
  return is_old ? value + weight * (old - value) : old + weight * (value - old);
}

INLINE void RowwiseAdam(const void* scalars, int64_t width, float* __restrict__ grad,
                        float* const* state) {
  const RowwiseAdamScalars& s = *static_cast<const RowwiseAdamScalars*>(scalars);
  float* __restrict__ mu = state[0];
  float& nu = *state[1];
  nu = Average(nu, MeanSquare(grad, width), s.weight2, s.is_old2 != 0);
  const float divisor = std::sqrt(nu / s.correction2) + s.eps;
  for (int64_t j = 0; j < width; ++j) {
    mu[j] = Average(mu[j], grad[j], s.weight1, s.is_old1 != 0);
    grad[j] = s.scale * (mu[j] / s.correction1 / divisor);
  }
  const float* value = state[2];
  for (int64_t j = 0; value != nullptr && j < width; ++j) {
    grad[j] += s.scale * s.decay * value[j];
  }
}

}  // namespace
