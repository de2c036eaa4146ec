// The formulas of exact Adam: stale rows that are read, or updated. The mathematics, with
// a worked example, is in `_exact_adam/remaining_update.py`.

#pragma once

#include "update.h"

#include <array>
#include <type_traits>

namespace {

constexpr int64_t kMostNodes = 64;  // of a polynomial
constexpr int64_t kPowers = 64;     // of the betas that are computed once
constexpr float kLargest = std::numeric_limits<float>::max();

// Eight numbers of a row at a time, the last ones filled up with zeros: a loop over the
// numbers of a narrow row takes longer to begin than to run.
// All that has them is inline, so that they are never passed in one way or the other.
#pragma GCC diagnostic ignored "-Wpsabi"
using Eight = float __attribute__((vector_size(32)));

template <bool kStores, typename Row>
INLINE void Copy(Eight& x, Row* row, int64_t n) {
  char* own = reinterpret_cast<char*>(&x);
  auto* other = reinterpret_cast<std::conditional_t<kStores, char*, const char*>>(row);
  const auto copy = [&](auto bytes) __attribute__((always_inline)) {
    if constexpr (kStores) std::memcpy(other, own, bytes());
    if constexpr (!kStores) std::memcpy(own, other, bytes());
    own += bytes(), other += bytes();
  };
  if (n >= 8) return copy(std::integral_constant<int, 32>());
  if (n & 4) copy(std::integral_constant<int, 16>());
  if (n & 2) copy(std::integral_constant<int, 8>());
  if (n & 1) copy(std::integral_constant<int, 4>());
}

INLINE Eight LoadEight(const float* row, int64_t n) {
  Eight x = {};
  Copy<false>(x, row, n);
  return x;
}

INLINE void StoreEight(Eight x, float* row, int64_t n) { Copy<true>(x, row, n); }

INLINE Eight Sqrt(Eight x) {
  float roots[8];
  std::memcpy(roots, &x, sizeof(x));
  for (int i = 0; i < 8; ++i) roots[i] = std::sqrt(roots[i]);
  std::memcpy(&x, roots, sizeof(x));
  return x;
}

// The remaining update of rows: `remaining_update` of `_exact_adam/remaining_update.py`.
struct Remaining {
  const float* coefficients;  // of the powers of z
  int64_t size;               // those that are not zero
  float centre;
  bool uses_roots;  // z is that of sqrt(s) and sqrt(c)

  Remaining(const float* coefficients, int64_t degree, float centre, bool uses_roots)
      : coefficients(coefficients), size(degree), centre(centre), uses_roots(uses_roots) {
    while (size > 1 && coefficients[size - 1] == 0) --size;
  }

  bool IsZero() const { return size == 1 && coefficients[0] == 0; }

  INLINE Eight operator()(Eight mu, Eight root) const {
    const Eight inverse = 1.0f / (root + centre);
    Eight z = 1.0f - 2.0f * centre * inverse;
    if (uses_roots) {
      const float half = std::sqrt(centre);
      z = 1.0f - 2.0f * half / (Sqrt(root) + half);
    }
    // Even and odd powers apart: two chains take half the time of one.
    const Eight square = z * z;
    Eight even = {}, odd = {};
    for (int64_t k = (size - 1) / 2 * 2; k >= 0; k -= 2) {
      even = even * square + coefficients[k];
      odd = odd * square + (k + 1 < size ? coefficients[k + 1] : 0.0f);
    }
    return mu * inverse * (even + z * odd);
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

// The scalars that bring a stale row up to date: `catch_up_rows` of `_exact_adam/rows.py`.
// Most rows were updated a few steps before: the powers for these are computed once.
struct Clock {
  StaleScalars scalars;
  int32_t now, values_until;
  bool decays;
  Remaining behind, ahead;
  std::array<float, kPowers> power1 = Powers(scalars.log_b1);  // of so many steps
  std::array<float, kPowers> power2 = Powers(scalars.log_q);

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
  INLINE bool HasArrived(int32_t last) const {
    if (last <= values_until) return behind.IsZero();
    const float steps = float(int64_t(now) - last);
    const float fallen = steps * (scalars.log_b1 - scalars.log_q);
    return fallen < (decays ? -64.0f : -32.0f);
  }

  INLINE float LogDecay(float high, float low) const {
    return (scalars.decay_high - high) + (scalars.decay_low - low);
  }

  INLINE Row Find(int32_t last) const {
    const int64_t steps = int64_t(now) - last;
    const bool is_known = 0 <= steps && steps < kPowers;
    // NaN for a row that is later than its table, of a state that was restored in part.
    const float passed = steps < 0 ? NAN : float(steps);
    const float p1 = is_known ? power1[steps] : std::exp(passed * scalars.log_b1);
    const float p2 = is_known ? power2[steps] : std::exp(passed * scalars.log_q);
    // A row that is stored by its value: minus the sum since then, of its stored
    // moments. Else: its remaining update, of its present moments.
    if (last <= values_until) return {&behind, p1, p2, -1.0f, 1.0f};
    return {&ahead, p1, p2, p1, p2};
  }
};

// Where in its result a lookup has a row already: the ids of a batch are of fewer rows,
// and to copy one takes a fraction of bringing it up to date. Two rows may want one place,
// which then has the later one. All threads share the places.
class Written {
 public:
  explicit Written(int64_t size) {
    while (bits_ < kMostBits && int64_t(1) << bits_ < size) ++bits_;
    places_.reset(new std::atomic<uint64_t>[int64_t(1) << bits_]());
  }

  // The slot of a row, or -1.
  INLINE int64_t Find(int64_t row) const {
    const uint64_t found = Place(row).load(std::memory_order_acquire);
    return found >> 32 == uint64_t(row) + 1 ? int64_t(uint32_t(found)) : -1;
  }

  // Says that a slot has the row, which has been written there.
  INLINE void Add(int64_t row, int64_t slot) const {
    if (slot > std::numeric_limits<uint32_t>::max()) return;
    const uint64_t own = (uint64_t(row) + 1) << 32 | uint64_t(slot);
    Place(row).store(own, std::memory_order_release);
  }

 private:
  static constexpr int kMostBits = 15;  // 256 kB

  INLINE std::atomic<uint64_t>& Place(int64_t row) const {
    return places_[uint32_t(row) * uint32_t(2654435769) >> (32 - bits_)];
  }

  int bits_ = 6;
  std::unique_ptr<std::atomic<uint64_t>[]> places_;
};

// The rows of these ids as they are now; see `CopyRows` for ids outside of the table.
struct StaleLookup {
  Clock clock;
  const float *table, *mu, *nu;
  const int32_t* last;
  const float *high, *low;  // null without weight decay
  const int32_t* ids;
  int64_t num_rows, width;
  bool clamps;
  float fill;
  float* out;
  const Written& written;

  INLINE int64_t Row(int64_t k) const {
    return std::clamp<int64_t>(ids[k], 0, num_rows - 1);
  }

  INLINE void Fetch(int64_t k) const {
    const int64_t row = Row(k), bytes = width * sizeof(float), slot = written.Find(row);
    if (slot >= 0) return Prefetch<false>(out + slot * width, bytes);
    Prefetch<false>(table + row * width, bytes);
    if (high != nullptr) __builtin_prefetch(high + row), __builtin_prefetch(low + row);
    if (clock.HasArrived(last[row])) return;
    Prefetch<false>(mu + row * width, bytes);
    Prefetch<false>(nu + row * width, bytes);
  }

  INLINE void Read(int64_t k) const {
    const int64_t row = Row(k), slot = written.Find(row);
    float* const to = out + k * width;
    if (slot >= 0) {
      std::memcpy(to, out + slot * width, width * sizeof(float));
      return;
    }
    BringUpToDate(row, to);
    written.Add(row, k);
  }

  INLINE void BringUpToDate(int64_t row, float* __restrict__ to) const {
    const float* value = table + row * width;
    const bool decays = high != nullptr;
    const float decay = decays ? std::exp(clock.LogDecay(high[row], low[row])) : 1.0f;
    for (int64_t j = 0; j < width; ++j) to[j] = decay * value[j];
    if (clock.HasArrived(last[row])) return;
    const Clock::Row now = clock.Find(last[row]);
    for (int64_t j = 0; j < width; j += 8) {
      const int64_t place = row * width + j, n = width - j;
      const Eight root = Sqrt(LoadEight(nu + place, n));
      const Eight by =
          (*now.remaining)(now.sign * LoadEight(mu + place, n), now.root * root);
      StoreEight(LoadEight(to + j, n) + by, to + j, n);
    }
  }
};

INLINE void ReadStaleRows(const StaleLookup& lookup, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 8;  // rows to fetch ahead; what tells which, twice as far
  for (int64_t k = begin - 2 * kAhead; k < end; ++k) {
    if (k + 2 * kAhead < end) __builtin_prefetch(lookup.last + lookup.Row(k + 2 * kAhead));
    if (k + kAhead >= begin && k + kAhead < end) lookup.Fetch(k + kAhead);
    if (k < begin) continue;
    if (!lookup.clamps && lookup.Row(k) != lookup.ids[k]) {
      std::fill_n(lookup.out + k * lookup.width, lookup.width, lookup.fill);
    } else {
      lookup.Read(k);
    }
  }
}

struct ExactAdamScalars {
  Clock clock;
  StepScalars step;
  Remaining after;
};

// The step of `_update_rows` of `_exact_adam/step.py`. The rows are `mu`, `nu`, `last`,
// and if values decay both of `log_decay`, and the table.
INLINE void ExactAdam(const void* scalars, int64_t width, float* __restrict__ grad,
                      float* const* state) {
  const auto& [clock, step, after] = *static_cast<const ExactAdamScalars*>(scalars);
  int32_t& last = *reinterpret_cast<int32_t*>(state[2]);
  const Clock::Row now = clock.Find(last);
  float decay = 1.0f, loss = 0.0f;
  if (clock.decays) {
    decay = std::exp(step.log_decay);
    loss = std::expm1(clock.LogDecay(*state[3], *state[4]) + step.log_decay);
  }
  for (int64_t j = 0; j < width; j += 8) {
    const int64_t n = width - j;
    const Eight g = LoadEight(grad + j, n), mu = LoadEight(state[0] + j, n);
    const Eight nu = LoadEight(state[1] + j, n);
    Eight by = (*now.remaining)(now.sign * mu, now.root * Sqrt(nu));
    const Eight m = mu * now.power1, v = nu * now.power2 * now.power2;
    // Infinity stays, and is not subtracted from itself.
    const Eight finite = v < kLargest ? v : Eight{} + kLargest;
    const Eight new_mu = m + step.one_minus_b1 * (g - m);
    const Eight new_nu = v + step.one_minus_b2 * (g * g - finite);
    const Eight root = Sqrt(new_nu);
    if (clock.decays) by = decay * by + loss * LoadEight(state[5] + j, n);
    const Eight move = step.size * new_mu + step.grad_size * g;
    StoreEight(new_mu, state[0] + j, n);
    StoreEight(new_nu, state[1] + j, n);
    StoreEight(by - move / (root + step.eps) - after(new_mu, root), grad + j, n);
  }
  last = std::min(clock.now, std::numeric_limits<int32_t>::max() - 1) + 1;
  if (clock.decays) *state[3] = step.decay_high, *state[4] = step.decay_low;
}

}  // namespace
