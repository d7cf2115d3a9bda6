// Generators of the device, each a CPU generator inside, and the hooks by which torch finds the device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

namespace pretend {
namespace {

struct Generator final : c10::GeneratorImpl {
  Generator() : c10::GeneratorImpl(pretend::device(), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  at::Generator cpu = at::detail::createCPUGenerator();

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator;
    copy->cpu = cpu.clone();
    return copy;
  }
};

}  // namespace

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>();
  return generator;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  // The first is the default one: Python's torch.cuda.default_generators has no other way to it.
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    static bool is_first = true;
    return std::exchange(is_first, false) ? default_generator() : at::make_generator<Generator>();
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
};

}  // namespace pretend

namespace at {
using CUDAHooks = pretend::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
