// Every operation on the device, run by the CPU's kernel on the same memory. Before it runs: tensors elsewhere and foreign generators
// are refused, the uses of memory are noted, and the host waits where CUDA would make it wait.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

namespace pretend {
namespace {

using Stack = torch::jit::Stack;

const char* const kIndexing[] = {"aten::index", "aten::_index_put_impl_"};
const char* const kMatmuls[] = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addbmm"};

template <size_t n>
bool is_one_of(const std::string& name, const char* const (&names)[n]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// ---------------------------------------------------------------- what CUDA would do with the arguments

// The arguments of one call, as far as they are on the device.
struct Call {
  const c10::OperatorHandle& op;
  const std::string& name = op.schema().name();
  const char* label = name.c_str() + (name.rfind("aten::", 0) == 0 ? 6 : 0);
  bool on_device = false;
  std::string elsewhere;  // an argument with a CPU tensor that CUDA would refuse

  const c10::Argument& argument(size_t i) const { return op.schema().arguments()[i]; }
  bool writes(size_t i) const { return argument(i).alias_info() != nullptr && argument(i).alias_info()->isWrite(); }

  void see(const at::Tensor& tensor, size_t i) {
    if (!tensor.defined()) return;
    on_device |= tensor.is_cuda();
    if (tensor.is_cpu() && (tensor.dim() > 0 || writes(i))) elsewhere = argument(i).name();  // numbers may come from anywhere
  }

  void refuse_other_devices() const {
    TORCH_CHECK(
        !on_device || elsewhere.empty() || is_one_of(name, kIndexing),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when checking argument for "
        "argument ", elsewhere, " in method ", name, ")");
  }
};

// Writing to places: masks are turned into indices, whose number the host must know; indices on the CPU are copied. A number is filled
// in instead. (Reading from places has done all this already, by operations of their own.)
void wait_for_places(const c10::List<std::optional<at::Tensor>>& places, const at::Tensor& values, bool accumulate) {
  if (values.numel() == 1 && values.is_cpu() && !accumulate) return;
  for (const std::optional<at::Tensor>& index : places.vec())
    if (index && index->defined() && (index->is_cpu() || index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte))
      wait_for_current_stream("_index_put_impl_");
}

// Ten bits of mantissa, as tensor cores read float32 if TF32 is allowed.
at::Tensor as_tf32(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.scalar_type() != c10::kFloat) return tensor;
  auto rounded = tensor.clone(at::MemoryFormat::Preserve);
  auto* bits = static_cast<uint32_t*>(rounded.storage().mutable_data());
  for (size_t i = 0; i < rounded.storage().nbytes() / 4; ++i)
    if ((bits[i] & 0x7f800000u) != 0x7f800000u) bits[i] = (bits[i] + 0x1000u) & ~0x1fffu;
  return rounded;
}

// Which arguments the tensor cores read; none if they are not used.
std::vector<size_t> read_as_tf32(const std::string& name) {
  if (is_one_of(name, kMatmuls) && at::globalContext().allowTF32CuBLAS())
    return name == "aten::mm" || name == "aten::bmm" ? std::vector<size_t>{0, 1} : std::vector<size_t>{1, 2};
  if (at::globalContext().allowTF32CuDNN(at::Float32Op::CONV)) {
    if (name == "aten::convolution") return {0, 1};
    if (name == "aten::convolution_backward") return {0, 1, 2};
  }
  return {};
}

// ---------------------------------------------------------------- the way to the CPU and back

// The argument as the CPU's kernel gets it.
c10::IValue moved_to_cpu(const c10::IValue& value, const Call& call, size_t i) {
  const auto move = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    const bool to_be_resized = call.writes(i) && tensor.numel() == 0;  // out=: a kernel cannot resize shared memory
    return to_be_resized ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : on_cpu(tensor);
  };
  if (value.isTensor()) return move(value.toTensor());
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = move(tensor);
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      tensors.push_back(tensor ? std::optional(move(*tensor)) : tensor);
    return tensors;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().defined()) {
    const auto found = value.toGenerator().device().type(), expected = call.on_device ? c10::kCUDA : c10::kCPU;
    TORCH_CHECK(
        found == expected, "Expected a '", c10::DeviceTypeName(expected, true), "' device type for generator but found '",
        c10::DeviceTypeName(found, true), "' (", call.name, ")");
    return cpu_generator(value.toGenerator());
  }
  return value;
}

void look_at(const c10::IValue& value, Call& call, size_t i) {
  if (value.isTensor()) call.see(value.toTensor(), i);
  if (value.isTensorList())
    for (const auto& tensor : value.toTensorVector()) call.see(tensor, i);
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      if (tensor) call.see(*tensor, i);
  if (value.isDevice()) call.on_device |= value.toDevice().is_cuda();
}

void note_uses(const c10::IValue& value, const Call& call, size_t i) {
  if (value.isTensor()) note_use(value.toTensor(), call.writes(i), call.label);
  if (value.isTensorList())
    for (const auto& tensor : value.toTensorVector()) note_use(tensor, call.writes(i), call.label);
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      if (tensor) note_use(*tensor, false, call.label);
}

void wait_where_cuda_does(const Call& call, const std::vector<c10::IValue>& arguments) {
  if (call.name == "aten::_index_put_impl_") {
    wait_for_places(arguments[1].toOptionalTensorList(), arguments[2].toTensor(), arguments[3].toBool());
  } else if (call.op.hasTag(at::Tag::dynamic_output_shape) || call.op.hasTag(at::Tag::data_dependent_output)) {
    if (call.name != "aten::index") wait_for_current_stream(call.label);
  }
}

// A result that the CPU's kernel has made.
at::Tensor made_on_device(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != c10::kStrided) return tensor;
  auto made = on_device(tensor);
  note_use(made, true, operation);
  return made;
}

// An argument that was written to, after its kernel: out= may have been resized, and then has new memory.
c10::IValue written(const c10::IValue& argument, const c10::IValue& result) {
  if (argument.isTensor() && argument.toTensor().numel() == 0 && result.toTensor().numel() > 0) {
    auto* impl = argument.toTensor().unsafeGetTensorImpl();
    auto made = on_device(result.toTensor());
    impl->set_storage_keep_dtype(made.storage());
    impl->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
  }
  return argument;
}

// Draw from the device's default generator inside of this.
class DeviceRandomness {
 public:
  explicit DeviceRandomness(bool draws) : draws_(draws) {
    if (!draws_) return;
    of_cpu_ = at::detail::getDefaultCPUGenerator().get_state();
    exchange(cpu_generator(default_generator()).get_state());
  }
  ~DeviceRandomness() {
    if (!draws_) return;
    cpu_generator(default_generator()).set_state(at::detail::getDefaultCPUGenerator().get_state());
    exchange(of_cpu_);
  }

 private:
  static void exchange(const at::Tensor& state) {
    auto generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(state);
  }
  bool draws_;
  at::Tensor of_cpu_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call call{op};
  const size_t num = op.schema().arguments().size(), begin = stack->size() - num;
  const std::vector<c10::IValue> arguments(stack->begin() + begin, stack->end());
  for (size_t i = 0; i < num; ++i) look_at(arguments[i], call, i);
  call.refuse_other_devices();
  launch(call.label, true);
  for (size_t i = 0; i < num; ++i) {
    note_uses(arguments[i], call, i);
    (*stack)[begin + i] = moved_to_cpu(arguments[i], call, i);
  }
  for (auto i : read_as_tf32(call.name)) (*stack)[begin + i] = as_tf32((*stack)[begin + i].toTensor());
  wait_where_cuda_does(call, arguments);
  {
    const DeviceRandomness randomness(op.hasTag(at::Tag::nondeterministic_seeded));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const auto& returns = op.schema().returns();
  for (size_t r = 0; r < returns.size(); ++r) {
    auto& result = (*stack)[stack->size() - returns.size() + r];
    const auto* alias = returns[r].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t i = 0; i < num; ++i) {
        const auto* of_argument = call.argument(i).alias_info();
        if (of_argument != nullptr && *of_argument == *alias) {
          result = written(arguments[i], result);
          break;
        }
      }
    } else if (result.isTensor()) {
      result = made_on_device(result.toTensor(), call.label);
    } else if (result.isTensorList()) {
      auto tensors = result.toTensorVector();
      for (auto& tensor : tensors) tensor = made_on_device(tensor, call.label);
      result = tensors;
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // torch would take these apart by device; here the CPU does.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace pretend
