// Operations about memory: making it, copying it, looking at it in another way.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace pretend {
namespace {

constexpr size_t kStagedBytes = 1 << 16;  // a smaller copy from pageable memory does not keep the host waiting

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, c10::dtype_or_default(dtype));
}

// A copy between host and device keeps the host waiting, unless it is non-blocking and the host's memory is pinned or small and read.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  launch("copy_");
  note_use(source, false, "copy_");
  note_use(self, true, "copy_");
  (self.is_cuda() ? on_cpu(self) : self).copy_(source.is_cuda() ? on_cpu(source) : source);
  if (self.is_cuda() != source.is_cuda()) {
    const auto& on_host = self.is_cuda() ? source : self;
    const bool staged = self.is_cuda() && source.nbytes() <= kStagedBytes;
    if (!non_blocking || !(staged || is_pinned(on_host.const_data_ptr())))
      wait_for_current_stream(self.is_cuda() ? "copy to the device" : "copy to the CPU");
  }
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  launch("item");
  note_use(self, false, "item");
  wait_for_current_stream("item");
  return on_cpu(self).item();
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto storage = impl->unsafe_storage();
  const size_t needed = (c10::multiply_integers(size) + impl->storage_offset()) * self.element_size();
  if (storage.nbytes() < needed) {
    auto memory = allocator()->allocate(needed);
    std::copy_n(static_cast<const char*>(storage.data()), storage.nbytes(), static_cast<char*>(memory.get()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_view(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_view(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_view);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
}

}  // namespace pretend
