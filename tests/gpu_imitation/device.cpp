// One CUDA device imitated in host memory, for a torch without CUDA: so that what runs on a GPU is tried where
// there is none.
//
// Its tensors say cuda:0 and lie in memory of its own; operations on them run by torch's kernels for the CPU. What
// a GPU refuses is refused: tensors of the host among its own, and, while a graph is captured, whatever makes the
// host wait. Graphs keep the calls with the addresses that these had, and replays write there again, unless that
// memory is gone, which is an error; memory that is freed is overwritten, inside of a graph's pool it serves the pool's
// next call. Products want work space, as cuBLAS does: one block for each stream, which stays until somebody clears
// it or any graph of the stream ends. What is not imitated: streams that run at the same time, the speed, and the
// rounding of a GPU's kernels.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using c10::Stream;

const Device gpu(DeviceType::CUDA, 0);
const Device host(DeviceType::CPU);

// ---- The device: one, with streams that run one after the other ----

thread_local int64_t current_stream = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, gpu, current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, gpu, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(gpu);
    current_stream = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

const c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());

// The registry knows the class by this name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static const at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- Memory ----

// What a graph's calls allocate: freed, it serves the next call of that size, and none outside.
struct Pool {
  std::multimap<size_t, void*> unused;
  int graphs = 0;
};

struct Block {
  void* start;
  size_t bytes;
  std::shared_ptr<Pool> pool;
};

std::recursive_mutex memory;
int64_t allocated = 0, most_allocated = 0;
std::map<const char*, size_t> there;  // what the system has given, in use or in a pool
thread_local std::shared_ptr<Pool> pool_of_capture;

// Numbers that are none, so that whoever still reads this is noticed.
void overwrite(void* start, size_t bytes) { std::memset(start, 0xFF, bytes); }

void give_back(void* start, size_t bytes) {
  overwrite(start, bytes);
  there.erase(static_cast<char*>(start));
  std::free(start);
}

void release(void* block_) {
  std::unique_ptr<Block> block(static_cast<Block*>(block_));
  std::lock_guard<std::recursive_mutex> lock(memory);
  allocated -= block->bytes;
  if (block->pool && block->pool->graphs)
    block->pool->unused.emplace(block->bytes, block->start);
  else
    give_back(block->start, block->bytes);
}

struct Memory final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return at::DataPtr(nullptr, gpu);
    std::lock_guard<std::recursive_mutex> lock(memory);
    auto* block = new Block{nullptr, bytes, pool_of_capture};
    if (block->pool) {
      auto& unused = block->pool->unused;
      if (auto found = unused.find(bytes); found != unused.end()) {
        block->start = found->second;
        unused.erase(found);
      }
    }
    if (!block->start) {
      block->start = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      TORCH_CHECK(block->start, "imitated GPU: no memory for ", bytes, " bytes");
      overwrite(block->start, bytes);
      there.emplace(static_cast<char*>(block->start), bytes);
    }
    allocated += bytes;
    most_allocated = std::max(most_allocated, allocated);
    return at::DataPtr(block->start, block, &release, gpu);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Memory allocator;
const bool allocates = (c10::SetAllocator(DeviceType::CUDA, &allocator, 100), true);

bool is_there(const void* start) {
  std::lock_guard<std::recursive_mutex> lock(memory);
  auto next = there.upper_bound(static_cast<const char*>(start));
  if (next == there.begin()) return false;
  --next;
  return static_cast<const char*>(start) < next->first + next->second;
}

// ---- Work space of products ----

constexpr size_t work_bytes = 1 << 12;
std::map<int64_t, at::DataPtr> work_spaces;  // by stream

void* work_space() {
  std::lock_guard<std::recursive_mutex> lock(memory);
  auto& space = work_spaces[current_stream];
  if (!space) space = allocator.allocate(work_bytes);
  overwrite(space.get(), work_bytes);
  return space.get();
}

void clear_work_spaces() {
  std::lock_guard<std::recursive_mutex> lock(memory);
  work_spaces.clear();
}

// ---- Graphs ----

// A call with the addresses it had, where its new tensors were put, and its work space; or a call of Python's.
struct Call {
  std::optional<c10::OperatorHandle> operation;
  std::vector<IValue> arguments;
  std::vector<std::pair<size_t, at::Tensor>> results;
  std::vector<const void*> places;
  void* work = nullptr;
  void (*function)(int64_t) = nullptr;
  int64_t number = 0;
};

struct Graph {
  std::vector<Call> calls;
  std::shared_ptr<Pool> pool;
};

std::map<int64_t, std::shared_ptr<Pool>> pools;
thread_local Graph* captured = nullptr;
thread_local Graph* paused = nullptr;

void capture_into(Graph* graph) {
  captured = graph;
  pool_of_capture = graph ? graph->pool : nullptr;
}

std::vector<at::Tensor> tensors_of(const torch::jit::Stack& values) {
  std::vector<at::Tensor> tensors;
  for (const IValue& value : values) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
  }
  return tensors;
}

void replay(const Graph& graph) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (const Call& call : graph.calls) {
    if (call.function) {
      call.function(call.number);
      continue;
    }
    for (const void* place : call.places)
      TORCH_CHECK(is_there(place), "imitated GPU: a replay of ", call.operation->operator_name(),
                  " reaches memory that is gone");
    if (call.work) overwrite(call.work, work_bytes);
    torch::jit::Stack stack(call.arguments.begin(), call.arguments.end());
    call.operation->callBoxed(&stack);
    const auto made = tensors_of(stack);
    for (const auto& [number, place] : call.results) {
      const auto &from = made[number].storage(), &to = place.storage();
      TORCH_CHECK(from.nbytes() == to.nbytes(), "imitated GPU: a replay makes tensors of another size");
      if (to.nbytes()) std::memcpy(to.mutable_data(), from.data(), to.nbytes());
    }
  }
}

// ---- Operations ----

at::Tensor over(c10::Storage storage, const at::Tensor& like, DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The same memory as a tensor of the host.
at::Tensor twin_of(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage same(c10::Storage::use_byte_size_t{}, storage.nbytes(), at::DataPtr(storage.mutable_data(), host),
                    c10::GetAllocator(DeviceType::CPU), true);
  auto twin = over(std::move(same), tensor, DispatchKey::CPU);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  return twin;
}

const std::set<std::string> take_both = {
    "aten::copy_", "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_"};
const std::set<std::string> wait = {
    "aten::_local_scalar_dense", "aten::equal",           "aten::is_nonzero",
    "aten::masked_select",       "aten::nonzero",         "aten::repeat_interleave.Tensor",
    "aten::_unique2",            "aten::unique_dim",      "aten::unique_consecutive"};

// A call's arguments turned into those of the host, and its results back.
class Translation {
 public:
  explicit Translation(std::string name) : name_(std::move(name)) {}

  IValue argument(const IValue& value) {
    if (value.isTensor()) return twin(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> twins;
      for (const at::Tensor& tensor : value.toTensorVector()) twins.push_back(twin(tensor));
      return twins;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> twins;
      for (const auto& tensor : value.toOptionalTensorVector())
        twins.push_back(tensor ? std::optional<at::Tensor>(twin(*tensor)) : std::nullopt);
      return twins;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return host;
    if (value.isGenerator()) return {};
    return value;
  }

  // What a GPU would not do.
  void check() const {
    const bool copies_over = name_ == "aten::copy_" && !twins_.empty() && hosts_;
    TORCH_CHECK(twins_.empty() || shape_of_host_.empty() || take_both.count(name_), "imitated GPU: ", name_,
                ": Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu (",
                shape_of_host_, ")");
    TORCH_CHECK(!captured || !(copies_over || wait.count(name_) || selects_by_mask()), "imitated GPU: ", name_,
                ": operation not permitted when stream is capturing");
  }

  // Tensors that the call has made larger or turned get what it has made of their twins.
  void settle() {
    for (auto& [twin, tensor] : twins_) {
      const auto &made = twin.storage(), &before = tensor.storage();
      if (made.data() != before.data()) {
        const size_t bytes = made.nbytes();
        auto place = allocator.allocate(bytes);
        if (bytes) std::memcpy(place.get(), made.data(), bytes);
        made.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(place.get(), host));
        before.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(place));
        before.unsafeGetStorageImpl()->set_nbytes(bytes);
      }
      if (twin.sizes() != tensor.sizes() || twin.strides() != tensor.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
    }
  }

  // Memory without numbers is what is asked for.
  bool empty() const { return name_.rfind("aten::empty", 0) == 0; }

  bool multiplies() const {
    static const std::set<std::string> products = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"};
    const size_t end = name_.find('.');
    std::string bare = name_.substr(6, end == std::string::npos ? end : end - 6);
    while (!bare.empty() && bare.back() == '_') bare.pop_back();
    return products.count(bare);
  }

  // Where a replay would reach.
  void keep_places(Call& call) const {
    for (const auto& [twin, tensor] : twins_)
      if (twin.storage().nbytes()) call.places.push_back(twin.storage().data());
    for (const auto& [number, place] : call.results)
      if (place.storage().nbytes()) call.places.push_back(place.storage().data());
    if (call.work) call.places.push_back(call.work);
  }

  IValue result(const IValue& value, Call* call) {
    if (value.isTensor()) return made(value.toTensor(), call);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(made(tensor, call));
    return tensors;
  }

 private:
  at::Tensor twin(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      hosts_ = true;
      // Single numbers of the host may be anywhere.
      if (tensor.dim()) shape_of_host_ = c10::str(tensor.sizes());
      return tensor;
    }
    twins_.emplace_back(twin_of(tensor), tensor);
    return twins_.back().first;
  }

  bool selects_by_mask() const {
    if (name_.rfind("aten::index", 0) != 0 && name_.rfind("aten::_index_put", 0) != 0) return false;
    for (size_t i = 1; i < twins_.size(); i++)
      if (twins_[i].first.scalar_type() == at::kBool && name_.find("index_fill") == std::string::npos) return true;
    return false;
  }

  at::Tensor made(const at::Tensor& tensor, Call* call) {
    const size_t number = number_++;
    if (!tensor.defined()) return tensor;
    for (const auto& [twin, own] : twins_)
      if (twin.is_same(tensor)) return own;
    const auto& storage = tensor.storage();
    if (storage.nbytes())
      for (const auto& [twin, own] : twins_)
        if (twin.storage().data() == storage.data()) return over(own.storage(), tensor, DispatchKey::CUDA);
    auto place = allocator.allocate(storage.nbytes());
    if (storage.nbytes() && !empty()) std::memcpy(place.get(), storage.data(), storage.nbytes());
    c10::Storage own(c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(place), &allocator, true);
    auto result = over(std::move(own), tensor, DispatchKey::CUDA);
    if (call) call->results.emplace_back(number, twin_of(result));
    return result;
  }

  std::string name_, shape_of_host_;
  bool hosts_ = false;
  size_t number_ = 0;
  std::vector<std::pair<at::Tensor, at::Tensor>> twins_;
};

void run(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& name = operation.operator_name();
  Translation translation(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  const size_t count = operation.schema().arguments().size();
  torch::jit::Stack translated;
  for (const IValue& value : torch::jit::last(*stack, count)) translated.push_back(translation.argument(value));
  translation.check();
  Graph* graph = captured;
  Call call;
  if (graph) call = {operation, {translated.begin(), translated.end()}, {}, {}};
  void* work = translation.multiplies() ? work_space() : nullptr;
  operation.callBoxed(&translated);
  translation.settle();
  torch::jit::drop(*stack, count);
  for (const IValue& value : translated) stack->push_back(translation.result(value, graph ? &call : nullptr));
  if (!graph || translation.empty()) return;
  call.work = work;
  translation.keep_places(call);
  graph->calls.push_back(std::move(call));
}

// These change a tensor's memory and are no calls of the host's.

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const auto& storage = self.storage();
  const size_t bytes = (tensor->numel() + tensor->storage_offset()) * self.element_size();
  if (bytes > storage.nbytes()) {
    auto place = allocator.allocate(bytes);
    if (storage.nbytes()) std::memcpy(place.get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(place));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  return self;
}

at::Tensor& set(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef strides) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == size.size())
    tensor->set_sizes_and_strides(size, strides, offset);
  else {
    tensor->set_storage_offset(offset);
    tensor->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_like(at::Tensor& self, const at::Tensor& other) {
  return set(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

at::Tensor& set_all(at::Tensor& self, at::Storage storage) {
  const int64_t numbers = storage.nbytes() / self.element_size();
  return set(self, std::move(storage), 0, {numbers}, {1});
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  // torch's own, for any device, asks for CUDA's code.
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run>());
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set);
  library.impl("set_.source_Tensor", set_like);
  library.impl("set_.source_Storage", set_all);
}

// ---- What imitated_gpu.py calls ----

extern "C" {

int64_t stream_now() { return current_stream; }
void stream_enter(int64_t stream) { current_stream = stream; }
int64_t memory_now() { return allocated; }
int64_t memory_peak() { return most_allocated; }
void memory_forget_peak() { most_allocated = allocated; }

void* graph_begin(int64_t pool) {
  std::lock_guard<std::recursive_mutex> lock(memory);
  auto* graph = new Graph;
  auto& shared = pools[pool];
  if (!shared) shared = std::make_shared<Pool>();
  graph->pool = shared;
  shared->graphs++;
  capture_into(graph);
  return graph;
}
void graph_end() { capture_into(nullptr); }
int graph_capturing() { return captured != nullptr; }
void work_clear() { clear_work_spaces(); }
int64_t graph_calls(void* graph) { return static_cast<Graph*>(graph)->calls.size(); }

int graph_replay(void* graph) {
  try {
    replay(*static_cast<Graph*>(graph));
    return 1;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 0;
  }
}

// The pool's memory goes with its last graph, but for what tensors still hold.
void graph_free(void* graph_, int64_t pool) {
  std::unique_ptr<Graph> graph(static_cast<Graph*>(graph_));
  std::lock_guard<std::recursive_mutex> lock(memory);
  clear_work_spaces();
  if (--graph->pool->graphs) return;
  for (const auto& [bytes, start] : graph->pool->unused) give_back(start, bytes);
  graph->pool->unused.clear();
  pools.erase(pool);
}

// What Python runs by itself while a graph is captured: the calls in between are not kept, the function is.
void graph_pause() {
  paused = captured;
  capture_into(nullptr);
}
void graph_resume(void (*function)(int64_t), int64_t number) {
  capture_into(paused);
  if (!function) return;
  Call call;
  call.function = function;
  call.number = number;
  captured->calls.push_back(std::move(call));
}
}
