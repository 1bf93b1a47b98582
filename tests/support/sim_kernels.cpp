// The kernels of the simulated accelerator: see sim_device.cpp, which this file continues.

namespace sim {

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = kKeys;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned.block_of(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator made = at::make_generator<Generator>();
    return made;
  }
};

// ---- launches -------------------------------------------------------------------------------------------------------

at::Tensor on_meta(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    return tensor; // a Python number: meta kernels take it from the CPU
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(false));
}

// The memory of a tensor as a tensor of the CPU.  It owns nothing: its block may be reused by later work.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu())
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone(); // a scalar: as of now
  return at::from_blob(const_cast<void*>(tensor.unsafeGetTensorImpl()->data()), tensor.sizes(), tensor.strides(),
      tensor.options().device(c10::kCPU));
}

at::Tensor empty_like_meta(const at::Tensor& meta) {
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), &allocator, kKeys, meta.scalar_type());
}

// Gives an `out` tensor the shape that its meta tensor has after the call.
void resize(const at::Tensor& tensor, const at::Tensor& meta) {
  if (tensor.sizes() == meta.sizes())
    return;
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(empty_like_meta(meta).storage());
  impl->set_sizes_and_strides(meta.sizes(), meta.strides());
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  resize(tensor, at::empty(size, tensor.options().device(c10::kMeta).memory_format(format)));
  return tensor;
}

using Map = std::function<at::Tensor(const at::Tensor&)>;

IValue mapped(const IValue& value, const Map& map) {
  if (value.isTensor())
    return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i)
      list.set(i, mapped(list.get(i), map));
    return list;
  }
  return value;
}

Stack mapped(const Stack& values, const Map& map) {
  Stack made;
  for (auto& value : values)
    made.push_back(mapped(value, map));
  return made;
}

at::Tensor check_device(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kSim || (tensor.device().is_cpu() && tensor.dim() == 0), op.schema().name(),
      ": expected all tensors on one device, found ", kDevice, " and ", tensor.device());
  return tensor;
}

void describe(std::ostream& out, const IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    auto& tensor = value.toTensor();
    out << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.unsafeGetTensorImpl()->is_wrapped_number();
  } else if (value.isTensorList() || value.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
    for (const IValue& each : value.toListRef())
      describe(out, each);
  } else if (!value.isGenerator())
    out << value;
  out << ';';
}

// The arguments after a call on the meta device, then the results.  Remembered, because most meta kernels are in Python.
Stack shapes_of(const c10::OperatorHandle& kernel, const Stack& given) {
  thread_local std::unordered_map<std::string, Stack> known;
  std::ostringstream key;
  key << kernel.operator_name();
  for (auto& value : given)
    describe(key, value);
  auto [found, is_new] = known.try_emplace(key.str());
  if (is_new) {
    Stack metas = mapped(given, on_meta), called = metas;
    for (auto& value : called)
      if (value.isDevice())
        value = c10::Device(c10::kMeta);
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      kernel.callBoxed(&called);
    } catch (...) {
      known.erase(found);
      throw;
    }
    found->second = metas;
    found->second.insert(found->second.end(), called.begin(), called.end());
  }
  return found->second;
}

void run_now(const c10::OperatorHandle& kernel, const Stack& given, Stack* stack) {
  Stack host = mapped(given, on_cpu);
  synchronize_current();
  at::AutoDispatchBelowADInplaceOrView below;
  kernel.callBoxed(&host);
  for (auto& value : mapped(host, [](auto& tensor) { return tensor.to(kDevice); }))
    stack->push_back(value);
}

// Runs `op`, or another operator with the same arguments, on the current stream.
void launch(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  Stack given(stack->end() - count, stack->end()), results;
  stack->resize(stack->size() - count);
  mapped(given, [&](auto& tensor) { return check_device(op, tensor); });
  for (auto& value : given) {
    if (value.isGenerator() && value.toGenerator().device().type() == kSim) { // what it draws follows from this seed
      auto* drawn = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
      value = at::detail::createCPUGenerator(drawn->random64());
    } else if (value.isDevice())
      value = c10::Device(c10::kCPU);
  }
  Stack shapes; // arguments, then results, on the meta device
  const auto& returns = schema.returns();
  const auto& arguments = schema.arguments();
  bool has_out = std::any_of(arguments.begin(), arguments.end(), [](auto& argument) { return argument.is_out(); });
  if (has_out || std::any_of(returns.begin(), returns.end(), [](auto& each) { return !each.alias_info(); })) {
    try {
      shapes = shapes_of(kernel, given);
    } catch (const c10::NotImplementedError&) { // such as `nonzero`: the shape follows from the values
      return run_now(kernel, given, stack);
    }
  }
  for (size_t i = 0; i < count; ++i)
    if (arguments[i].is_out() && given[i].isTensor())
      resize(given[i].toTensor(), shapes[i].toTensor());
  auto host = std::make_shared<Stack>(mapped(given, on_cpu));
  std::vector<std::pair<size_t, at::Tensor>> outputs; // to fill: position, alias on the CPU
  for (size_t i = 0; i < returns.size(); ++i) {
    if (auto* alias = returns[i].alias_info()) {
      TORCH_CHECK(alias->isWrite(), "sim has no view ", schema.name());
      auto same = [&](auto& argument) { return argument.alias_info() && *argument.alias_info() == *alias; };
      results.push_back(given[std::find_if(arguments.begin(), arguments.end(), same) - arguments.begin()]);
      continue;
    }
    results.push_back(mapped(shapes[count + i], empty_like_meta));
    mapped(results.back(), [&](auto& tensor) {
      outputs.emplace_back(i, on_cpu(tensor));
      return tensor;
    });
  }
  queue_of(current).push([kernel, host, outputs] {
    kernel.callBoxed(host.get());
    size_t nth = 0, before = 0;
    for (auto& [position, output] : outputs) {
      nth = position == before ? nth : 0;
      auto& value = (*host)[before = position];
      output.copy_(value.isTensor() ? value.toTensor() : value.toTensorVector()[nth++]);
    }
  });
  stack->insert(stack->end(), results.begin(), results.end());
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  launch(op, op, stack);
}

// An operator that torch leaves to private-use devices, whose arguments are those of another one.
template <const char* name>
void as_other(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  static auto other = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  launch(op, other, stack);
}
const char kConvolution[] = "aten::convolution";

// The bias sizes are not among the arguments of the overrideable one.
void convolution_backward(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  static auto other = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  Stack given(stack->end() - 10, stack->end());
  stack->resize(stack->size() - 10);
  std::vector<int64_t> bias_sizes{given[0].toTensor().size(1)};
  given.insert(given.begin() + 3, IValue(bias_sizes));
  launch(other, other, &given);
  stack->insert(stack->end(), given.begin(), given.end());
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(tensor, size, stride);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Block* host = nullptr;
  auto memory = [&](const at::Tensor& tensor) {
    if (tensor.device().type() == kSim)
      return on_cpu(tensor);
    host = pinned.block_of(tensor.const_data_ptr());
    non_blocking = non_blocking && host;
    return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().pinned_memory(false));
  };
  auto source = memory(from), target = memory(to);
  bool within = from.device() == to.device();
  queue_of(current).push([source, target] { target.copy_(source); });
  if (!within && !non_blocking)
    synchronize_current();
  else if (host) {
    auto mark = queue_of(current).mark();
    std::lock_guard lock(pinned.mutex);
    host->uses.push_back(mark);
  }
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  auto value = on_cpu(tensor);
  synchronize_current();
  return value.item();
}

void record_stream(at::Tensor& tensor, Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

// ---- autocast -------------------------------------------------------------------------------------------------------

template <bool lower>
void autocast(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = lower ? at::autocast::get_autocast_dtype(kSim) : c10::kFloat;
  const auto count = op.schema().arguments().size();
  for (auto value = stack->end() - count; value != stack->end(); ++value)
    *value = mapped(*value, [&](auto& tensor) { return at::autocast::cached_cast(dtype, tensor, kSim); });
  op.callBoxed(stack);
}

template <auto kernel>
auto boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(boxed<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view.dtype", TORCH_FN(at::native::view_dtype));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution_overrideable", boxed<&as_other<kConvolution>>());
  m.impl("convolution_backward_overrideable", boxed<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : {"conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"})
    m.impl(name, boxed<&autocast<true>>());
  for (auto name : {"group_norm", "layer_norm", "mse_loss", "softmax.int", "sum", "sum.dim_IntList", "pow.Tensor_Scalar", "exp", "log", "rsqrt"})
    m.impl(name, boxed<&autocast<false>>());
}

const bool registered = [] {
  c10::impl::registerDeviceGuard(kSim, new Guard);
  c10::SetAllocator(kSim, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace sim

extern "C" {
void sim_set_total_bytes(int64_t bytes) {
  sim::allocator.total = bytes;
}
// Work that takes as long on the current stream.
void sim_sleep(double seconds) {
  sim::queue_of(sim::current).push([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}
void sim_forbid_waiting(bool is_forbidden) {
  sim::waiting_forbidden = is_forbidden;
}
}
