// A pretend CUDA device, cuda:0: its memory is the host's, its kernels are those of the CPU, and its streams are clocks.
//
//   streams.cpp     what waits for what: streams, events, the host; counts host synchronisations, notices races
//   memory.cpp      blocks of memory, and tensors that share them with CPU tensors
//   random.cpp      generators, and the hooks by which torch finds the device
//   operations.cpp  operations about memory
//   kernels.cpp     every other operation, run on the CPU
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace pretend {

inline c10::Device device() {
  return {c10::kCUDA, 0};
}

// ---------------------------------------------------------------- streams.cpp

// How much work of each stream is known to be done.
struct Times : std::vector<uint64_t> {
  uint64_t of(int64_t stream) const;
  void set(int64_t stream, uint64_t time);
  void join(const Times& other);
};

// Who has used a block of memory, and when.
struct History {
  int64_t owner = 0;  // the stream that it was allocated on
  Times writes, reads;
  std::set<int64_t> recorded;  // by record_stream
};

// Start a kernel, or a copy, on the current stream.
void launch(const char* operation, bool allocates = false);

// The kernel that was launched last on the current stream uses a block.
void use(History& history, bool writes, const char* operation);

// Nobody refers to a block any more: its stream may use the memory again.
void free_block(const History& history);

// The host waits until all work of the current stream is done.
void wait_for_current_stream(const char* operation);

int64_t current_stream();

// ---------------------------------------------------------------- memory.cpp

// The history of a tensor's memory; null if it is not the device's.
History* history_of(const c10::DataPtr& memory);

// The kernel that was launched last uses a tensor, if that is on the device.
void note_use(const at::Tensor& tensor, bool writes, const char* operation);

c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// A CPU tensor with the same memory as a tensor on the device.
at::Tensor on_cpu(const at::Tensor& tensor);

// A tensor on the device with the same memory as a CPU tensor.
at::Tensor on_device(const at::Tensor& tensor);

// ---------------------------------------------------------------- random.cpp

// The CPU generator inside one of the device's.
at::Generator cpu_generator(const at::Generator& generator);
const at::Generator& default_generator();

}  // namespace pretend
