// The buffers of a call, checked: no call reads or writes outside of its buffers, whatever
// its caller has checked.

#pragma once

#include "frame.h"

namespace {

// Rows of a table or of a state, of float32, bfloat16, or for one number a row, int32.
struct Table {
  void* data;
  int64_t width;
  ffi::DataType type;

  INLINE bool IsLow() const { return type == ffi::BF16; }
  INLINE int64_t RowBytes() const { return width * (IsLow() ? 2 : 4); }
  INLINE char* Row(int64_t row) const {
    return static_cast<char*>(data) + row * RowBytes();
  }
};

// The operands and results of a call. A handler takes one after the other, and says of
// which type they are and how many numbers it reads or writes there. `error` says what was
// the first that did not fit; then nothing that was taken may be used.
class Buffers {
 public:
  const int64_t num_rows, width;  // of the table
  std::string error;

  Buffers(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t num_rows,
          int64_t width)
      : num_rows(num_rows), width(width), args_(args), rets_(rets) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (std::min(num_rows, width) < 1 || std::max(num_rows, width) > kMost) {
      error = "The kernel takes 1 to 2**31 - 1 rows of as many numbers.";
    }
  }

  // Type and size of the next operand, and the size of the next result.
  ffi::DataType Type() const {
    const auto next = args_.get<ffi::AnyBuffer>(num_args_);
    return next.has_value() ? next->element_type() : ffi::DataType::INVALID;
  }
  int64_t Count() const {
    const auto next = args_.get<ffi::AnyBuffer>(num_args_);
    return next.has_value() ? next->element_count() : 0;
  }
  int64_t ResultCount() const {
    auto next = rets_.get<ffi::AnyBuffer>(num_rets_);
    return next.has_value() ? (*next)->element_count() : 0;
  }

  const float* Floats(const char* name, int64_t size) {
    return static_cast<float*>(Operand(name, size, ffi::F32).data);
  }
  const int32_t* Ints(const char* name, int64_t size) {
    return static_cast<int32_t*>(Operand(name, size, ffi::S32).data);
  }
  // Null if the operand is empty.
  const float* FloatsOrNone(const char* name, int64_t size) {
    return Count() > 0 ? Floats(name, size) : (Floats(name, 0), nullptr);
  }
  const int32_t* IntsOrNone(const char* name, int64_t size) {
    return Count() > 0 ? Ints(name, size) : (Ints(name, 0), nullptr);
  }
  // Rows of float32, or of bfloat16.
  Table Rows(const char* name, int64_t count, bool may_be_low = true) {
    const auto type = may_be_low ? ffi::DataType::INVALID : ffi::F32;
    return Operand(name, count * width, type, width);
  }
  // Rows of one number.
  Table Scalars(const char* name, ffi::DataType type) {
    return Operand(name, num_rows, type);
  }
  // An operand as a struct of its numbers.
  template <typename T>
  T Struct(const char* name, ffi::DataType type = ffi::F32) {
    T result = {};
    const void* data = Operand(name, sizeof(T) / 4, type).data;
    if (error.empty()) std::memcpy(&result, data, sizeof(T));
    return result;
  }

  // The next result; where an owner is given, in the memory of that operand.
  Table Result(const char* name, int64_t size, ffi::DataType type,
               const void* owner = nullptr) {
    auto next = rets_.get<ffi::AnyBuffer>(num_rets_++);
    const Table found =
        next.has_value() ? Check(name, **next, size, type) : Fail(name, "no");
    if (owner != nullptr && found.data != owner) Fail(name, "a copied");
    return found;
  }
  void InPlace(const char* name, const Table& table, int64_t count) {
    Result(name, count * table.width, table.type, table.data);
  }

  // Whether all buffers have been taken, and fit.
  bool AreRight() {
    if (num_args_ != args_.size() || num_rets_ != rets_.size()) Fail("buffers", "more");
    return error.empty();
  }

  // Says what did not fit, unless something did not before.
  Table Fail(const std::string& name, const std::string& what) {
    if (error.empty()) {
      error = "The kernel got " + what + " " + name + ", for a table of " +
              std::to_string(num_rows) + " rows of " + std::to_string(width) +
              " numbers.";
    }
    return {nullptr, 1, ffi::F32};
  }

 private:
  Table Operand(const char* name, int64_t size, ffi::DataType type, int64_t width = 1) {
    const auto next = args_.get<ffi::AnyBuffer>(num_args_++);
    Table found = next.has_value() ? Check(name, *next, size, type) : Fail(name, "no");
    found.width = width;
    return found;
  }

  // `INVALID` is float32 or bfloat16.
  Table Check(const char* name, const ffi::AnyBuffer& buffer, int64_t size,
              ffi::DataType type) {
    const ffi::DataType own = buffer.element_type();
    const bool is_float = own == ffi::F32 || own == ffi::BF16;
    const bool is_any = type == ffi::DataType::INVALID;
    if (is_any ? !is_float : own != type) return Fail(name, "another type of");
    if (int64_t(buffer.element_count()) != size) return Fail(name, "another size of");
    return {buffer.untyped_data(), 1, own};
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t num_args_ = 0, num_rets_ = 0;
};

}  // namespace
