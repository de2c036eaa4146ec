// The buffers of each call of the kernel: one specification, against which `_calls.py`
// checks all arrays while tracing, and `Buffers` all memory when the call runs.
//
// A line is `handler formula: operands -> results`, and goes on where the next one is
// indented; a buffer is `name:type[sizes]`. Types:
// f float32; i int32; t and u float32 or bfloat16, each the same in the whole call. Sizes
// are multiplied: N rows of W numbers in the table, E entries, V rows of values, K ids, B
// bags, C coefficients of a polynomial, or a digit. A buffer with `?` may be empty. A
// result `name=` is the memory of the operand of this name.

#pragma once

#include <string_view>

#include "frame.h"

namespace {

constexpr std::string_view kBuffers = R"(
read rows: table:t[NW] ids:i[K] -> rows:t[KW]
read exact_adam: table:f[NW] mu:f[NW] nu:f[NW] last:i[N] scalars:f[6] polynomials:f[2C]
    steps:i[2] ids:i[K] high:f[N]? low:f[N]? -> rows:f[KW]
read bags: table:t[NW] ids:i[E] segments:i[E]? weights:f[E]? -> sums:f[BW]
update sum: indices:i[E1] data:f[VW] segments:i[E]? weights:f[E]?
    -> indices= sums:f[EW] count:i[]
update adam: indices:i[E1] data:f[VW] segments:i[E]? weights:f[E]? mu:t[NW] nu:u[NW]
    scalars:f[5] -> indices= sums:f[EW] count:i[] mu= nu=
update exact_adam: indices:i[E1] data:f[VW] segments:i[E]? weights:f[E]? mu:f[NW] nu:f[NW]
    last:i[N] scalars:f[6] step:f[9] polynomials:f[3C] steps:i[2] high:f[N]? low:f[N]?
    table:f[NW]? -> indices= sums:f[EW] count:i[] mu= nu= last= high= low=
update add: table:t[NW] indices:i[E1] rows:u[EW] -> table=
update put: table:t[NW] indices:i[E1] rows:t[EW] -> table=
)";

// The buffers of one call, which fit its line of `kBuffers` if `error` is empty.
class Buffers {
 public:
  std::string error;

  Buffers(std::string_view handler, std::string_view formula, ffi::RemainingArgs& args,
          ffi::RemainingRets& rets, int64_t num_rows, int64_t width, int64_t degree) {
    sizes_['N'] = num_rows, sizes_['W'] = width, sizes_['C'] = degree;
    const std::string head = "\n" + std::string(handler) + " " + std::string(formula) + ": ";
    size_t at = kBuffers.find(head);
    if (at == kBuffers.npos) {
      error = "The kernel has no formula" + head;
      return;
    }
    if (std::min(num_rows, width) < 1 || std::max(num_rows, width) > kMaxRow) {
      error = "The kernel takes 1 to 2**31 - 1 rows of as many numbers.";
    }
    at += head.size();
    size_t end = kBuffers.find('\n', at);
    while (kBuffers.substr(end + 1, 1) == " ") end = kBuffers.find('\n', end + 1);
    std::string_view line = kBuffers.substr(at, end - at);
    const std::string number = "The kernel takes another number of buffers for" + head;
    size_t num_args = 0, num_rets = 0;
    bool is_result = false;
    const auto add = [&](auto buffer, std::string_view word) {
      buffer.has_value() ? Add(word, *buffer, is_result) : void(error = number);
    };
    while (error.empty() && !line.empty()) {
      const std::string_view word = line.substr(0, line.find_first_of(" \n"));
      line.remove_prefix(std::min(word.size() + 1, line.size()));
      if (word.empty()) continue;  // before the words of an indented line
      if (word == "->") {
        is_result = true;
      } else if (is_result) {
        add(rets.get<Any>(num_rets++), word);
      } else {
        add(args.get<Any>(num_args++), word);
      }
    }
    const bool is_all = num_args == args.size() && num_rets == rets.size();
    if (error.empty() && !is_all) error = number;
  }

  // The numbers of an operand, or of a result; null if they are none.
  template <typename T>
  T* Get(std::string_view name, bool is_result = false) const {
    const Any* found = Find(name, is_result);
    if (found == nullptr || found->element_count() == 0) return nullptr;
    return static_cast<T*>(found->untyped_data());
  }

  // An operand as a struct of its numbers.
  template <typename T>
  T Struct(std::string_view name) const {
    T result;
    std::memcpy(&result, Get<void>(name), sizeof(T));
    return result;
  }

  int64_t operator[](char letter) const { return sizes_[int(letter)]; }
  ffi::DataType Type(char letter) const { return types_[int(letter)]; }

 private:
  struct Named {
    std::string_view name;
    bool is_result;
    Any buffer;
  };

  const Any* Find(std::string_view name, bool is_result) const {
    for (const Named& x : all_) {
      if (x.name == name && x.is_result == is_result) return &x.buffer;
    }
    return nullptr;
  }

  void Add(std::string_view word, ffi::Result<Any> buffer, bool is_result) {
    Add(word, *buffer, is_result);
  }

  void Add(std::string_view word, const Any& buffer, bool is_result) {
    const std::string_view name = word.substr(0, word.find_first_of(":="));
    all_.push_back({name, is_result, buffer});
    if (word.back() == '=') {
      const Any& operand = *Find(name, false);
      if (buffer.untyped_data() != operand.untyped_data() ||
          buffer.element_type() != operand.element_type() ||
          buffer.element_count() != operand.element_count()) {
        error = "The kernel updates " + std::string(name) + " in place, got two buffers.";
      }
      return;
    }
    const int64_t count = buffer.element_count();
    const auto type = buffer.element_type();
    const char letter = word[name.size() + 1];
    ffi::DataType& known = types_[int(letter)];
    if (letter == 'f') known = ffi::F32;
    if (letter == 'i') known = ffi::S32;
    if (known == ffi::DataType::INVALID && (type == ffi::F32 || type == ffi::BF16)) known = type;
    if (type != known) return Misfit(name, "of another type", buffer);
    if (word.back() == '?' && count == 0) return;
    int64_t wanted = 1;
    char unknown = 0;
    const size_t begin = name.size() + 3;
    for (char size : word.substr(begin, word.find(']') - begin)) {
      if (size <= '9') {
        wanted *= size - '0';
      } else if (sizes_[int(size)] == kUnknown) {
        unknown = size;
      } else {
        wanted *= sizes_[int(size)];
      }
    }
    if (unknown != 0) wanted *= sizes_[int(unknown)] = count / wanted;
    // Gradients of no bags are values that nobody knows; else there are numbers.
    if (count != wanted || (count == 0 && unknown != 'V')) Misfit(name, "of another size", buffer);
  }

  void Misfit(std::string_view name, const char* how, const Any& buffer) {
    std::string shape;
    for (int64_t size : buffer.dimensions()) shape += " " + std::to_string(size);
    error = "The kernel got " + std::string(name) + " " + how + ", of the shape [" +
            shape + " ], for a table of " + std::to_string(sizes_['N']) + " rows of " +
            std::to_string(sizes_['W']) + " numbers.";
  }

  static constexpr int64_t kUnknown = -2;
  std::vector<Named> all_;
  std::vector<int64_t> sizes_ = std::vector<int64_t>(128, kUnknown);
  std::vector<ffi::DataType> types_ = std::vector<ffi::DataType>(128, ffi::DataType::INVALID);
};

}  // namespace
