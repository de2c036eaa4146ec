// The formulas of exact Adam: stale rows that are read, or updated. The mathematics, with
// a worked example, is in `_exact_adam/remaining_update.py`.

#pragma once

#include "update.h"

#include <array>

namespace {

constexpr int64_t kMostNodes = 64;  // of a polynomial
constexpr int64_t kPowers = 64;     // of the betas that are computed once
constexpr float kLargest = std::numeric_limits<float>::max();

// The remaining update of rows: `remaining_update` of `_exact_adam/remaining_update.py`.
struct Remaining {
  // Of the powers of z, each sixteen times, which takes no instruction to repeat. Behind
  // those that are not zero are zeros.
  std::array<Sixteen, kMostNodes + 2> coefficients = {};
  int64_t size;  // those that are not zero
  float centre;
  bool uses_roots;  // z is that of sqrt(s) and sqrt(c)

  Remaining(const float* numbers, int64_t degree, float centre, bool uses_roots)
      : size(degree), centre(centre), uses_roots(uses_roots) {
    while (size > 1 && numbers[size - 1] == 0) --size;
    for (int64_t k = 0; k < size; ++k) coefficients[k] += numbers[k];
  }

  bool IsZero() const { return size == 1 && coefficients[0][0] == 0; }

  // Pairs of an even power and an odd one, at least two.
  int64_t Pairs() const { return std::max<int64_t>(2, (size + 1) / 2); }

  // Of so many pairs, and not of roots; with 0 pairs, of any.
  template <int kPairs, typename Floats>
  INLINE Floats Of(Floats mu, Floats root) const {
    const Floats inverse = 1.0f / (root + centre);
    Floats z = 1.0f - 2.0f * centre * inverse;
    if (kPairs == 0 && uses_roots) {
      const float half = std::sqrt(centre);
      z = 1.0f - 2.0f * half / (Sqrt(root) + half);
    }
    // Even and odd powers apart: two chains take half the time of one.
    const Floats square = z * z;
    const int64_t last = 2 * (kPairs > 0 ? kPairs : Pairs()) - 2;
    Floats even = At<Floats>(last), odd = At<Floats>(last + 1);
    for (int64_t k = last - 2; k >= 0; k -= 2) {
      even = even * square + At<Floats>(k);
      odd = odd * square + At<Floats>(k + 1);
    }
    return mu * inverse * (even + z * odd);
  }

 private:
  template <typename Floats>
  INLINE Floats At(int64_t k) const {
    Floats x;
    std::memcpy(&x, &coefficients[k], sizeof(x));
    return x;
  }
};

// Calls `body` with a constant number of pairs, so that the loop over them is unrolled: 3
// in most steps, 5 in the first fifty and for rows that hold values, with the default
// betas. Those that a polynomial does not have are zeros, which change no number.
template <typename Body>
INLINE void WithPairs(int64_t pairs, bool uses_roots, const Body& body) {
  if (uses_roots || pairs > 5) {
    body(std::integral_constant<int, 0>());
  } else if (pairs > 3) {
    body(std::integral_constant<int, 5>());
  } else {
    body(std::integral_constant<int, 3>());
  }
}

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

  INLINE void Fetch(int64_t row) const {
    const int64_t bytes = width * sizeof(float);
    Prefetch<false>(table + row * width, bytes);
    if (high != nullptr) __builtin_prefetch(high + row), __builtin_prefetch(low + row);
    if (clock.HasArrived(last[row])) return;
    Prefetch<false>(mu + row * width, bytes);
    Prefetch<false>(nu + row * width, bytes);
  }

  template <typename Wide>
  INLINE void BringUpToDate(int64_t row, float* __restrict__ to) const {
    const float* __restrict__ value = table + row * width;
    const bool decays = high != nullptr;
    const float decay = decays ? std::exp(clock.LogDecay(high[row], low[row])) : 1.0f;
    if (clock.HasArrived(last[row])) {
      for (int64_t j = 0; j < width; ++j) to[j] = decay * value[j];
      return;
    }
    const Clock::Row now = clock.Find(last[row]);
    const float* __restrict__ m = mu + row * width;
    const float* __restrict__ v = nu + row * width;
    WithPairs(now.remaining->Pairs(), now.remaining->uses_roots, [&](auto pairs) INLINED {
      ByParts<Wide>(width, [&](auto part) INLINED {
        const auto root = now.root * Sqrt(part.Load(v));
        const auto by =
            now.remaining->template Of<pairs()>(now.sign * part.Load(m), root);
        part.Store(decay * part.Load(value) + by, to);
      });
    });
  }
};

// The rows of the ids from `begin` on, whose entries are sorted: to copy a row that is
// there already takes a fraction of bringing it up to date, and rows are fetched faster in
// the order of the table.
template <typename Wide>
INLINE void ReadStaleRows(const StaleLookup& lookup, const Entry* entries, int64_t size,
                          int64_t begin) {
  constexpr int64_t kAhead = 16;  // entries to fetch ahead; what tells which, twice as far
  const int64_t num_rows = lookup.num_rows, width = lookup.width;
  const auto is_new = [=](int64_t i) {
    return i >= 0 && i < size && entries[i].row < num_rows &&
           (i == 0 || entries[i].row != entries[i - 1].row);
  };
  const float* row = nullptr;  // of the entry before
  for (int64_t i = -2 * kAhead; i < size; ++i) {
    const int64_t near = i + kAhead, far = near + kAhead;
    if (is_new(far)) __builtin_prefetch(lookup.last + entries[far].row);
    if (is_new(near)) lookup.Fetch(entries[near].row);
    if (i < 0) continue;
    const int64_t k = begin + entries[i].slot;
    float* const to = lookup.out + k * width;
    if (is_new(i)) {
      lookup.BringUpToDate<Wide>(entries[i].row, to);
      row = to;
    } else if (entries[i].row < num_rows) {
      std::memcpy(to, row, width * sizeof(float));
    } else if (lookup.clamps) {  // outside of the table
      const int64_t beside = std::clamp<int64_t>(lookup.ids[k], 0, num_rows - 1);
      lookup.BringUpToDate<Wide>(beside, to);
    } else {
      std::fill_n(to, width, lookup.fill);
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
template <typename Wide>
INLINE void ExactAdam(const void* scalars, int64_t width, float* __restrict__ grad,
                      float* const* state) {
  const auto& all = *static_cast<const ExactAdamScalars*>(scalars);
  const Clock& clock = all.clock;
  const Remaining& after = all.after;
  const StepScalars step = all.step;  // a copy, which no row that is written can be
  int32_t& last = *reinterpret_cast<int32_t*>(state[2]);
  const Clock::Row now = clock.Find(last);
  float decay = 1.0f, loss = 0.0f;
  const bool decays = clock.decays;
  if (decays) {
    decay = std::exp(step.log_decay);
    loss = std::expm1(clock.LogDecay(*state[3], *state[4]) + step.log_decay);
  }
  float *const mus = state[0], *const nus = state[1];
  const float* const values = state[5];
  const int64_t most = std::max(now.remaining->Pairs(), after.Pairs());
  WithPairs(most, after.uses_roots, [&](auto pairs) INLINED {
    ByParts<Wide>(width, [&](auto part) INLINED {
      const auto g = part.Load(grad), mu = part.Load(mus), nu = part.Load(nus);
      auto by = now.remaining->template Of<pairs()>(now.sign * mu, now.root * Sqrt(nu));
      const auto m = mu * now.power1, v = nu * now.power2 * now.power2;
      // Infinity stays, and is not subtracted from itself.
      const auto finite = v < kLargest ? v : decltype(g){} + kLargest;
      const auto new_mu = m + step.one_minus_b1 * (g - m);
      const auto new_nu = v + step.one_minus_b2 * (g * g - finite);
      const auto root = Sqrt(new_nu);
      if (decays) by = decay * by + loss * part.Load(values);
      const auto move = step.size * new_mu + step.grad_size * g;
      part.Store(new_mu, mus);
      part.Store(new_nu, nus);
      const auto rest = after.template Of<pairs()>(new_mu, root);
      part.Store(by - move / (root + step.eps) - rest, grad);
    });
  });
  last = std::min(clock.now, std::numeric_limits<int32_t>::max() - 1) + 1;
  if (decays) *state[3] = step.decay_high, *state[4] = step.decay_low;
}

}  // namespace
