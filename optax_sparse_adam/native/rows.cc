// Lookups of rows, the sums of a row-sparse gradient, Adam and exact Adam on the rows that
// it touches, and their update of a table, for CPUs.
//
// `take_rows` copies each row as a whole, `take_rows_now` brings it up to date on the way.
// `sum_rows`, `adam_rows` and `exact_adam_rows` do what `touched_rows` and `map_rows` do in
// XLA, in one pass and in place: the gradient's buffer becomes the sums, or the update.
// They return `(rows, data, ..., count)`: the index of each slot, the sum or the update of
// its row, and how many rows are touched. `sum_rows` has the touched rows in front, in
// ascending order. The others leave each row in the slot of its first entry, which saves a
// pass over the values. All other slots are padding: the index is `num_rows + slot`, the
// values are zeros. Entries are added in their order, so that the sums are those of XLA
// bit for bit on any number of threads.
//
// A gradient is its values, one row for each index; or, with `segments`, the gradients of
// bags, of which `bags.h` adds up the rows. `read_bags` reads them. These updates are in
// ascending order of their rows, and in a buffer of their own.
//
// `add_rows` and `put_rows` write rows into a table, in place; `zeros` makes a new state.
// Tables and moments are float32 or bfloat16, those of exact Adam float32; the arithmetic
// is in float32.

#include "bags.h"
#include "exact_adam.h"
#include "frame.h"

namespace {

struct Sum {
  static constexpr bool kInOrder = true;
  void Prefetch(int64_t) const {}
  INLINE void operator()(int64_t, float*) const {}
};

// The formula of `_adam`, with moments of types that may differ.
template <typename Mu, typename Nu>
struct Adam {
  static constexpr bool kInOrder = false;
  Mu* mu;
  Nu* nu;
  int64_t width;
  float sign, one_minus_b1, one_minus_b2, eps, scale;

  INLINE void Prefetch(int64_t row) const {
    PrefetchRow<true>(mu + row * width, width);
    PrefetchRow<true>(nu + row * width, width);
  }

  INLINE void operator()(int64_t row, float* __restrict__ grad) const {
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
std::string Misfit(const Ints& indices, const Floats& given, int64_t values,
                   const Ints& rows, const Floats& data, int64_t num_rows,
                   int64_t width) {
  const int64_t nse = indices.element_count();
  if (nse < 1 || num_rows < 1 || width < 1 || num_rows + nse > kMaxRow) {
    return "The kernel takes at least one entry and one number, and ids of padding "
           "that are int32, got " + std::to_string(nse) + " entries of a table of " +
           std::to_string(num_rows) + " rows of " + std::to_string(width) +
           " numbers. ";
  }
  return Misfit("indices", indices, nse, 1) + Misfit("data", given, values, width) +
         Misfit("new indices", rows, nse, 1) + Misfit("new data", data, nse, width);
}

// Whether there is an array of one number for each entry; a word that says if its size is
// another one.
std::string Optional(const char* name, size_t found, int64_t nse) {
  if (found == 0 || int64_t(found) == nse) return "";
  return std::string("The kernel takes ") + name + " of all entries or of none. ";
}

// `segments` and `weights` are empty for a gradient with a row of values for each index.
template <typename Middle>
ffi::Error Run(ffi::ThreadPool& pool, const Ints& indices, const Floats& given,
               const Ints& segments, const Floats& weights, int64_t num_rows,
               int64_t width, Ints& rows, Floats& data, ffi::BufferR0<ffi::S32>& count,
               const Middle& middle) {
  const int64_t nse = indices.element_count();
  const bool of_bags = segments.element_count() > 0;
  const auto sizes = given.dimensions();
  const int64_t values = of_bags && sizes.size() > 0 ? sizes[0] : nse;
  const std::string misfit =
      Misfit(indices, given, values, rows, data, num_rows, width) +
      Optional("segments", segments.element_count(), nse) +
      Optional("weights", weights.element_count(), nse);
  if (!misfit.empty()) return Invalid(misfit);
  if ((given.typed_data() == data.typed_data()) == of_bags) {
    return Invalid("The kernel updates data in place, but not those of bags.");
  }
  const Gradient grad{indices.typed_data(), nse, num_rows, width, rows.typed_data(),
                      data.typed_data(),    count.typed_data()};
  const Bags bags = BagsOf(indices, segments, weights, values);
  try {
    if (of_bags) {
      ForEachRow(pool, grad, bags, given.typed_data(), middle);
    } else {
      ForEachRow(pool, grad, middle);
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory to sort the ids");
  }
  return ffi::Error::Success();
}

// The inputs but `factors` are the buffers of the outputs, in their order.
ffi::Error AdamRows(ffi::ThreadPool pool, Ints indices, Floats given, Ints segments,
                    Floats weights, Any old_mu, Any old_nu, Floats factors,
                    int64_t num_rows, int64_t width, ffi::Result<Ints> rows,
                    ffi::Result<Floats> data, ffi::Result<Any> mu, ffi::Result<Any> nu,
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
      return Run(pool, indices, given, segments, weights, num_rows, width, *rows, *data,
                 *count, adam);
    });
  });
}

ffi::Error SumRows(ffi::ThreadPool pool, Ints indices, Floats given, Ints segments,
                   Floats weights, int64_t num_rows, int64_t width,
                   ffi::Result<Ints> rows, ffi::Result<Floats> data,
                   ffi::Result<ffi::BufferR0<ffi::S32>> count) {
  return Run(pool, indices, given, segments, weights, num_rows, width, *rows, *data,
             *count, Sum{});
}

// The weighted sums of rows; `weights` may be empty. Without `segments`, all bags have
// the same number of ids.
ffi::Error ReadBagRows(ffi::ThreadPool pool, Any table, Ints indices, Ints segments,
                       Floats weights, int64_t num_rows, int64_t width,
                       ffi::Result<Floats> sums) {
  const int64_t nse = indices.element_count();
  if (num_rows < 1 || width < 1 || nse < 1 || nse > kMaxRow) {
    return Invalid("The kernel takes no empty table, and 1 to 2**31 - 1 ids.");
  }
  const auto sizes = sums->dimensions();
  const int64_t num_bags = sizes.size() > 0 ? sizes[0] : 0;
  const bool is_regular = segments.element_count() == 0;
  if (is_regular && (num_bags < 1 || nse % num_bags != 0)) {
    return Invalid("The kernel takes bags of equal lengths, or segments.");
  }
  const std::string misfit = Misfit("a table", table, num_rows, width) +
                             Misfit("sums", *sums, num_bags, width) +
                             Optional("segments", segments.element_count(), nse) +
                             Optional("weights", weights.element_count(), nse);
  if (!misfit.empty()) return Invalid(misfit);
  const Bags bags = BagsOf(indices, segments, weights, num_bags);
  try {
    return WithType(table, [&](const auto* rows) {
      ReadBags(pool, rows, bags, num_rows, width, sums->typed_data());
      return ffi::Error::Success();
    });
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory to sort the bags");
  }
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
      if (k + kAhead < size) PrefetchRow<false>(table + row(k + kAhead) * width, width);
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
                         Ints segments, Floats weights, Floats old_mu, Floats old_nu, Ints old_last, Floats numbers,
                         Ints steps, ffi::RemainingArgs more, int64_t num_rows,
                         int64_t width, int64_t nodes, ffi::Result<Ints> rows,
                         ffi::Result<Floats> data, ffi::Result<Floats> mu,
                         ffi::Result<Floats> nu, ffi::Result<Ints> last,
                         ffi::Result<ffi::BufferR0<ffi::S32>> count,
                         ffi::RemainingRets decays) {
  std::vector<const float*> others;
  const int64_t first = StaleRows::kNumbers, second = ExactAdam<0>::kNumbers;
  if (nodes < 1 || nodes > kMostNodes) {
    return Invalid("The kernel takes ways of 1 to 64 nodes.");
  }
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
  const StaleRows resting{mu->typed_data(), nu->typed_data(), last->typed_data(),
                            logs[0], logs[1], width, n, nodes, step[0], step[1]};
  ffi::Error error = ffi::Error::Success();
  WithWidth(width, [&](auto known) {
    const ExactAdam<known()> adam{resting, others[2], n + first + 2 * nodes};
    error = Run(pool, indices, given, segments, weights, num_rows, width, *rows, *data,
                *count, adam);
  });
  return error;
}

// `TakeRows` of rows that are brought up to date.
ffi::Error TakeRowsNow(ffi::ThreadPool pool, Floats table, Floats mu, Floats nu,
                       Ints last, Floats numbers, Ints steps, Ints indices,
                       ffi::RemainingArgs more, int64_t num_rows, int64_t width,
                       int64_t nodes, bool clamps, float fill,
                       ffi::Result<Floats> rows) {
  std::vector<const float*> others;
  if (num_rows < 1 || width < 1) return Invalid("The kernel takes no empty table.");
  if (nodes < 1 || nodes > kMostNodes) {
    return Invalid("The kernel takes ways of 1 to 64 nodes.");
  }
  const std::string misfit =
      Misfit("a table", table, num_rows, width) + Misfit("mu", mu, num_rows, width) +
      Misfit("nu", nu, num_rows, width) + Misfit("last", last, num_rows, 1) +
      Misfit("numbers", numbers, StaleRows::kNumbers + 2 * nodes, 1) +
      Misfit("steps", steps, 2, 1) + Decays(more, 2, num_rows, width, others);
  if (!misfit.empty()) return Invalid(misfit);
  const int64_t size = indices.element_count();
  if (int64_t(rows->element_count()) != size * width) {
    return Invalid("The kernel returns as many rows as there are indices.");
  }
  const int32_t* step = steps.typed_data();
  const StaleRows resting{mu.typed_data(), nu.typed_data(), last.typed_data(),
                            const_cast<float*>(others[0]),
                            const_cast<float*>(others[1]), width,
                            numbers.typed_data(), nodes, step[0], step[1]};
  try {
    WithWidth(width, [&](auto known) {
      ReadStaleRows<known()>(pool, resting, table.typed_data(), indices.typed_data(),
                             size, num_rows, clamps, fill, rows->typed_data());
    });
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for places");
  }
  return ffi::Error::Success();
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(adam_rows, AdamRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
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
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Ret<Ints>()
                                  .Ret<Floats>()
                                  .Ret<ffi::BufferR0<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(read_bags, ReadBagRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Ret<Floats>());

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(exact_adam_rows, ExactAdamRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    zeros, Zeros, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<Any>());

#pragma GCC visibility pop
