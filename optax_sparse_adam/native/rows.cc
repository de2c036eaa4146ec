// Rows of tables for CPUs: lookups, sums of duplicates, the optimisers' formulas on the
// rows that a gradient touches, writes.
//
// `read` copies rows as they are stored, brings them up to date (exact Adam), or adds up
// those of bags. `update` does what `touched_rows` and `map_rows` do in XLA, in one pass,
// and with the state in place: see `update.h`. Entries are added in their order, so that
// the sums are those of XLA bit for bit on any number of threads. Arithmetic is in float32.

#include "buffers.h"
#include "exact_adam.h"
#include "frame.h"
#include "gpu.h"
#include "keys.h"
#include "records.h"
#include "update.h"

namespace {

// Of rows, or bags, and entries together: their places are numbers of 32 bits.
constexpr int64_t kMostEntries = int64_t(1) << 31;

ffi::Error Invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
}

// Copies rows of numbers of type `T`, whatever these mean. An index outside of the table
// reads the row that is next to it, or in place of a row `fill`.
template <typename T>
void CopyRows(ffi::ThreadPool& pool, const void* from, const int32_t* index, int64_t size,
              int64_t num_rows, int64_t width, bool clamps, T fill, void* to) {
  const int64_t row_bytes = width * sizeof(T);
  // Rows to fetch ahead, and in a part: few, if they are long.
  const int64_t ahead = std::clamp<int64_t>(4096 / row_bytes, 1, 8);
  const int64_t grain = std::clamp<int64_t>((128 << 10) / row_bytes, 1, 256);
  const T* table = static_cast<const T*>(from);
  T* out = static_cast<T*>(to);
  const auto row = [&](int64_t k) {
    return std::clamp<int64_t>(index[k], 0, num_rows - 1);
  };
  Parallel(pool, size, grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + ahead < size) Prefetch<false>(table + row(k + ahead) * width, row_bytes);
      if (clamps || row(k) == index[k]) {
        std::memcpy(out + k * width, table + row(k) * width, row_bytes);
      } else {
        std::fill_n(out + k * width, width, fill);
      }
    }
  });
}

constexpr int64_t kMostColumns = 64;  // of a sum in registers

// The weighted sum of the rows of each bag, in their order.
template <typename T>
struct BagLookup {
  Source<T> source;
  std::unique_ptr<Entry[]> order;  // by bags, if the entries are not
  const int32_t* segments;         // null: bags of equal lengths
  int64_t nse, num_bags;
  float* out;

  INLINE int64_t Slot(int64_t k) const { return order ? order[k].slot : k; }

  // What is in no bag, negative segments included, comes behind all others.
  INLINE int64_t Segment(int64_t k) const {
    return std::min<uint32_t>(segments[k], num_bags);
  }

  INLINE int64_t End(int64_t bag) const {
    if (segments == nullptr) return (bag + 1) * (nse / num_bags);
    int64_t begin = 0, end = nse;  // of the entries that may be the first behind the bag
    while (begin < end) {
      const int64_t k = (begin + end) / 2;
      Segment(Slot(k)) > bag ? end = k : begin = k + 1;
    }
    return begin;
  }
};

// Columns [first, first + count) of the sum of entries [begin, end). Where the compiler
// knows how many columns they are, it keeps their sums in registers.
template <int64_t kCount, typename T>
INLINE void SumColumns(const BagLookup<T>& bags, int64_t begin, int64_t end, int64_t first,
                       int64_t count, float* __restrict__ out) {
  if (kCount > 0) count = kCount;
  const Source<T>& rows = bags.source;
  float sums[kMostColumns] = {};
  for (int64_t k = begin; k < end; ++k) {
    const int64_t far = k + 64, near = k + 8;  // ahead
    if (far < bags.nse) rows.template Fetch<kSecondCache>(bags.Slot(far), first, count);
    if (near < bags.nse) rows.template Fetch<kFirstCache>(bags.Slot(near), first, count);
    const T* __restrict__ row = rows.Find(bags.Slot(k));
    if (row == nullptr) continue;  // padding
    const float weight = rows.Weight(bags.Slot(k));
    for (int64_t j = 0; j < count; ++j) sums[j] += weight * Load(row[first + j]);
  }
  std::copy_n(sums, count, out + first);
}

template <typename T>
INLINE void ReadBags(const BagLookup<T>& bags, int64_t begin, int64_t end) {
  const int64_t width = bags.source.width;
  int64_t k = bags.End(begin - 1);
  for (int64_t bag = begin; bag < end; ++bag) {
    float* const out = bags.out + bag * width;
    const int64_t last = bags.End(bag);
    int64_t j = 0;
    for (; j + 64 <= width; j += 64) SumColumns<64>(bags, k, last, j, 64, out);
    for (; j + 32 <= width; j += 32) SumColumns<32>(bags, k, last, j, 32, out);
    if (j < width) SumColumns<0>(bags, k, last, j, width - j, out);
    k = last;
  }
}

template <typename T>
ffi::Error LookUpBags(ffi::ThreadPool& pool, Buffers& buffers) {
  const Table table = buffers.Rows("table", buffers.num_rows);
  const int64_t nse = std::max<int64_t>(1, buffers.Count());
  const int32_t* ids = buffers.Ints("ids", nse);
  const int32_t* segments = buffers.IntsOrNone("segments", nse);
  const float* weights = buffers.FloatsOrNone("weights", nse);
  const int64_t num_bags = std::max<int64_t>(1, buffers.ResultCount() / buffers.width);
  void* out = buffers.Result("sums", num_bags * buffers.width, ffi::F32).data;
  if (!buffers.AreRight()) return Invalid(buffers.error);
  if (segments == nullptr && nse % num_bags != 0) {
    return Invalid("The kernel takes bags of equal lengths, or segments.");
  }
  if (num_bags + nse > kMostEntries) {
    return Invalid("The kernel takes up to 2**31 bags and entries together.");
  }
  BagLookup<T> bags{{static_cast<T*>(table.data), buffers.num_rows, buffers.width, ids,
                     weights, 0.0f},
                    nullptr, segments, nse, num_bags, static_cast<float*>(out)};
  int unsorted = 0;
  for (int64_t k = 1; segments != nullptr && k < nse; ++k) {
    unsorted |= bags.Segment(k - 1) > bags.Segment(k);
  }
  if (unsorted) {
    bags.order.reset(new Entry[nse]);
    Sort(pool, segments, nse, num_bags, bags.order.get());
  }
  AdviseHugePages(out, num_bags * buffers.width * sizeof(float));
  const auto read = FASTEST(ReadBags<T>);
  // So many bags that a part has about 1024 entries.
  Parallel(pool, num_bags, 1 + 1024 * num_bags / nse,
           [&](int64_t begin, int64_t end) { read(bags, begin, end); });
  return ffi::Error::Success();
}

// The operands of exact Adam that come after its state: of all tables side by side, and
// which of them this one is, since XLA would compile a slice for each.
struct StaleOperands {
  int64_t count, degree;
  int num_polynomials;
  const float *scalars, *polynomials;
  const int32_t* steps;
  int32_t place;

  StaleOperands(Buffers& buffers, int num_polynomials)
      : count(std::max<int64_t>(1, buffers.Count() / 6)),
        num_polynomials(num_polynomials),
        scalars(buffers.Floats("stale scalars", 6 * count)) {
    degree = buffers.Count() / (num_polynomials * count);
    degree = std::clamp<int64_t>(degree, 1, kMostNodes);
    polynomials = buffers.Floats("polynomials", count * num_polynomials * degree);
    steps = buffers.Ints("steps", 2 * count);
    place = buffers.Struct<int32_t>("place", ffi::S32);
    if (place < 0 || place >= count) buffers.Fail("place", "another");
  }

  Remaining Polynomial(int64_t i, float centre, bool uses_roots) const {
    const int64_t at = place * num_polynomials + i;
    return Remaining(polynomials + at * degree, degree, centre, uses_roots);
  }

  Clock Now(bool uses_roots, bool decays) const {
    StaleScalars own;
    std::memcpy(&own, scalars + 6 * place, sizeof(own));
    return {own, steps[2 * place], steps[2 * place + 1], decays,
            Polynomial(0, own.centre_behind, uses_roots),
            Polynomial(1, own.centre_ahead, uses_roots)};
  }
};

// `fill` has the bits of a number of the table.
ffi::Error Read(ffi::ThreadPool pool, ffi::RemainingArgs args, std::string_view formula,
                int64_t num_rows, int64_t width, bool uses_roots, bool decays, bool clamps,
                int64_t fill, ffi::RemainingRets rets) try {
  Buffers buffers(args, rets, num_rows, width);
  if (formula == "bags") {
    const bool is_low = buffers.Type() == ffi::BF16;
    return is_low ? LookUpBags<Bfloat16>(pool, buffers)
                  : LookUpBags<float>(pool, buffers);
  }
  if (formula != "rows" && formula != "exact_adam") {
    return Invalid("The kernel has no such formula.");
  }
  const Table table = buffers.Rows("table", num_rows, formula == "rows");
  if (formula == "rows") {
    const int64_t size = buffers.Count();
    const int32_t* ids = buffers.Ints("ids", size);
    void* out = buffers.Result("rows", size * width, table.type).data;
    if (!buffers.AreRight()) return Invalid(buffers.error);
    AdviseHugePages(out, size * table.RowBytes());
    const auto copy = [&](auto bits) {
      CopyRows(pool, table.data, ids, size, num_rows, width, clamps, bits, out);
    };
    table.IsLow() ? copy(uint16_t(fill)) : copy(uint32_t(fill));
    return ffi::Error::Success();
  }
  const float* mu = buffers.Floats("mu", num_rows * width);
  const float* nu = buffers.Floats("nu", num_rows * width);
  const int32_t* last = buffers.Ints("last", num_rows);
  const float* high = decays ? buffers.Floats("high", num_rows) : nullptr;
  const float* low = decays ? buffers.Floats("low", num_rows) : nullptr;
  const StaleOperands stale(buffers, 2);
  const int64_t size = buffers.Count();
  const int32_t* ids = buffers.Ints("ids", size);
  void* out = buffers.Result("rows", size * width, ffi::F32).data;
  if (!buffers.AreRight()) return Invalid(buffers.error);
  const uint32_t bits = fill;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  const StaleLookup lookup{stale.Now(uses_roots, decays), static_cast<float*>(table.data),
                           mu, nu, last, high, low, ids, num_rows, width, clamps, value,
                           static_cast<float*>(out)};
  AdviseHugePages(out, size * width * sizeof(float));
  const auto read = FASTEST_OF(ReadStaleRows);
  // A part for each thread, and no larger than what `Sort` does at once.
  const int64_t part = std::clamp<int64_t>(size / pool.num_threads() + 1, 512, 8192);
  Parallel(pool, size, part, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<Entry[]> entries(new Entry[end - begin]);
    Sort(pool, ids + begin, end - begin, num_rows, entries.get());
    read(lookup, entries.get(), end - begin, begin);
  });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory to read rows");
}

template <typename T, typename U>
INLINE void AddRow(T* __restrict__ row, const U* __restrict__ value, int64_t width) {
  for (int64_t j = 0; j < width; ++j) Store(Load(row[j]) + Load(value[j]), row + j);
}

// What is written to the rows of a table: they are added up and rounded once, or put.
struct Writing {
  Table table, rows;
  const int32_t* indices;  // unique
  int64_t nse, num_rows;
  bool adds;
};

INLINE void WriteRows(const Writing& w, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 16;  // slots to fetch ahead
  const auto is_row = [&](int64_t k) {
    return k < w.nse && w.indices[k] >= 0 && w.indices[k] < w.num_rows;
  };
  for (int64_t k = begin; k < end; ++k) {
    if (is_row(k + kAhead)) {
      Prefetch<true>(w.table.Row(w.indices[k + kAhead]), w.table.RowBytes());
    }
    if (!is_row(k)) continue;
    char* row = w.table.Row(w.indices[k]);
    char* value = w.rows.Row(k);
    using Low = Bfloat16;
    if (!w.adds) {
      std::memcpy(row, value, w.table.RowBytes());
    } else if (!w.table.IsLow()) {
      float* to = reinterpret_cast<float*>(row);
      w.rows.IsLow() ? AddRow(to, reinterpret_cast<Low*>(value), w.table.width)
                     : AddRow(to, reinterpret_cast<float*>(value), w.table.width);
    } else {
      Low* to = reinterpret_cast<Low*>(row);
      w.rows.IsLow() ? AddRow(to, reinterpret_cast<Low*>(value), w.table.width)
                     : AddRow(to, reinterpret_cast<float*>(value), w.table.width);
    }
  }
}

// `table.at[indices].add(rows)`, or `.set`. Padding is dropped.
ffi::Error Write(ffi::ThreadPool& pool, bool adds, Buffers& buffers) {
  const Table table = buffers.Rows("table", buffers.num_rows);
  const int64_t nse = buffers.Count();
  const int32_t* indices = buffers.Ints("indices", nse);
  const Table rows = buffers.Rows("rows", nse);
  buffers.InPlace("table", table, buffers.num_rows);
  if (!buffers.AreRight() || (!adds && table.type != rows.type)) return Invalid(buffers.error);
  const Writing writing{table, rows, indices, nse, buffers.num_rows, adds};
  const auto write = FASTEST(WriteRows);
  Parallel(pool, nse, 1024,
           [&](int64_t begin, int64_t end) { write(writing, begin, end); });
  return ffi::Error::Success();
}

// The entries of a gradient by row, for updates of all tables that share its indices: XLA
// makes one call of equal ones.
ffi::Error Order(ffi::ThreadPool& pool, Buffers& buffers) {
  const int64_t nse = buffers.Count();
  const int32_t* indices = buffers.Ints("indices", nse);
  void* entries = buffers.Result("entries", 2 * nse, ffi::S32).data;
  if (!buffers.AreRight()) return Invalid(buffers.error);
  if (buffers.num_rows + nse > kMostEntries) {
    return Invalid("The kernel takes up to 2**31 rows and entries together.");
  }
  Sort(pool, indices, nse, buffers.num_rows, static_cast<Entry*>(entries));
  return ffi::Error::Success();
}

// Whether entries are as `Sort` makes them: by row, padding last, and each slot once. A
// part of an update begins where a row does, and writes to its rows and its slots alone:
// else it would write outside of the table, or what another part writes. It takes 1 ns an
// entry, less than half a percent of a step.
bool AreInOrder(const Entry* entries, int64_t nse, int64_t num_rows) {
  std::vector<uint64_t> seen((nse + 63) / 64);  // a bit for each slot
  uint32_t before = 0;
  bool are_right = true;
  for (int64_t i = 0; i < nse; ++i) {
    const auto [row, slot] = entries[i];
    if (slot >= nse) return false;
    uint64_t& bits = seen[slot / 64];
    const uint64_t bit = uint64_t(1) << slot % 64;
    are_right &= row >= before && (bits & bit) == 0;
    bits |= bit, before = row;
  }
  return are_right && before <= num_rows;
}

// A formula, and the operands that it has behind those of the gradient: state, which is
// updated in place, and scalars. Of the state, `r` stands for rows of float32 or bfloat16,
// `f` for rows of float32, `s` and `i` for a float32 or an int32 for each row. With weight
// decay there is more, and at last `t`, the table, which is read. A call that adds the
// update to the table has that behind the state in any case.
struct Known {
  std::string_view name, state, of_decay;
  int64_t num_scalars;
  Formula formula;
  decltype(Update::part) part;
};

const Known* Find(std::string_view name) {
  static const auto part = FASTEST(UpdatePart<Eight>);
  static const Known all[] = {
      {"sum", "", "", 0, nullptr, part},
      {"adam", "rr", "", 5, FASTEST(Adam), part},
      {"exact_adam", "ffi", "sst", 9, FASTEST_OF(ExactAdam), FASTEST_OF(UpdatePart)},
      {"rowwise_adagrad", "s", "t", 3, FASTEST(RowwiseAdagrad), part},
      {"rowwise_adam", "rs", "t", 9, FASTEST(RowwiseAdam), part},
  };
  for (const Known& known : all) {
    if (known.name == name) return &known;
  }
  return nullptr;
}

ffi::Error UpdateRows(ffi::ThreadPool pool, ffi::RemainingArgs args,
                      std::string_view formula, int64_t num_rows, int64_t width,
                      bool uses_roots, bool decays, bool adds,
                      ffi::RemainingRets rets) try {
  Buffers buffers(args, rets, num_rows, width);
  if (formula == "add" || formula == "put") return Write(pool, formula == "add", buffers);
  if (formula == "order") return Order(pool, buffers);
  const Known* known = Find(formula);
  if (known == nullptr) return Invalid("The kernel has no such formula.");
  Update update = {};
  update.num_rows = num_rows, update.nse = buffers.Count() / 2;
  const int32_t* entries = buffers.Ints("entries", 2 * update.nse);
  update.entries = reinterpret_cast<const Entry*>(entries);
  const int64_t size = buffers.Count() / std::max<int64_t>(1, width);
  const float* values = buffers.Floats("values", size * width);
  const int32_t* segments = buffers.IntsOrNone("segments", update.nse);
  const float* weights = buffers.FloatsOrNone("weights", update.nse);
  const float unknown = std::numeric_limits<float>::quiet_NaN();
  update.source = {values, size, width, segments, weights, unknown};
  std::string state(known->state);
  if (decays) state += known->of_decay;
  for (const char letter : state) {
    Table& table = update.state[update.num_tables++];
    table = letter == 's'   ? buffers.Scalars("state", ffi::F32)
            : letter == 'i' ? buffers.Scalars("state", ffi::S32)
                            : buffers.Rows("state", num_rows, letter == 'r');
  }
  const bool is_sum = known->formula == nullptr;
  adds &= !is_sum;
  if (adds) {
    const bool is_read = decays && !known->of_decay.empty();
    update.target = is_read ? update.state[update.num_tables - 1]
                            : buffers.Rows("table", num_rows, false);
  }
  std::unique_ptr<StaleOperands> stale;
  if (formula == "exact_adam") stale = std::make_unique<StaleOperands>(buffers, 3);
  const int64_t num_scalars = known->num_scalars * (stale ? stale->count : 1);
  const float* scalars = buffers.Floats("scalars", num_scalars);
  if (!adds) {
    update.indices =
        static_cast<int32_t*>(buffers.Result("indices", update.nse, ffi::S32).data);
    update.out =
        static_cast<float*>(buffers.Result("rows", update.nse * width, ffi::F32).data);
  }
  void* count = is_sum ? buffers.Result("count", 1, ffi::S32).data : nullptr;
  for (size_t t = 0; t < state.size(); ++t) {
    const Table& table = update.state[t];
    if (state[t] != 't') buffers.InPlace("state", table, num_rows);
  }
  if (adds) buffers.InPlace("table", update.target, num_rows);
  if (!buffers.AreRight()) return Invalid(buffers.error);
  if (num_rows + update.nse > kMostEntries ||
      !AreInOrder(update.entries, update.nse, num_rows)) {
    return Invalid("The kernel takes entries as `order` makes them.");
  }
  if (segments == nullptr ? size != update.nse : update.IsInPlace()) {
    return Invalid("The kernel takes a row of values for each index, or segments.");
  }
  update.formula = known->formula, update.part = known->part;
  update.scalars = scalars;
  std::unique_ptr<ExactAdamScalars> exact;
  if (stale) {
    StepScalars step;
    std::memcpy(&step, scalars + stale->place * known->num_scalars, sizeof(step));
    exact.reset(new ExactAdamScalars{stale->Now(uses_roots, decays), step,
                                     stale->Polynomial(2, step.centre, uses_roots)});
    update.scalars = exact.get();
  }
  const int64_t num_touched = update.Run(pool);
  if (is_sum) *static_cast<int32_t*>(count) = int32_t(num_touched);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for an update of rows");
}

// Zeros for a new state, in huge pages.
ffi::Error Zeros(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer> zeros) try {
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
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for zeros");
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
                                  .Attr<bool>("uses_roots")
                                  .Attr<bool>("decays")
                                  .Attr<bool>("clamps")
                                  .Attr<int64_t>("fill")
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(update_rows, UpdateRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Attr<std::string_view>("formula")
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<bool>("uses_roots")
                                  .Attr<bool>("decays")
                                  .Attr<bool>("adds")
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    zeros, Zeros, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>());

// Called through ctypes by `_records.py`, which checks all that it passes.
extern "C" void take_records(char* table, int64_t bytes, const int64_t* rows, int64_t size,
                             const Field* fields, int64_t count, int64_t threads) {
  CopyInThreads<false>(table, bytes, rows, {fields, count}, size, threads);
}

extern "C" void put_records(char* table, int64_t bytes, const int64_t* rows, int64_t size,
                            const Field* fields, int64_t count, int64_t threads) {
  CopyInThreads<true>(table, bytes, rows, {fields, count}, size, threads);
}

#pragma GCC visibility pop
