// Rows of a table on an NVIDIA GPU: entries are summed by row, and an optimiser's
// formula runs where the sum of a row is complete; or it runs for rows that occur once.
//
// This is no program of itself: `_cuda_source.py` puts the formula, printed from JAX,
// and the macros below around it. NVRTC compiles it, which has no headers.
//
//   DIM, VEC          columns, and how many of them a lane reads at once
//   DATA              type of the values that come in; of sums float
//   BAGS, WEIGHTS     entry k has the values `weights[k] * data[segments[k]]`, or where
//                     all bags have `BAGS` entries, those of `data[k / BAGS]`
//   PLACES            keys are places, and `rows_of[key]` is a row of the tables
//   OUT               type of what is written at each place, if anything is
//   PARAMS, ARGS      further parameters: tables and numbers; each begins with a comma
//   AHEAD             how many entries ahead values are asked for
//
// A warp, 32 lanes, holds a row: VEC columns of each 32 * VEC are a lane's. There are no
// atomic additions: two runs have the same bits.
typedef long long Int;
constexpr int PAD = 0x7fffffff;  // the key of what is no row: behind all others
constexpr int NONE = -2;         // the key of no entry
constexpr unsigned ALL = 0xffffffffu;
constexpr int V = (DIM + 32 * VEC - 1) / (32 * VEC) * VEC;
#define FOR _Pragma("unroll") for (int j = 0; j < V; ++j)
#define INLINE __device__ __forceinline__

// ---- Types that are smaller than float: computed with as float, rounded to even.

INLINE float as_float(unsigned x) { return __uint_as_float(x); }
INLINE unsigned as_bits(float x) { return __float_as_uint(x); }
#define NAN_ as_float(0x7fc00000u)
#define INF_ as_float(0x7f800000u)
INLINE constexpr unsigned power_of_two(int e) { return (unsigned)(e + 127) << 23; }

// EXP bits of exponent and MAN of mantissa. A FINITE one has no infinity, and NaN where
// all bits are set.
template <int EXP, int MAN, bool FINITE, class BITS>
struct Low {
  BITS x;
  static constexpr int BIAS = (1 << (EXP - 1)) - 1, TOP = (1 << EXP) - 1, MASK = (1 << MAN) - 1;
  static INLINE float round(float f) {
    const float a = fabsf(f);
    if (!(a < INF_)) return FINITE ? NAN_ : f;
    const int exponent = (int)(as_bits(a) >> 23) - 127;
    const int e = (exponent > 1 - BIAS ? exponent : 1 - BIAS) - MAN;  // of the last bit
    // In two factors, as 2^-e may be no float.
    const float up = as_float(power_of_two(-e / 2)), rest = as_float(power_of_two(-e - -e / 2));
    const float down = as_float(power_of_two(e / 2)), more = as_float(power_of_two(e - e / 2));
    const float r = rintf(a * up * rest) * down * more;
    constexpr int last = FINITE ? TOP - BIAS : TOP - 1 - BIAS;
    const float largest = (2.0f - (FINITE ? 2.0f : 1.0f) / (1 << MAN)) * as_float(power_of_two(last));
    return copysignf(r > largest ? (FINITE ? NAN_ : INF_) : r, f);
  }
  static INLINE Low of(float f) {
    const float r = round(f);
    const unsigned bits = as_bits(r), sign = bits >> 31 << (EXP + MAN), a = bits & 0x7fffffffu;
    const int e = (int)(a >> 23) - 127 + BIAS;
    unsigned low;
    if (a > 0x7f800000u) low = FINITE ? (TOP << MAN) | MASK : (TOP << MAN) | (1 << (MAN - 1));
    else if (a == 0x7f800000u) low = TOP << MAN;
    else if (e > 0) low = (e << MAN) | (a >> (23 - MAN) & MASK);
    else low = (unsigned)(fabsf(r) * as_float(power_of_two((BIAS + MAN - 1) / 2)) *
                          as_float(power_of_two(BIAS + MAN - 1 - (BIAS + MAN - 1) / 2)));
    return {(BITS)(sign | low)};
  }
  INLINE float get() const {
    const unsigned sign = (unsigned)(x >> (EXP + MAN) & 1) << 31, m = x & MASK, e = x >> MAN & TOP;
    if (e == TOP && (FINITE ? m == MASK : m != 0)) return NAN_;
    if (e == TOP && !FINITE) return as_float(sign | 0x7f800000u);
    if (e == 0) {
      const float f = (float)m * as_float(power_of_two((1 - BIAS - MAN) / 2)) *
                      as_float(power_of_two(1 - BIAS - MAN - (1 - BIAS - MAN) / 2));
      return as_float(as_bits(f) | sign);
    }
    return as_float(sign | (e - BIAS + 127) << 23 | m << (23 - MAN));
  }
};
typedef Low<5, 2, false, unsigned char> float8_e5m2;
typedef Low<4, 3, true, unsigned char> float8_e4m3fn;

struct bfloat16 {
  unsigned short x;
  static INLINE float round(float f) {
    const unsigned x = as_bits(f);
    return f != f ? f : as_float((x + 0x7fffu + ((x >> 16) & 1)) & 0xffff0000u);
  }
  static INLINE bfloat16 of(float f) { return {(unsigned short)(as_bits(round(f)) >> 16)}; }
  INLINE float get() const { return as_float((unsigned)x << 16); }
};

#ifdef __CUDA_ARCH__
struct float16 {
  unsigned short x;
  static INLINE float16 of(float f) {
    float16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.x) : "f"(f));
    return h;
  }
  INLINE float get() const {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
  }
  static INLINE float round(float f) { return of(f).get(); }
};
#else
typedef Low<5, 10, false, unsigned short> float16;
#endif

template <class T> INLINE auto get(T x) -> decltype(x.get()) { return x.get(); }
INLINE float get(float x) { return x; }
INLINE int get(int x) { return x; }
INLINE unsigned get(unsigned x) { return x; }
INLINE bool get(bool x) { return x; }
template <class T, class U> INLINE auto put(T& to, U x) -> decltype(T::of(x), void()) { to = T::of(x); }
INLINE void put(float& to, float x) { to = x; }
INLINE void put(int& to, int x) { to = x; }
INLINE void put(unsigned& to, unsigned x) { to = x; }
INLINE void put(bool& to, bool x) { to = x; }

// ---- Operations as XLA defines them, where C++ does otherwise or not at all.

INLINE float max_(float a, float b) { return a != a || a > b || (a == b && as_bits(b) >> 31) ? a : b; }
INLINE float min_(float a, float b) { return a != a || a < b || (a == b && as_bits(a) >> 31) ? a : b; }
template <class T> INLINE T max_(T a, T b) { return a > b ? a : b; }
template <class T> INLINE T min_(T a, T b) { return a < b ? a : b; }
INLINE float sign_(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
INLINE int sign_(int a) { return (a > 0) - (a < 0); }
INLINE unsigned sign_(unsigned a) { return a > 0; }
INLINE bool is_finite_(float x) { return (as_bits(x) & 0x7f800000u) != 0x7f800000u; }
INLINE int div_(int a, int b) { return b == 0 ? -1 : b == -1 ? (int)(0u - (unsigned)a) : a / b; }
INLINE unsigned div_(unsigned a, unsigned b) { return b == 0 ? ~0u : a / b; }
INLINE float div_(float a, float b) { return a / b; }
INLINE int rem_(int a, int b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
INLINE unsigned rem_(unsigned a, unsigned b) { return b == 0 ? a : a % b; }
INLINE float rem_(float a, float b) { return fmodf(a, b); }
template <class T> INLINE T shift_left_(T a, T b) { return (unsigned)b > 31u ? 0 : (T)((unsigned)a << b); }
template <class T> INLINE T shift_right_logical_(T a, T b) { return (unsigned)b > 31u ? 0 : (T)((unsigned)a >> b); }
INLINE int shift_right_arithmetic_(int a, int b) { return a >> ((unsigned)b > 31u ? 31 : b); }
INLINE int to_int(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? (int)0x80000000u : (int)x;
}
INLINE unsigned to_unsigned(float x) { return !(x > 0.0f) ? 0u : x >= 4294967296.0f ? ~0u : (unsigned)x; }
INLINE float logistic_(float x) { return 1.0f / (1.0f + expf(-x)); }

INLINE float add_(float a, float b) { return a + b; }
INLINE int add_(int a, int b) { return (int)((unsigned)a + (unsigned)b); }
INLINE unsigned add_(unsigned a, unsigned b) { return a + b; }
// Over the lanes; each gets the result.
template <class T> INLINE T all_sum(T x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x = add_(x, __shfl_xor_sync(ALL, x, d));
  return x;
}
template <class T> INLINE T all_max(T x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x = max_(x, __shfl_xor_sync(ALL, x, d));
  return x;
}
template <class T> INLINE T all_min(T x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x = min_(x, __shfl_xor_sync(ALL, x, d));
  return x;
}

// ---- Rows. They begin at multiples of VEC numbers, as VEC divides DIM.

INLINE int col(int lane, int j) { return (j / VEC) * (32 * VEC) + lane * VEC + j % VEC; }
template <class T> struct alignas(sizeof(T) * VEC) Pack { T x[VEC]; };

template <class T, class U> INLINE void load_row(U* to, const T* base, Int row, int lane) {
#pragma unroll
  for (int k = 0; k < V; k += VEC) {
    if (col(lane, k) < DIM) {
      const Pack<T> a = *reinterpret_cast<const Pack<T>*>(base + row * DIM + col(lane, k));
#pragma unroll
      for (int i = 0; i < VEC; ++i) to[k + i] = get(a.x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < VEC; ++i) to[k + i] = 0;
    }
  }
}
template <class T, class F> INLINE void store_row(T* base, Int row, int lane, F from) {
#pragma unroll
  for (int k = 0; k < V; k += VEC) {
    if (col(lane, k) < DIM) {
      Pack<T> a;
#pragma unroll
      for (int i = 0; i < VEC; ++i) put(a.x[i], from(k + i));
      *reinterpret_cast<Pack<T>*>(base + row * DIM + col(lane, k)) = a;
    }
  }
}

// A few numbers go to shared memory, and this lane does not wait for them.
template <class T> INLINE void copy_async(Pack<T>* to, const Pack<T>* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr int bytes = sizeof(Pack<T>);
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (bytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(bytes) : "memory");
#else
  *to = *from;
#endif
}
INLINE void end_of_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all copies but those of the last AHEAD - 1 groups.
INLINE void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
#endif
}

// ---- The formula of a row: `g` is its gradient, `place` where its change goes. Of bags
// `g` is their sum so far, to which it adds the row, times `weight`, if it `is_there`.

INLINE void formula(Int row, Int place, int lane, float* g, float weight, bool is_there PARAMS) {
  FORMULA
}

#ifdef REDUCE
// ---- Sorted entries to sums.
//
// A warp takes a chunk of the list, and adds the entries of each run, of one row, up in
// order. A run that crosses the end of a chunk belongs to the warp where it begins, if it
// has 32 entries at most: that one reads on, and the next ones leave it out. Of a longer
// one each warp writes its part to a new list, two slots a chunk, for the run that comes
// in and for the one that goes out; a slot without a sum has the key of a run that passes
// through, or PAD, so that runs stay together. The kernel runs again on that list, now
// with a part of it for each block, whose warps do the same with their lists until they
// have two slots left: what comes in from the part before, and what goes out.

struct List {
  const int* keys;
  const int* places;  // where the values of an entry are; -1 for none
  const float* data;
  const int* segments;
  const float* weights;
  bool is_of_entries;
  int size;
  int before, after;  // the keys beside it: its runs that go on there count as long
};

// How many entries behind `at` belong to a run that crosses it and is short; -1 where it
// is long. `k0` are the keys of the 32 entries from the chunk's begin on, `behind` those
// before, `k1` those after them; `at` is 0 to 32.
INLINE int crossing(int at, int behind, int k0, int k1, int* key) {
  *key = at ? __shfl_sync(ALL, k0, (at - 1) & 31) : __shfl_sync(ALL, behind, 31);
  const unsigned before = __ballot_sync(ALL, behind == *key), in = __ballot_sync(ALL, k0 == *key);
  const unsigned after = __ballot_sync(ALL, k1 == *key);
  const unsigned left = (unsigned)(((unsigned long long)in << 32 | before) >> at);
  const unsigned right = (unsigned)(((unsigned long long)after << 32 | in) >> at);
  if (*key < 0 || *key == PAD || !(right & 1)) return 0;
  const int length_left = __clz(~left), length_right = ~right ? __ffs(~right) - 1 : 32;
  return length_left + length_right <= 32 ? length_right : -1;
}

#if PLACES
#define ROW_OF(key) rows_of[key]
#else
#define ROW_OF(key) (key)
#endif

INLINE void reduce_chunk(const List& list, int c, int chunk, int lane, Pack<float>* ring, int rows,
                         const int* rows_of, int* new_keys, int* new_places, float* new_data,
                         int slot PARAMS) {
  const int start = c * chunk;
  const int size = list.size - start < chunk ? list.size - start : chunk;
  const auto key_at = [&](int i) { return i < 0 ? list.before : i < list.size ? list.keys[i] : list.after; };
  const int behind = key_at(start - 32 + lane), k0 = key_at(start + lane), k1 = key_at(start + 32 + lane);
  int head, tail;
  const int skipped = crossing(0, behind, k0, k1, &head), read_on = crossing(size, behind, k0, k1, &tail);
  const int first = skipped > 0 ? skipped : 0, limit = first < size ? size + (read_on > 0 ? read_on : 0) : 0;
  const bool is_open = skipped < 0, goes_on = read_on < 0, passes = is_open && goes_on && head == tail;

  // Of two entries each lane holds where they are, and their weights.
  const auto is_row = [&](int key) { return key >= 0 && key < rows; };
  int p0 = start + lane < list.size ? list.places[start + lane] : -1;
  int p1 = 32 + lane < limit ? list.places[start + 32 + lane] : -1;
  if (!is_row(k0)) p0 = -1;
  if (!is_row(k1)) p1 = -1;
  float w0 = 1, w1 = 1;
#if WEIGHTS
  if (list.is_of_entries) w0 = p0 < 0 ? 0 : list.weights[p0], w1 = p1 < 0 ? 0 : list.weights[p1];
#endif
#ifdef BAGS
#if BAGS
  const auto bag_of = [](int place) { return (int)((unsigned)place / (unsigned)BAGS); };
#else
  const auto bag_of = [&](int place) { return list.segments[place]; };
#endif
  if (list.is_of_entries) p0 = p0 < 0 ? -1 : bag_of(p0), p1 = p1 < 0 ? -1 : bag_of(p1);
#endif
#define OF_ENTRY(x, i) __shfl_sync(ALL, (i) < 32 ? x##0 : x##1, (i) & 31)
  const auto ask_for = [&](int i) {
    const int place = i < limit ? OF_ENTRY(p, i) : -1;
    if (place >= 0) {
#pragma unroll
      for (int k = 0; k < V; k += VEC)
        if (col(lane, k) < DIM)
          copy_async(ring + ((i % AHEAD) * V + k) / VEC * 32 + lane,
                     reinterpret_cast<const Pack<float>*>(list.data + (Int)place * DIM + col(lane, k)));
    }
    end_of_copies();
  };

  float sum[V];
  FOR sum[j] = 0;
  bool in_head = is_open;
#pragma unroll 1
  for (int i = first; i < first + AHEAD; ++i) ask_for(i);
#pragma unroll 1
  for (int i = first; i < limit; ++i) {
    wait_for_copies();
    if (OF_ENTRY(p, i) >= 0) {
      const float w = OF_ENTRY(w, i);
#pragma unroll
      for (int k = 0; k < V; k += VEC) {
        if (col(lane, k) < DIM) {
          const Pack<float> a = ring[((i % AHEAD) * V + k) / VEC * 32 + lane];
#pragma unroll
          for (int e = 0; e < VEC; ++e) sum[k + e] += WEIGHTS ? w * a.x[e] : a.x[e];
        }
      }
    }
    ask_for(i + AHEAD);
    const int key = OF_ENTRY(k, i), next = OF_ENTRY(k, i + 1);
    if (key != next || i + 1 == limit) {
      if (is_row(key)) {
        if (in_head || key == next) store_row(new_data, slot + 2 * c + !in_head, lane, [&](int j) { return sum[j]; });
        else formula(ROW_OF(key), key, lane, sum, 1.0f, true ARGS);
      }
      in_head = false;
      FOR sum[j] = 0;
    }
  }
  if (lane == 0) {
    const int at = slot + 2 * c;
    new_keys[at] = is_open ? head : PAD;
    new_places[at] = is_open ? at : -1;
    new_keys[at + 1] = goes_on ? tail : PAD;
    new_places[at + 1] = goes_on && !passes ? at + 1 : -1;
  }
}

// `from` is where the list begins in the new lists, -1 for the entries themselves, and
// `to` where the next one does. With `part` each block takes so many slots, and has
// `room` slots from `work` on for its own lists. A key from `rows` on is no row.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rows_kernel(
    const int* keys, const int* places, const float* data,
#if defined(BAGS) && !BAGS
    const int* segments,
#endif
#if WEIGHTS
    const float* weights,
#endif
#if PLACES
    const int* rows_of, const int* count,
#endif
    int* new_keys, int* new_places, float* new_data PARAMS, Int size, Int chunk, Int from, Int to,
    Int part, Int work, Int room, Int rows) {
  extern __shared__ uint4 shared_memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  Pack<float>* const ring = reinterpret_cast<Pack<float>*>(shared_memory) + warp * (AHEAD * V / VEC * 32);
  List list = {keys, places, data, nullptr, nullptr, true, (int)size, NONE, NONE};
  int slot = (int)to, room_from = (int)work;
#if defined(BAGS) && !BAGS
  list.segments = segments;
#endif
#if WEIGHTS
  list.weights = weights;
#endif
#if !PLACES
  const int* const rows_of = nullptr;
#endif
  if (part) {
    const int begin = blockIdx.x * (int)part, end = (int)(begin + part < size ? begin + part : size);
    list = {new_keys + from + begin, new_places + from + begin, new_data, nullptr, nullptr, false, end - begin,
            begin > 0 ? new_keys[from + begin - 1] : NONE, end < size ? new_keys[from + end] : NONE};
    room_from += blockIdx.x * (int)room;
    slot += blockIdx.x * 2;
  }
  while (true) {
    const int chunks = (int)((unsigned)(list.size + (int)chunk - 1) / (unsigned)chunk);
    const bool is_final = !part || chunks == 1;
    // Of entries each warp of the grid has one chunk.
#pragma unroll 1
    for (int c = part ? warp : blockIdx.x * warps + warp; c < chunks; c += part ? warps : chunks) {
#ifdef OUT
      // What no row has is zeros.
      if (!part)
        for (int i = c * (int)chunk; i < (c + 1) * (int)chunk && i < size; ++i)
          if (i >= *count) store_row(out, i, lane, [](int) { return 0.0f; });
#endif
      reduce_chunk(list, c, (int)chunk, lane, ring, (int)rows, rows_of, new_keys, new_places, new_data,
                   is_final ? slot : room_from ARGS);
    }
    if (is_final) return;
    __syncthreads();
    list = {new_keys + room_from, new_places + room_from, new_data, nullptr, nullptr, false, 2 * chunks,
            list.before, list.after};
    room_from += 2 * chunks;
  }
}
#elif defined(POOL)
// ---- Bags of rows that are computed as they are read: a warp for each.

extern "C" __global__ void __launch_bounds__(THREADS, 1) rows_kernel(
    const int* keys
#if WEIGHTS
    , const float* weights
#endif
    PARAMS, Int size, Int length, Int rows) {
  const int lane = threadIdx.x & 31;
  const Int bag = (Int)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (bag >= size) return;
  float sum[V];
  FOR sum[j] = 0;
  for (Int from = bag * length; from < (bag + 1) * length; from += 32) {
    const int count = (int)((bag + 1) * length - from < 32 ? (bag + 1) * length - from : 32);
    const int lane_key = lane < count ? keys[from + lane] : -1;
    float weight = 1;
#if WEIGHTS
    if (lane < count) weight = weights[from + lane];
#endif
    // Without a branch, so that rows which are only read are read several at once.
#pragma unroll POOL
    for (int i = 0; i < count; ++i) {
      const int key = __shfl_sync(ALL, lane_key, i);
      const bool is_there = key >= 0 && key < rows;
      formula(is_there ? key : 0, 0, lane, sum, __shfl_sync(ALL, weight, i), is_there ARGS);
    }
  }
  store_row(out, bag, lane, [&](int j) { return sum[j]; });
}
#else
// ---- Rows that occur once, or are read only: a warp for each.

extern "C" __global__ void __launch_bounds__(THREADS, 1) rows_kernel(
    const int* keys
#ifdef DATA
    , const DATA* data
#endif
    PARAMS, Int size, Int rows) {
  const int lane = threadIdx.x & 31;
  const Int i = (Int)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (i >= size) return;
  const int key = keys[i];
  if (key >= 0 && key < rows) {
    float g[V];
#ifdef DATA
    load_row(g, data, i, lane);
#endif
    formula(key, i, lane, g, 1.0f, true ARGS);
    return;
  }
#ifdef OUT
  store_row(out, i, lane, [](int) { return FILL; });
#endif
}
#endif
