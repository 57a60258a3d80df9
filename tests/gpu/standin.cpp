// Devices of type CUDA for torch's CPU build, as autograd and tensors ask for them: a current
// device, one stream, events that have always happened. Tensors that are not fake can be made, as
// torch does for its tables of patterns; nothing computes with them.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
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

at::Tensor& copy(at::Tensor& self, const at::Tensor&, bool) {
  return self;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy);
}

} // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
} // namespace at

extern "C" {

int s3cache_device() {
  return current;
}

int s3cache_exchange_device(int index) {
  return exchange(static_cast<DeviceIndex>(index));
}

} // extern "C"
