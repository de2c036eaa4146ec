// Rows of tables for CPUs: lookups, sums of duplicates, Adam and exact Adam on the rows
// that a gradient touches, writes. `buffers.h` lists the calls and their buffers.
//
// `read` copies rows as they are stored, brings them up to date (exact Adam), or adds up
// those of bags. `update` does what `touched_rows` and `map_rows` do in XLA, in one pass and
// in place: the gradient's buffer becomes the sums, or the update. `sum` has the touched
// rows in front, in ascending order. The others leave each row in the slot of its first
// entry, which saves a pass over the values. All other slots are padding: the index is
// `num_rows + slot`, the values are zeros. Entries are added in their order, so that the
// sums are those of XLA bit for bit on any number of threads.
//
// A gradient is its values, one row for each index; or, with `segments`, the gradients of
// bags, of which `bags.h` adds up the rows. These updates are in ascending order of their
// rows, and in a buffer of their own. Arithmetic is in float32.

#include "bags.h"
#include "buffers.h"
#include "exact_adam.h"
#include "frame.h"

namespace {

ffi::Error Invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
}

struct Sum {
  static constexpr bool kInOrder = true;
  void Prefetch(int64_t) const {}
  INLINE void operator()(int64_t, float*) const {}
};

// `StepScalars` of `_optimizers/sparse_adam.py`.
struct AdamScalars {
  float sign, one_minus_b1, one_minus_b2, eps, scale;
};

// The formula of `_adam`, with moments of types that may differ.
template <typename Mu, typename Nu>
struct Adam {
  static constexpr bool kInOrder = false;
  Mu* mu;
  Nu* nu;
  int64_t width;
  AdamScalars scalars;

  INLINE void Prefetch(int64_t row) const {
    PrefetchRow<true>(mu + row * width, width);
    PrefetchRow<true>(nu + row * width, width);
  }

  INLINE void operator()(int64_t row, float* __restrict__ grad) const {
    const auto [sign, one_minus_b1, one_minus_b2, eps, scale] = scalars;
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

// Calls `function` with a null pointer to the type of a table.
template <typename Function>
void WithType(ffi::DataType type, const Function& function) {
  if (type == ffi::BF16) return function(static_cast<Bfloat16*>(nullptr));
  function(static_cast<float*>(nullptr));
}

Bags BagsOf(const Buffers& buffers, const char* ids, int64_t num_bags) {
  return {buffers.Get<int32_t>(ids), buffers.Get<int32_t>("segments"),
          buffers.Get<float>("weights"), buffers['E'], num_bags};
}

StaleRows StaleRowsOf(const Buffers& buffers, bool uses_roots) {
  const auto steps = buffers.Struct<std::array<int32_t, 2>>("steps");
  return {buffers.Get<float>("mu"), buffers.Get<float>("nu"), buffers.Get<int32_t>("last"),
          buffers.Get<float>("high"), buffers.Get<float>("low"), buffers['W'],
          buffers.Struct<StaleScalars>("scalars"), buffers.Get<float>("polynomials"),
          buffers['C'], uses_roots, steps[0], steps[1]};
}

// Copies rows of numbers of type `T`, whatever these mean. An index outside of the table
// reads the row that is next to it, or in place of a row `fill`.
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
      if (k + kAhead < size) PrefetchRow<false>(table + row(k + kAhead) * width, width);
      if (clamps || row(k) == index[k]) {
        std::memcpy(out + k * width, table + row(k) * width, width * sizeof(T));
      } else {
        std::fill_n(out + k * width, width, fill);
      }
    }
  });
}

// `fill` has the bits of a number of the table.
ffi::Error Read(ffi::ThreadPool pool, ffi::RemainingArgs args, std::string_view formula,
                int64_t num_rows, int64_t width, int64_t degree, bool uses_roots,
                bool clamps, int64_t fill, ffi::RemainingRets rets) {
  const Buffers buffers("read", formula, args, rets, num_rows, width, degree);
  if (!buffers.error.empty()) return Invalid(buffers.error);
  const int32_t* ids = buffers.Get<int32_t>("ids");
  try {
    if (formula == "bags") {
      const Bags bags = BagsOf(buffers, "ids", buffers['B']);
      if (!bags.segments && bags.nse % bags.num_bags != 0) {
        return Invalid("The kernel takes bags of equal lengths, or segments.");
      }
      WithType(buffers.Type('t'), [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        WithWidth<16, 32, 64, 128>(width, [&](auto known) {
          ReadBags<known()>(pool, buffers.Get<T>("table"), bags, num_rows, width,
                            buffers.Get<float>("sums", true));
        });
      });
      return ffi::Error::Success();
    }
    const auto copy = [&](auto bits) {
      using T = decltype(bits);
      CopyRows(pool, buffers.Get<T>("table"), ids, buffers['K'], num_rows, width, clamps,
               bits, buffers.Get<T>("rows", true));
      return ffi::Error::Success();
    };
    if (formula == "rows" && buffers.Type('t') == ffi::BF16) return copy(uint16_t(fill));
    if (formula == "rows") return copy(uint32_t(fill));
    if (bool(buffers.Get<float>("high")) != bool(buffers.Get<float>("low")) ||
        degree > kMostNodes) {
      return Invalid("The kernel takes both parts of a decay, and 64 coefficients at most.");
    }
    const StaleRows rows = StaleRowsOf(buffers, uses_roots);
    const uint32_t bits = fill;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    // Loops over so few numbers take longer to begin than to run.
    WithWidth<3, 4, 8, 16>(width, [&](auto known) {
      ReadStaleRows<known()>(pool, rows, buffers.Get<float>("table"), ids, buffers['K'],
                             num_rows, clamps, value, buffers.Get<float>("rows", true));
    });
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory to read rows");
  }
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
        PrefetchRow<true>(table + indices[k + kAhead] * width, width);
      }
      if (inside(k)) write(table + indices[k] * width, values + k * width);
    }
  });
}

// `table.at[indices].add(values)`, each sum rounded once, or `.set`. Padding is dropped.
ffi::Error Write(ffi::ThreadPool& pool, bool adds, const Buffers& buffers) {
  const int64_t width = buffers['W'];
  WithType(buffers.Type('t'), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto write = [&](const auto* values, const auto& write_row) {
      WriteRows(pool, buffers.Get<T>("table"), buffers.Get<int32_t>("indices"), values,
                buffers['E'], buffers['N'], width, write_row);
    };
    if (!adds) {
      return write(buffers.Get<T>("rows"), [width](T* row, const T* value) {
        std::memcpy(row, value, width * sizeof(T));
      });
    }
    WithType(buffers.Type('u'), [&](auto* type) {
      using U = std::remove_pointer_t<decltype(type)>;
      write(buffers.Get<U>("rows"), [width](T* __restrict__ row, const U* __restrict__ value) {
        for (int64_t j = 0; j < width; ++j) Store(Load(row[j]) + Load(value[j]), row + j);
      });
    });
  });
  return ffi::Error::Success();
}

ffi::Error Update(ffi::ThreadPool pool, ffi::RemainingArgs args, std::string_view formula,
                  int64_t num_rows, int64_t width, int64_t degree, bool uses_roots,
                  ffi::RemainingRets rets) {
  const Buffers buffers("update", formula, args, rets, num_rows, width, degree);
  if (!buffers.error.empty()) return Invalid(buffers.error);
  if (formula == "add" || formula == "put") return Write(pool, formula == "add", buffers);
  const float* given = buffers.Get<float>("data");
  const Bags bags = BagsOf(buffers, "indices", buffers['V']);
  const bool of_bags = bags.segments != nullptr;
  const Gradient grad{bags.ids, bags.nse, num_rows, width,
                      buffers.Get<int32_t>("indices", true),
                      buffers.Get<float>("sums", true),
                      buffers.Get<int32_t>("count", true)};
  if (num_rows + grad.nse > kMaxRow) {
    return Invalid("The kernel takes ids of padding that are int32, got too many rows.");
  }
  if (!of_bags && (bags.num_bags != bags.nse || given != grad.data)) {
    return Invalid("The kernel updates data in place, and takes a row for each index.");
  }
  if (of_bags && given == grad.data) {
    return Invalid("The kernel updates data in place, but not those of bags.");
  }
  const auto run = [&](const auto& row_fn) {
    of_bags ? ForEachRow(pool, grad, bags, given, row_fn) : ForEachRow(pool, grad, row_fn);
  };
  try {
    if (formula == "sum") {
      run(Sum{});
    } else if (formula == "adam") {
      WithType(buffers.Type('t'), [&](auto* mu) {
        WithType(buffers.Type('u'), [&](auto* nu) {
          using Mu = std::remove_pointer_t<decltype(mu)>;
          using Nu = std::remove_pointer_t<decltype(nu)>;
          run(Adam<Mu, Nu>{buffers.Get<Mu>("mu"), buffers.Get<Nu>("nu"), width,
                           buffers.Struct<AdamScalars>("scalars")});
        });
      });
    } else {
      const float* table = buffers.Get<float>("table");
      if (bool(table) != bool(buffers.Get<float>("high")) ||
          bool(table) != bool(buffers.Get<float>("low")) || degree > kMostNodes) {
        return Invalid("The kernel takes all arrays of a decay, and 64 coefficients at most.");
      }
      const StaleRows rows = StaleRowsOf(buffers, uses_roots);
      const auto step = buffers.Struct<StepScalars>("step");
      WithWidth<3, 4, 8, 16>(width, [&](auto known) {
        run(ExactAdam<known()>{rows, table, step});
      });
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory to sort the ids");
  }
  return ffi::Error::Success();
}

// Zeros for a new state, in huge pages.
ffi::Error Zeros(ffi::ThreadPool pool, ffi::Result<Any> zeros) {
  const auto type = zeros->element_type();
  // Of numbers of four bits XLA has two in a byte.
  if (type != ffi::F64 && type != ffi::F32 && type != ffi::F16 && type != ffi::BF16 &&
      type != ffi::S32) {
    return Invalid("The kernel makes zeros of float64, float32, float16, bfloat16, int32.");
  }
  char* data = static_cast<char*>(zeros->untyped_data());
  const int64_t bytes = zeros->size_bytes();
  AdviseHugePages(data, bytes);
  Parallel(pool, bytes, 8 << 20, [&](int64_t begin, int64_t end) {
    std::memset(data + begin, 0, end - begin);
  });
  return ffi::Error::Success();
}

}  // namespace

// All else is hidden by -fvisibility=hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(read_rows, Read,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Attr<std::string_view>("formula")
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("degree")
                                  .Attr<bool>("uses_roots")
                                  .Attr<bool>("clamps")
                                  .Attr<int64_t>("fill")
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(update_rows, Update,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Attr<std::string_view>("formula")
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("degree")
                                  .Attr<bool>("uses_roots")
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    zeros, Zeros, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<Any>());

#pragma GCC visibility pop
