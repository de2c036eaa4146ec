// The formulas of exact Adam: stale rows that are read, or updated. The mathematics, with
// a worked example, is in `_exact_adam/remaining_update.py`.

#pragma once

#include "frame.h"

namespace {

constexpr int64_t kPart = 64;  // numbers of a row that are computed at a time
constexpr int64_t kMostNodes = 64;  // of a polynomial
constexpr int64_t kPowers = 64;  // of the betas that are computed once
constexpr float kLargest = std::numeric_limits<float>::max();

// The remaining update of rows: `remaining_update` of `_exact_adam/remaining_update.py`.
//
// Far above the centre, where the roots of most rows lie, `z` is close to 1, and four
// terms of the polynomial's Taylor series in `u = 1 - z` are all that a float holds. Not
// used where `z` is that of roots.
struct Remaining {
  const float* coefficients;  // of the powers of z
  int64_t size;               // those that are not zero
  float centre;
  bool uses_roots;  // z is that of sqrt(s) and sqrt(c)
  float taylor[4] = {};  // of the powers of u
  float far;        // roots from which on these suffice

  Remaining(const float* coefficients, int64_t degree, float centre, bool uses_roots)
      : coefficients(coefficients), size(degree), centre(centre), uses_roots(uses_roots) {
    while (size > 1 && coefficients[size - 1] == 0) --size;
    FindTaylor();
  }

  bool IsZero() const { return size == 1 && coefficients[0] == 0; }

  void FindTaylor() {
    far = std::numeric_limits<float>::infinity();
    if (uses_roots) return;
    double series[kMostNodes];
    std::copy_n(coefficients, size, series);
    for (int64_t k = 0; k < size; ++k) {  // of powers of z - 1: Horner's scheme
      for (int64_t j = size - 2; j >= k; --j) series[j] += series[j + 1];
    }
    for (int64_t k = 1; k < size; k += 2) series[k] = -series[k];
    for (int64_t k = 0; k < 4; ++k) taylor[k] = k < size ? float(series[k]) : 0.0f;
    const auto left_out = [&](double u) {  // by four terms, at most
      double sum = 0.0;
      for (int64_t k = size - 1; k >= 4; --k) sum = (sum + std::abs(series[k])) * u;
      return sum * u * u * u;
    };
    double u = 2.0;
    while (u > 1e-6 && !(left_out(u) <= 0x1p-25 * std::abs(series[0]))) u *= 0.75;
    // At a root s, `u` is `2 c / (s + c)`: it is smaller at roots above `c (2 / u - 1)`.
    if (u > 1e-6) far = centre * float(2.0 / u - 1.0);
  }

  // Of `sign * mu` and `scale * root`, for at most `kPart` numbers. One loop after the
  // other, each of which a compiler vectorizes, as the number of coefficients is known
  // only here.
  INLINE void operator()(const float* __restrict__ mu, float sign,
                         const float* __restrict__ root, float scale, int64_t n,
                         float* __restrict__ update) const {
    const float c = centre;
    int32_t is_near = uses_roots;
    for (int64_t i = 0; i < n; ++i) {
      is_near |= !(root[i] * scale >= far) & (mu[i] != 0.0f);
    }
    if (!is_near) {
      const float c0 = taylor[0], c1 = taylor[1], c2 = taylor[2], c3 = taylor[3];
      for (int64_t i = 0; i < n; ++i) {
        const float inverse = 1.0f / (root[i] * scale + c), u = 2.0f * c * inverse;
        update[i] = mu[i] * sign * inverse * (((c3 * u + c2) * u + c1) * u + c0);
      }
      return;
    }
    float z[kPart], factor[kPart];
    const float half = std::sqrt(centre);
    for (int64_t i = 0; i < n; ++i) {
      const float inverse = 1.0f / (root[i] * scale + c);
      factor[i] = mu[i] * sign * inverse;
      z[i] = 1.0f - 2.0f * c * inverse;
      update[i] = 0.0f;
    }
    for (int64_t i = 0; uses_roots && i < n; ++i) {
      z[i] = 1.0f - 2.0f * half / (std::sqrt(root[i] * scale) + half);
    }
    for (int64_t k = (size - 1) / 4 * 4; k >= 0; k -= 4) {
      float a[4] = {};
      std::memcpy(a, coefficients + k, std::min<int64_t>(4, size - k) * sizeof(float));
      const float c0 = a[0], c1 = a[1], c2 = a[2], c3 = a[3];
      for (int64_t i = 0; i < n; ++i) {
        update[i] = (((update[i] * z[i] + c3) * z[i] + c2) * z[i] + c1) * z[i] + c0;
      }
    }
    for (int64_t i = 0; i < n; ++i) update[i] *= factor[i];
  }
};

// `StaleScalars` and `StepScalars` of `_calls.py`.
struct StaleScalars {
  float log_b1, log_q, centre_behind, centre_ahead, decay_high, decay_low;
};

struct StepScalars {
  float one_minus_b1, one_minus_b2, size, grad_size, eps, log_decay, centre, decay_high,
      decay_low;
};

// The state of all rows, and the scalars that bring one up to date: `catch_up_rows`
// of `_exact_adam/rows.py`. Without weight decay, `high` and `low` are null.
//
// Most rows were updated a few steps before: the powers for these are computed once.
struct StaleRows {
  float *mu, *nu;
  int32_t* last;
  float *high, *low;
  int64_t width;
  StaleScalars scalars;
  const float* polynomials;  // behind, ahead, and after the step
  int64_t degree;
  bool uses_roots;
  int32_t clock, values_until;
  Remaining behind = Polynomial(0, scalars.centre_behind);
  Remaining ahead = Polynomial(1, scalars.centre_ahead);
  std::array<float, kPowers> power1 = Powers(scalars.log_b1);  // of so many steps
  std::array<float, kPowers> power2 = Powers(scalars.log_q);

  Remaining Polynomial(int64_t i, float centre) const {
    return Remaining(polynomials + i * degree, degree, centre, uses_roots);
  }

  static std::array<float, kPowers> Powers(float log) {
    std::array<float, kPowers> powers;
    for (int64_t i = 0; i < kPowers; ++i) powers[i] = std::exp(float(i) * log);
    return powers;
  }

  struct Row {
    const Remaining* remaining;
    float power1, power2;  // of the moments
    float sign, root;      // of the moments in the remaining update
  };

  // Whether the remaining update of a row is below a rounding error of a single update,
  // so that its moments need not be read: its updates have fallen by exp(-32) since its
  // last gradient, 300 steps ago with the betas 0.9 and 0.999. Where values decay, they
  // fall as well, by less than the root of that.
  INLINE bool HasArrived(int64_t row) const {
    if (last[row] <= values_until) return behind.IsZero();
    const float fallen = float(clock - last[row]) * (scalars.log_b1 - scalars.log_q);
    return fallen < (high == nullptr ? -32.0f : -64.0f);
  }

  INLINE float LogDecay(int64_t row) const {
    if (high == nullptr) return 0.0f;
    return (scalars.decay_high - high[row]) + (scalars.decay_low - low[row]);
  }

  INLINE Row Find(int64_t row) const {
    const int64_t steps = int64_t(clock) - last[row];
    const bool is_known = 0 <= steps && steps < kPowers;
    // NaN for a row that is later than its table, of a state that was restored in part.
    const float passed = steps < 0 ? NAN : float(steps);
    const float p1 = is_known ? power1[steps] : std::exp(passed * scalars.log_b1);
    const float p2 = is_known ? power2[steps] : std::exp(passed * scalars.log_q);
    // A row that is stored by its value: minus the sum since then, of its stored
    // moments. Else: its remaining update, of its present moments.
    if (last[row] <= values_until) return {&behind, p1, p2, -1.0f, 1.0f};
    return {&ahead, p1, p2, p1, p2};
  }
};

template <int64_t kWidth>
INLINE void ReadRow(const StaleRows& rows, int64_t row, const float* table,
                    float* __restrict__ out) {
  const int64_t width = kWidth > 0 ? kWidth : rows.width;
  const float decay = std::exp(rows.LogDecay(row));
  const float* stored = table + row * width;
  if (rows.HasArrived(row)) {
    for (int64_t j = 0; j < width; ++j) out[j] = decay * stored[j];
    return;
  }
  const StaleRows::Row now = rows.Find(row);
  for (int64_t j = 0; j < width; j += kPart) {
    const int64_t place = row * width + j, n = std::min(kPart, width - j);
    const float* nu = rows.nu + place;
    const float* value = stored + j;
    float root[kPart], by[kPart];
    for (int64_t i = 0; i < n; ++i) root[i] = std::sqrt(nu[i]);
    (*now.remaining)(rows.mu + place, now.sign, root, now.root, n, by);
    if (rows.high == nullptr) {
      for (int64_t i = 0; i < n; ++i) out[j + i] = value[i] + by[i];
    } else {
      for (int64_t i = 0; i < n; ++i) out[j + i] = decay * value[i] + by[i];
    }
  }
}

// Where rows were read to, for the next ids of the same rows to copy them: of all threads,
// by a hash of the row, the newest of rows that share one. `Keep` releases what was
// written to the place, and `Find` acquires it: whoever finds a place finds its row there.
// At most 512 KB, which stay in a cache.
class Places {
 public:
  explicit Places(int64_t size) {
    while ((int64_t(1) << bits_) < size && bits_ < 16) ++bits_;
    places_.reset(new std::atomic<uint64_t>[int64_t(1) << bits_]);
    for (int64_t i = 0; i < int64_t(1) << bits_; ++i) {
      places_[i].store(~uint64_t(0), std::memory_order_relaxed);  // no row
    }
  }

  // A place of this row, or -1.
  int64_t Find(int64_t row) const {
    const uint64_t found = At(row).load(std::memory_order_acquire);
    return int64_t(found >> 32) == row ? int64_t(uint32_t(found)) : -1;
  }

  void Keep(int64_t row, int64_t place) {
    if (place > std::numeric_limits<uint32_t>::max()) return;
    At(row).store(uint64_t(row) << 32 | uint64_t(place), std::memory_order_release);
  }

 private:
  std::atomic<uint64_t>& At(int64_t row) const {
    return places_[(uint32_t(row) * 2654435769u) >> (32 - bits_)];  // Fibonacci hashing
  }

  int bits_ = 4;  // at least 1, for the shift
  std::unique_ptr<std::atomic<uint64_t>[]> places_;
};

// The rows of these ids as they are now; see `CopyRows` for ids outside of the table.
template <int64_t kWidth>
void ReadStaleRows(ffi::ThreadPool& pool, const StaleRows& rows, const float* table,
                   const int32_t* index, int64_t size, int64_t num_rows, bool clamps,
                   float fill, float* out) {
  constexpr int64_t kAhead = 8;  // rows to fetch ahead; what tells which, twice as far
  // A narrow row is computed again in less time than it is found.
  constexpr bool kKeeps = kWidth == 0 || kWidth > 8;
  const int64_t width = kWidth > 0 ? kWidth : rows.width;
  Places places(kKeeps ? size : 0);
  const auto row = [&](int64_t k) __attribute__((always_inline)) {
    return std::clamp<int64_t>(index[k], 0, num_rows - 1);
  };
  AdviseHugePages(out, size * width * sizeof(float));
  Parallel(pool, size, 2048, [&](int64_t begin, int64_t end) {
    int64_t found[kAhead];  // the places of the next ids
    const auto fetch = [&](int64_t k) __attribute__((always_inline)) {
      if (k >= end) return;
      const int64_t first = row(k) * width;
      if (kKeeps) {
        const int64_t place = found[k % kAhead] = places.Find(row(k));
        if (place >= 0) return PrefetchRow<false>(out + place * width, width);
      }
      PrefetchRow<false>(table + first, width);
      if (rows.high != nullptr) {
        __builtin_prefetch(rows.high + row(k));
        __builtin_prefetch(rows.low + row(k));
      }
      if (kKeeps && rows.HasArrived(row(k))) return;
      PrefetchRow<false>(rows.mu + first, width);
      PrefetchRow<false>(rows.nu + first, width);
    };
    // For each id: `last` is fetched 16 ids before its turn, and 8 before it what `last`
    // tells to be needed.
    for (int64_t k = begin; k < std::min(begin + 2 * kAhead, end); ++k) {
      __builtin_prefetch(rows.last + row(k));
    }
    for (int64_t k = begin; k < begin + kAhead; ++k) fetch(k);
    for (int64_t k = begin; k < end; ++k) {
      int64_t place = kKeeps ? found[k % kAhead] : -1;
      if (k + 2 * kAhead < end) __builtin_prefetch(rows.last + row(k + 2 * kAhead));
      fetch(k + kAhead);
      if (kKeeps && place < 0) place = places.Find(row(k));
      if (!clamps && row(k) != index[k]) {
        std::fill_n(out + k * width, width, fill);
      } else if (place >= 0) {
        std::memcpy(out + k * width, out + place * width, width * sizeof(float));
      } else {
        ReadRow<kWidth>(rows, row(k), table, out + k * width);
        if (kKeeps) places.Keep(row(k), k);
      }
    }
  });
}

// The step on rows with a gradient: `_update_rows` of `_exact_adam/rows.py`.
template <int64_t kWidth>
struct ExactAdam {
  static constexpr bool kInOrder = false;

  StaleRows rows;
  const float* table;    // read where rows decay
  StepScalars step;
  Remaining after = rows.Polynomial(2, step.centre);

  INLINE int64_t Width() const { return kWidth > 0 ? kWidth : rows.width; }

  INLINE void Prefetch(int64_t row) const {
    PrefetchRow<true>(rows.mu + row * Width(), Width());
    PrefetchRow<true>(rows.nu + row * Width(), Width());
    __builtin_prefetch(rows.last + row);
    if (rows.high != nullptr) {
      PrefetchRow<false>(table + row * Width(), Width());
      __builtin_prefetch(rows.high + row);
      __builtin_prefetch(rows.low + row);
    }
  }

  INLINE void operator()(int64_t row, float* grad) const {
    const StaleRows::Row now = rows.Find(row);
    float decay = 1.0f, loss = 0.0f;
    if (rows.high != nullptr) {
      decay = std::exp(step.log_decay);
      loss = std::expm1(rows.LogDecay(row) + step.log_decay);
    }
    for (int64_t j = 0; j < Width(); j += kPart) {
      const int64_t place = row * Width() + j, n = std::min(kPart, Width() - j);
      float* __restrict__ g = grad + j;
      float* __restrict__ mu = rows.mu + place;
      float* __restrict__ nu = rows.nu + place;
      float root[kPart], by[kPart], ahead[kPart];
      for (int64_t i = 0; i < n; ++i) root[i] = std::sqrt(nu[i]);
      (*now.remaining)(mu, now.sign, root, now.root, n, by);
      for (int64_t i = 0; i < n; ++i) {
        const float m = mu[i] * now.power1, v = nu[i] * now.power2 * now.power2;
        // Infinity stays, and is not subtracted from itself: by a minimum, since no loop
        // with a branch is vectorized.
        const float finite = v < kLargest ? v : kLargest;
        mu[i] = m + step.one_minus_b1 * (g[i] - m);
        nu[i] = v + step.one_minus_b2 * (g[i] * g[i] - finite);
        root[i] = std::sqrt(nu[i]);
      }
      after(mu, 1.0f, root, 1.0f, n, ahead);
      if (rows.high != nullptr) {
        const float* value = table + place;
        for (int64_t i = 0; i < n; ++i) by[i] = decay * by[i] + loss * value[i];
      }
      for (int64_t i = 0; i < n; ++i) {
        const float move = step.size * mu[i] + step.grad_size * g[i];
        g[i] = -move / (root[i] + step.eps) - ahead[i] + by[i];
      }
    }
    rows.last[row] = rows.clock + 1;
    if (rows.high != nullptr) {
      rows.high[row] = step.decay_high;
      rows.low[row] = step.decay_low;
    }
  }
};

}  // namespace
