// A stable sort of a few ids by counting: where an entry goes is how many come before it.
//
// n * n comparisons, of all ids by all lanes of the device: for 8,192 ids one launch of
// some microseconds, where XLA's own sort of few takes 38.
typedef long long Int;
constexpr int PAD = 0x7fffffff;  // of what is no row

// A block ranks 32 entries, a lane each. Its eight warps share the others.
extern "C" __global__ void __launch_bounds__(256) rank_kernel(const int* ids, int* keys, int* places, Int size,
                                                              Int rows) {
  __shared__ uint4 tiles[8][32];
  __shared__ int counts[8][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const auto key_of = [&](Int i) -> unsigned {
    const int id = i < size ? ids[i] : -1;
    return id >= 0 && id < rows ? id : PAD;
  };
  const Int begin = (Int)blockIdx.x * 32, i = begin + lane;
  const unsigned key = key_of(i);
  int before = 0;
  const auto four_from = [&](Int k) {
    return make_uint4(key_of(k), key_of(k + 1), key_of(k + 2), key_of(k + 3));
  };
  uint4 next = four_from(warp * 128 + lane * 4);
  for (Int start = warp * 128; start < size; start += 8 * 128) {
    tiles[warp][lane] = next;
    next = four_from(start + 8 * 128 + lane * 4);  // while these are compared
    __syncwarp();
    if (start + 128 <= begin || start >= begin + 32) {
      // Of equal keys those in front come first.
      const unsigned limit = start < begin ? key + 1 : key;
#pragma unroll 8
      for (int k = 0; k < 32; ++k) {
        const uint4 x = tiles[warp][k];
        before += (x.x < limit) + (x.y < limit) + (x.z < limit) + (x.w < limit);
      }
    } else {
      for (int k = 0; k < 32; ++k) {
        const uint4 x = tiles[warp][k];
        const Int at = start + 4 * k;
        before += (x.x < key + (at < i)) + (x.y < key + (at + 1 < i)) + (x.z < key + (at + 2 < i)) +
                  (x.w < key + (at + 3 < i));
      }
    }
    __syncwarp();
  }
  counts[warp][lane] = before;
  __syncthreads();
  if (warp == 0 && i < size) {
    int rank = 0;
    for (int k = 0; k < 8; ++k) rank += counts[k][lane];
    keys[rank] = key;
    places[rank] = key == (unsigned)PAD ? -1 : (int)i;
  }
}
