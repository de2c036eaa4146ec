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

// A part of a record, and the array `[size, bytes]` whose rows it is taken into or put
// from. Three words, as `_records.py` passes them.
struct Field {
  int64_t offset;
  int64_t bytes;
  char* array;
};

struct Fields {
  const Field* first;
  int64_t count;
  const Field* begin() const { return first; }
  const Field* end() const { return first + count; }
};

template <bool kPuts>
void CopyRecords(char* table, int64_t bytes, const int64_t* rows, Fields fields,
                 int64_t begin, int64_t end) {
  const int64_t ahead = std::clamp<int64_t>(8192 / bytes, 1, 16);
  for (int64_t k = begin; k < end; ++k) {
    if (k + ahead < end) Prefetch<kPuts>(table + rows[k + ahead] * bytes, bytes);
    char* record = table + rows[k] * bytes;
    for (const Field& field : fields) {
      char* in_record = record + field.offset;
      char* in_array = field.array + k * field.bytes;
      if constexpr (kPuts) {
        std::memcpy(in_record, in_array, field.bytes);
      } else {
        std::memcpy(in_array, in_record, field.bytes);
      }
    }
  }
}

// Calls `body(begin, end)` on parts of [0, size) in threads of this call alone.
template <typename Body>
void InThreads(int64_t size, int64_t grain, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t begin; (begin = next.fetch_add(grain)) < size;) {
      body(begin, std::min(size, begin + grain));
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

template <bool kPuts>
void CopyInThreads(char* table, int64_t bytes, const int64_t* rows, Fields fields,
                   int64_t size, int64_t threads) {
  const int64_t grain = std::max<int64_t>(1, kPartBytes / bytes);
  InThreads(size, grain, threads, [&](int64_t begin, int64_t end) {
    CopyRecords<kPuts>(table, bytes, rows, fields, begin, end);
  });
}

}  // namespace
