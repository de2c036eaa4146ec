// Records of host tables, copied by threads that wait for memory side by side.
//
// A record is a row of a table and of its optimiser's state, some hundred bytes that lie
// anywhere in gigabytes. One thread waits for one after the other; here each fetches some
// ahead, and as many threads work as may. They are no threads of XLA's pool, which a step
// that runs meanwhile would hold, and live for one call: to start one takes 0.03 ms.

#pragma once

#include <system_error>
#include <thread>

#include "frame.h"

namespace {

// A part is 256 kB, and so is what another thread is worth starting for.
constexpr int64_t kPartBytes = 256 << 10;

void CopyRecords(const char* from, const int64_t* from_rows, char* to,
                 const int64_t* to_rows, int64_t begin, int64_t end, int64_t bytes) {
  const int64_t ahead = std::clamp<int64_t>(8192 / bytes, 1, 16);
  const auto at = [&](const int64_t* rows, int64_t k) { return rows ? rows[k] : k; };
  for (int64_t k = begin; k < end; ++k) {
    if (k + ahead < end) {
      if (from_rows) Prefetch<false>(from + from_rows[k + ahead] * bytes, bytes);
      if (to_rows) Prefetch<true>(to + to_rows[k + ahead] * bytes, bytes);
    }
    std::memcpy(to + at(to_rows, k) * bytes, from + at(from_rows, k) * bytes, bytes);
  }
}

// Copies `size` records; rows that are null are 0, 1, 2 and so on.
void CopyInThreads(const char* from, const int64_t* from_rows, char* to,
                   const int64_t* to_rows, int64_t size, int64_t bytes, int64_t threads) {
  const int64_t grain = std::max<int64_t>(1, kPartBytes / bytes);
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t begin; (begin = next.fetch_add(grain)) < size;) {
      CopyRecords(from, from_rows, to, to_rows, begin, std::min(size, begin + grain), bytes);
    }
  };
  std::vector<std::thread> others;
  const int64_t parts = (size + grain - 1) / grain;
  try {
    while (int64_t(others.size()) + 1 < std::min(threads, parts)) others.emplace_back(work);
  } catch (const std::exception&) {
    // No memory for another thread, or no right to one: those that are there do the rest.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace
