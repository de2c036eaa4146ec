// Launches kernels of a GPU for XLA, by the driver that is there: needs no CUDA headers.
//
// A call holds the machine code of its kernel, and what it is launched with is computed
// in Python: see `_cuda.py`.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace gpu {
namespace {

namespace ffi = xla::ffi;

using Pointer = void*;

// The functions of `libcuda.so.1` that are used; 0 is success.
struct Driver {
  int (*load)(Pointer*, const void*) = nullptr;
  int (*function)(Pointer*, Pointer, const char*) = nullptr;
  int (*context)(Pointer*) = nullptr;
  int (*attribute)(Pointer, int, int) = nullptr;
  int (*message)(int, const char**) = nullptr;
  int (*launch)(Pointer, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Pointer, Pointer*,
                Pointer*) = nullptr;
  bool is_there = false;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    is_there = find(load, "cuModuleLoadData") && find(function, "cuModuleGetFunction") &&
               find(context, "cuCtxGetCurrent") && find(attribute, "cuFuncSetAttribute") &&
               find(message, "cuGetErrorString") && find(launch, "cuLaunchKernel");
  }
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

ffi::Error failed(const char* what, int code) {
  const char* words = nullptr;
  driver().message(code, &words);
  const char* remedy = code == 209  // CUDA_ERROR_NO_BINARY_FOR_GPU
                           ? "This program was made for another kind of GPU: trace or export it where one like this is."
                           : "OPTAX_SPARSE_ADAM_GPU_KERNEL=0 goes on by XLA.";
  return ffi::Error::Internal("optax_sparse_adam: " + std::string(what) + ": " + (words ? words : "error ") + " (" +
                              std::to_string(code) + "). " + remedy);
}

// The function of a module, which is loaded once in each context.
ffi::Error function_of(std::string_view cubin, std::string_view key, std::string_view name, Pointer* function) {
  static std::mutex mutex;
  static std::map<std::pair<Pointer, std::string>, Pointer> loaded;
  if (!driver().is_there) return ffi::Error::Internal("optax_sparse_adam: libcuda.so.1 cannot be loaded.");
  Pointer context = nullptr, module = nullptr;
  if (int code = driver().context(&context)) return failed("cuCtxGetCurrent", code);
  if (!context) return ffi::Error::Internal("optax_sparse_adam: no CUDA context.");
  std::lock_guard<std::mutex> lock(mutex);
  Pointer& kernel = loaded[{context, std::string(key)}];
  if (!kernel) {
    if (int code = driver().load(&module, cubin.data())) return failed("cuModuleLoadData", code);
    if (int code = driver().function(&kernel, module, std::string(name).c_str()))
      return failed("cuModuleGetFunction", code);
    // What a block may share beyond 48 KB has to be asked for: as much as any GPU has.
    driver().attribute(kernel, 8 /* MAX_DYNAMIC_SHARED_SIZE_BYTES */, 96 << 10);
  }
  *function = kernel;
  return ffi::Error::Success();
}

// Before a program runs: loading while other kernels run may wait for these for ever.
// Where that is not possible yet, the call itself loads it.
ffi::Error prepare(ffi::Dictionary attributes) {
  const auto text = [&](std::string_view name) { return attributes.get<std::string_view>(name); };
  const auto cubin = text("cubin"), key = text("key"), name = text("name");
  Pointer function;
  if (cubin && key && name) (void)function_of(*cubin, *key, *name, &function);
  return ffi::Error::Success();
}

// `pointers` are the kernel's parameters: n >= 0 is an operand, n < 0 the result -1 - n.
// `launches` has `width` numbers for each launch: blocks, threads of a block, bytes that
// a block shares, and the integers that follow the pointers.
ffi::Error launch(Pointer stream, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view cubin,
                  std::string_view key, std::string_view name, ffi::Span<const int64_t> pointers,
                  ffi::Span<const int64_t> launches, int64_t width) {
  Pointer function;
  if (auto error = function_of(cubin, key, name, &function); error.failure()) return error;
  std::vector<Pointer> buffers;
  for (int64_t at : pointers) {
    if (at >= 0) {
      auto buffer = args.get<ffi::AnyBuffer>(at);
      if (buffer.has_error()) return buffer.error();
      buffers.push_back(buffer->untyped_data());
    } else {
      auto buffer = rets.get<ffi::AnyBuffer>(-1 - at);
      if (buffer.has_error()) return buffer.error();
      buffers.push_back((*buffer)->untyped_data());
    }
  }
  if (width < 3) return ffi::Error::Internal("optax_sparse_adam: a launch of fewer than three numbers.");
  for (size_t at = 0; at + width <= launches.size(); at += width) {
    std::vector<int64_t> numbers(launches.begin() + at + 3, launches.begin() + at + width);
    std::vector<Pointer> params;
    for (auto& buffer : buffers) params.push_back(&buffer);
    for (auto& number : numbers) params.push_back(&number);
    const int64_t* size = launches.begin() + at;
    if (int code = driver().launch(function, size[0], 1, 1, size[1], 1, 1, size[2], stream, params.data(), nullptr))
      return failed("cuLaunchKernel", code);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace gpu

// All else is hidden by -fvisibility=hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(prepare_gpu, gpu::prepare,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(launch_gpu, gpu::launch,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<gpu::Pointer>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("cubin")
                                  .Attr<std::string_view>("key")
                                  .Attr<std::string_view>("name")
                                  .Attr<xla::ffi::Span<const int64_t>>("pointers")
                                  .Attr<xla::ffi::Span<const int64_t>>("launches")
                                  .Attr<int64_t>("width"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
