// What a CUDA source needs to run on a CPU, to test it: each thread of a block is a fibre
// of its own, and they take turns where they wait for each other. So votes, shuffles and
// barriers are those of the source, and what a lane does that it should not shows.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

using std::copysign;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // of the one block that runs

struct uint3_ { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static uint3_ threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done;
};
constexpr size_t kStack = 256 << 10;
static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static size_t current;
static std::vector<uint64_t> slots;  // what each thread shows to others
static std::function<void()> body;
static const char* where = nullptr;

inline void wait() {
  const unsigned x = threadIdx.x;
  swapcontext(&fibres[current].context, &scheduler);
  threadIdx.x = x;
}

// All threads that are not done come by here, or the source is wrong.
static std::vector<const char*> waits;
inline void meet(const char* what) {
  waits[current] = what;
  wait();
}

inline void run_fibre() {
  body();
  fibres[current].is_done = true;
  swapcontext(&fibres[current].context, &scheduler);
}

inline void run_block(unsigned threads, std::function<void()> function) {
  body = std::move(function);
  if (fibres.size() < threads) fibres.resize(threads);
  slots.assign(threads, 0);
  waits.assign(threads, nullptr);
  for (unsigned t = 0; t < threads; ++t) {
    Fibre& f = fibres[t];
    if (!f.stack) f.stack.reset(new char[kStack]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    f.is_done = false;
    makecontext(&f.context, run_fibre, 0);
  }
  // A warp goes on until all of its lanes are at a barrier of the block, or done.
  bool is_running = true;
  while (is_running) {
    is_running = false;
    for (unsigned first = 0; first < threads; first += 32) {
      while (true) {
        const char* what = nullptr;
        unsigned left = 0;
        for (unsigned t = first; t < first + 32 && t < threads; ++t) {
          if (fibres[t].is_done) continue;
          current = t;
          threadIdx.x = t;
          swapcontext(&scheduler, &fibres[t].context);
          if (fibres[t].is_done) continue;
          ++left;
          if (what && strcmp(what, waits[t])) {
            fprintf(stderr, "lanes of a warp wait at %s and %s\n", what, waits[t]);
            abort();
          }
          what = waits[t];
        }
        if (!left) break;
        if (left < 32 && strcmp(what, "block")) {
          fprintf(stderr, "%u lanes of a warp wait at %s\n", left, what);
          abort();
        }
        if (!strcmp(what, "block")) {
          is_running = true;
          break;
        }
      }
    }
  }
}

template <class T>
inline uint64_t bits(T x) {
  uint64_t b = 0;
  static_assert(sizeof(T) <= 8);
  memcpy(&b, &x, sizeof(T));
  return b;
}

// The value that the lane `from` of this warp shows.
template <class T>
inline T show(const char* what, T x, unsigned from) {
  const unsigned t = threadIdx.x;
  slots[t] = bits(x);
  meet(what);
  const uint64_t b = slots[(t & ~31u) | (from & 31u)];
  T y;
  memcpy(&y, &b, sizeof(T));
  meet(what);  // before another value is shown
  return y;
}

template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void** params, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(params[I])...);
}

template <class... A>
inline void launch(void (*kernel)(A...), unsigned blocks, unsigned threads, void** params) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = b;
    run_block(threads, [=] { call(kernel, params, std::index_sequence_for<A...>()); });
  }
}

}  // namespace emulation

template <class T>
static inline T __shfl_sync(unsigned, T x, int from) { return emulation::show("shuffle", x, from); }
template <class T>
static inline T __shfl_xor_sync(unsigned, T x, int mask) { return emulation::show("shuffle", x, threadIdx.x ^ mask); }
template <class T>
static inline T __shfl_down_sync(unsigned, T x, int by) {
  const unsigned lane = threadIdx.x & 31;
  return emulation::show("shuffle", x, lane + by > 31 ? lane : lane + by);
}
static inline unsigned __ballot_sync(unsigned, bool x) {
  const unsigned t = threadIdx.x;
  emulation::slots[t] = x;
  emulation::meet("vote");
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= (unsigned)emulation::slots[(t & ~31u) | lane] << lane;
  emulation::meet("vote");
  return votes;
}
static inline void __syncwarp() { emulation::meet("warp"); }
static inline void __syncthreads() { emulation::meet("block"); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(unsigned x) { return x ? __builtin_ctz(x) + 1 : 0; }
static inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }

// Of a block. The address sanitizer is told what a launch has not asked for.
static uint4 shared_memory[(96 << 10) / 16];
#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
extern "C" void limit_shared(unsigned bytes) {
  __asan_unpoison_memory_region(shared_memory, sizeof(shared_memory));
  __asan_poison_memory_region((char*)shared_memory + bytes, sizeof(shared_memory) - bytes);
}
#else
extern "C" void limit_shared(unsigned) {}
#endif
