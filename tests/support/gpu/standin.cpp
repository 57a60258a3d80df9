// Devices of type CUDA for torch's CPU build, as autograd and tensors need them: a current device,
// one stream, and events that are always complete. Inductor computes with a few real tensors, such
// as constants: they are in the CPU's memory, and the CPU computes with them.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>

namespace {

using namespace c10;

constexpr DeviceIndex COUNT = 8;
thread_local DeviceIndex current = 0;

DeviceIndex exchange(DeviceIndex index) {
  const DeviceIndex previous = current;
  if (index >= 0) {
    current = index;
  }
  return previous;
}

Device device(DeviceIndex index) {
  return Device(DeviceType::CUDA, index);
}

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device to) const override {
    return device(exchange(to.index()));
  }
  Device getDevice() const override {
    return device(current);
  }
  void setDevice(Device to) const override {
    exchange(to.index());
  }
  void uncheckedSetDevice(Device to) const noexcept override {
    exchange(to.index());
  }
  Stream getStream(Device of) const noexcept override {
    return Stream(Stream::DEFAULT, of);
  }
  Stream getNewStream(Device of, int) const override {
    return Stream(Stream::DEFAULT, of);
  }
  Stream exchangeStream(Stream to) const noexcept override {
    return to;
  }
  DeviceIndex deviceCount() const noexcept override {
    return COUNT;
  }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex current_device() const override {
    return current;
  }
  int getNumGPUs() const override {
    return COUNT;
  }
  DeviceIndex deviceCount() const override {
    return COUNT;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    exchange(index);
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return exchange(index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchange(index);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  std::string showConfig() const override {
    return "  - CUDA Runtime (stand-in)\n";
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Memory final : Allocator {
  DataPtr allocate(size_t size) override {
    DataPtr data = GetCPUAllocator()->allocate(size);
    data.unsafe_set_device(device(current));
    return data;
  }
  void copy_data(void*, const void*, std::size_t) const override {}
};

Memory memory;
constexpr DispatchKeySet KEYS(DispatchKey::CUDA);

at::Tensor empty(
    SymIntArrayRef size,
    std::optional<ScalarType> type,
    std::optional<Layout>,
    std::optional<Device> on,
    std::optional<bool>,
    std::optional<MemoryFormat> format) {
  DeviceGuard guard(device_or_default(on));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, dtype_or_default(type), format);
}

at::Tensor empty_strided(
    SymIntArrayRef size,
    SymIntArrayRef stride,
    std::optional<ScalarType> type,
    std::optional<Layout>,
    std::optional<Device> on,
    std::optional<bool>) {
  DeviceGuard guard(device_or_default(on));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      &memory,
      KEYS,
      dtype_or_default(type));
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto options = at::TensorOptions(tensor.scalar_type()).device(DeviceType::CPU);
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options, DeviceType::CPU);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool) {
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

at::Tensor copy_back(const at::Tensor& self, const at::Tensor& to) {
  on_cpu(to).copy_(self);
  return to;
}

void compute_on_cpu(const OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("copy_", copy);
  library.impl("_copy_from_and_resize", copy_back);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

} // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
} // namespace at

extern "C" {

// A function of libcuda.so.1: this library is loaded under that name.
int cuDriverGetVersion(int* version) {
  const char* given = std::getenv("GPU_DRIVER");
  *version = given ? std::atoi(given) : 12080;
  return 0;
}

int s3cache_device() {
  return current;
}

int s3cache_exchange_device(int index) {
  return exchange(static_cast<DeviceIndex>(index));
}

} // extern "C"
