// Bags of ids: sums of rows as they are read, and the gradients of these rows from those of
// the bags. Neither makes an array of one row for each id.

#pragma once

#include "frame.h"

namespace {

// The entries of all bags: entry k is `weights[k]` times row `ids[k]`, in bag
// `segments[k]`; out of bounds, it is in none. Without weights they are ones, without
// segments all bags have the same number of neighbours.
struct Bags {
  const int32_t* ids;
  const int32_t* segments;
  const float* weights;
  int64_t nse, num_bags;

  // What is in no bag, negative segments included, comes behind all others.
  INLINE uint32_t Segment(int64_t k) const {
    return std::min<uint32_t>(segments[k], num_bags);
  }
  INLINE float Weight(int64_t k) const { return weights == nullptr ? 1.0f : weights[k]; }
};

INLINE void LoadEight(const float* from, Eight& to) {
  std::memcpy(&to, from, sizeof(to));
}

INLINE void LoadEight(const Bfloat16* from, Eight& to) {
  using Words = uint32_t __attribute__((vector_size(32)));
  uint16_t __attribute__((vector_size(16))) x;
  std::memcpy(&x, from, sizeof(x));
  to = reinterpret_cast<Eight>(__builtin_convertvector(x, Words) << 16);
}

// Some columns of `Pool`, in registers.
template <int kEights, typename Row>
INLINE void SumColumns(const Row& row, int64_t begin, int64_t end, float* out) {
  Eight sum[kEights] = {};
  for (int64_t k = begin; k < end; ++k) {
    const auto [from, weight] = row(k);
    if (from == nullptr) continue;
#pragma GCC unroll 8
    for (int i = 0; i < kEights; ++i) {
      Eight x;
      LoadEight(from + 8 * i, x);
      sum[i] += weight * x;
    }
  }
  std::memcpy(out, sum, sizeof(sum));
}

// The sum of weighted rows, in order. `row(k)` is a pointer, or none, and a weight.
template <typename Row>
INLINE void Pool(const Row& row, int64_t begin, int64_t end, int64_t width, float* out) {
  int64_t j = 0;
  const auto part = [&](int64_t k) __attribute__((always_inline)) {
    auto [from, weight] = row(k);
    return std::pair(from == nullptr ? from : from + j, weight);
  };
  for (; j + 64 <= width; j += 64) SumColumns<8>(part, begin, end, out + j);
  if (j + 32 <= width) SumColumns<4>(part, begin, end, out + j), j += 32;
  if (j + 16 <= width) SumColumns<2>(part, begin, end, out + j), j += 16;
  if (j + 8 <= width) SumColumns<1>(part, begin, end, out + j), j += 8;
  if (j == width) return;
  std::fill(out + j, out + width, 0.0f);
  for (int64_t k = begin; k < end; ++k) {
    const auto [from, weight] = part(k);
    if (from == nullptr) continue;
    for (int64_t i = 0; i < width - j; ++i) out[j + i] += weight * Load(from[i]);
  }
}

// The weighted sum of the rows of each bag, in their order.
//
// With a width that the compiler knows, there are fewer instructions between one fetch and
// the next, so that more of them wait for memory at the same time: a sixth of the time.
template <int64_t kWidth, typename T>
void ReadBags(ffi::ThreadPool& pool, const T* table, const Bags& bags, int64_t num_rows,
              int64_t row_width, float* out) {
  constexpr int64_t kAhead = 48;  // rows to fetch ahead
  const int64_t width = kWidth > 0 ? kWidth : row_width;
  const int64_t nse = bags.nse;
  std::unique_ptr<Entry[]> order;  // by bags, if the entries are not
  if (bags.segments != nullptr) {
    int unsorted = 0;
    for (int64_t k = 1; k < nse; ++k) unsorted |= bags.Segment(k - 1) > bags.Segment(k);
    if (unsorted) order = Sorted(pool, bags.segments, nse, bags.num_bags);
  }
  const auto slot_of = [&](int64_t k) { return order ? order[k].slot : k; };
  const int64_t of_each = nse / bags.num_bags;
  const auto end_of = [&](int64_t bag) {
    if (bags.segments == nullptr) return (bag + 1) * of_each;
    int64_t begin = 0, end = nse;  // of the entries that may be the first behind the bag
    while (begin < end) {
      const int64_t k = (begin + end) / 2;
      bags.Segment(slot_of(k)) > bag ? end = k : begin = k + 1;
    }
    return begin;
  };
  const auto inside = [&](int64_t id) { return id >= 0 && id < num_rows; };
  const auto row = [&](int64_t k) __attribute__((always_inline)) {
    if (k + kAhead < nse) {
      const int64_t ahead = bags.ids[slot_of(k + kAhead)];
      if (inside(ahead)) PrefetchRow<false>(table + ahead * width, width);
    }
    const int64_t slot = slot_of(k), id = bags.ids[slot];
    return std::pair(inside(id) ? table + id * width : nullptr, bags.Weight(slot));
  };
  AdviseHugePages(out, bags.num_bags * width * sizeof(float));
  // So many bags that a part has about 1024 entries.
  const int64_t grain = 1 + 1024 * bags.num_bags / nse;
  Parallel(pool, bags.num_bags, grain, [&](int64_t begin, int64_t end) {
    int64_t k = end_of(begin - 1);
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t last = end_of(bag);
      Pool(row, k, last, width, out + bag * width);
      k = last;
    }
  });
}

// `ForEachRow` of a gradient that is known by bags: that of entry k is `weights[k]` times
// row `segments[k]` of `values`, or NaN if there is no such row. The sums of rows, and what
// `row_fn` makes of them, are written in order; `grad.data` need not be set before.
template <typename RowFn>
void ForEachRow(ffi::ThreadPool& pool, const Gradient& grad, const Bags& bags,
                const float* values, const RowFn& row_fn) {
  constexpr int64_t kAhead = 8, kRun = 512;  // entries to fetch ahead, and in a part
  const int64_t nse = grad.nse, width = grad.width;
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
    const int64_t bag = bags.Segment(entries[i].slot);
    if (bag < bags.num_bags) PrefetchRow<false>(values + bag * width, width);
    if (is_first(i)) row_fn.Prefetch(entries[i].row);
  };
  const std::vector<float> unknown(width, std::numeric_limits<float>::quiet_NaN());
  const auto value = [&](int64_t i) __attribute__((always_inline)) {
    fetch(i + kAhead);
    const int64_t slot = entries[i].slot, bag = bags.Segment(slot);
    const bool is_known = bag < bags.num_bags;
    return std::pair(is_known ? values + bag * width : unknown.data(), bags.Weight(slot));
  };
  // How many rows are in front of each part: there its own rows go.
  std::vector<int64_t> before(size / kRun + 2);
  Parallel(pool, size, kRun, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) before[begin / kRun + 1] += is_first(i);
  });
  for (size_t part = 1; part < before.size(); ++part) before[part] += before[part - 1];
  AdviseHugePages(grad.data, nse * width * sizeof(float));
  Parallel(pool, size, kRun, [&](int64_t begin, int64_t end) {
    int64_t i = begin, place = before[begin / kRun];
    while (i < end && !is_first(i)) ++i;  // of a row that another part adds up
    for (; i < end; ++place) {
      const uint32_t row = entries[i].row;
      const int64_t first = i;
      while (++i < size && !is_first(i)) {
      }
      float* data = grad.data + place * width;
      Pool(value, first, i, width, data);
      grad.rows[place] = row;
      row_fn(row, data);
    }
  });
  const int64_t count = before.back();
  *grad.count = count;
  Parallel(pool, nse - count, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t slot = count + begin; slot < count + end; ++slot) grad.Clear(slot);
  });
}

}  // namespace
