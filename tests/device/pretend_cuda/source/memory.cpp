// Memory of the device is host memory with a history. CPU kernels work on it directly: a CPU tensor and a tensor on the device may
// share memory, and each keeps the other's storage.
#include "device.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace pretend {
namespace {

struct Block {
  History history;
  c10::DataPtr memory;  // one of these two owns it
  c10::Storage of_cpu;
  size_t size;
};

// Bytes of blocks, now and at most. What CPU kernels need while they run is not counted: kernels of a GPU do without most of it.
std::mutex bytes_mutex;
size_t bytes_now = 0, bytes_at_most = 0;

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  free_block(block->history);
  std::lock_guard<std::mutex> lock(bytes_mutex);
  bytes_now -= block->size;
}

c10::DataPtr make_block(void* data, c10::DataPtr memory, c10::Storage of_cpu, size_t size) {
  auto* block = new Block{{current_stream()}, std::move(memory), std::move(of_cpu), size};
  std::lock_guard<std::mutex> lock(bytes_mutex);
  bytes_now += size;
  bytes_at_most = std::max(bytes_at_most, bytes_now);
  return {data, block, &release, device()};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, device()};
    launch("an allocation", true);
    auto memory = c10::GetCPUAllocator()->allocate(size);
    auto* data = memory.get();
    return make_block(data, std::move(memory), {}, size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

// Pinned memory is host memory with known addresses.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

void release_pinned(void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto* data = std::aligned_alloc(64, (size / 64 + 1) * 64);
    pinned[static_cast<const char*>(data)] = size;
    return {data, data, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

Allocator the_allocator;
PinnedAllocator the_pinned_allocator;

void release_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// A tensor with the sizes of another, on other storage.
at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  return made;
}

}  // namespace

c10::Allocator* allocator() {
  return &the_allocator;
}

c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto [start, size] = *std::prev(after);
  return static_cast<const char*>(data) < start + std::max<size_t>(size, 1);
}

History* history_of(const c10::DataPtr& memory) {
  auto* block = memory.get_deleter() == &release ? static_cast<Block*>(memory.get_context()) : nullptr;
  return block == nullptr ? nullptr : &block->history;
}

void note_use(const at::Tensor& tensor, bool writes, const char* operation) {
  if (tensor.defined() && tensor.is_cuda() && tensor.has_storage())
    if (auto* history = history_of(tensor.storage().data_ptr())) use(*history, writes, operation);
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr shared(
      const_cast<void*>(storage.data()), new c10::Storage(storage), &release_storage, c10::Device(c10::kCPU));
  c10::Storage of_cpu(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(shared), nullptr, false);
  return with_storage(tensor, std::move(of_cpu), c10::DispatchKey::CPU);
}

at::Tensor on_device(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  if (storage.data_ptr().get_deleter() == &release_storage)  // an operation has returned one of its arguments
    return with_storage(tensor, *static_cast<c10::Storage*>(storage.data_ptr().get_context()), c10::DispatchKey::CUDA);
  auto block = make_block(const_cast<void*>(storage.data()), {}, storage, storage.nbytes());
  c10::Storage of_device(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(block), &the_allocator, true);
  return with_storage(tensor, std::move(of_device), c10::DispatchKey::CUDA);
}

namespace {
const bool registered = (c10::SetAllocator(c10::kCUDA, &the_allocator), true);
}

}  // namespace pretend

// ---------------------------------------------------------------- called from Python

extern "C" size_t pretend_bytes_now() {
  std::lock_guard<std::mutex> lock(pretend::bytes_mutex);
  return pretend::bytes_now;
}

extern "C" size_t pretend_bytes_at_most() {
  std::lock_guard<std::mutex> lock(pretend::bytes_mutex);
  return pretend::bytes_at_most;
}

extern "C" void pretend_forget_bytes_at_most() {
  std::lock_guard<std::mutex> lock(pretend::bytes_mutex);
  pretend::bytes_at_most = pretend::bytes_now;
}
