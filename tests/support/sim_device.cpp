// A simulated accelerator as torch's private-use device type: its kernels are those of the CPU, launched on streams.
//
// Each stream is a thread with a queue.  A launch infers the shape of the results on the meta device, allocates them and
// returns; the kernel runs later, on raw addresses, in the order that streams and events give and no other.  So a wait
// that is missing gives wrong data, as on a GPU.  sim_device.py builds and loads it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/thread_name.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <utility>

namespace at::autocast {
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
} // namespace at::autocast

namespace sim {

using c10::IValue;
using c10::Stream;
using torch::jit::Stack;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kSim, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- streams and events ---------------------------------------------------------------------------------------------

std::mutex failure_mutex;
std::string failure; // of a kernel; like CUDA's, it stays, and each later wait raises it

std::atomic<bool> waiting_forbidden = false; // by a test

void check_wait() {
  TORCH_CHECK(!waiting_forbidden, "sim: the host waits for the device");
}

void raise_failure() {
  std::lock_guard lock(failure_mutex);
  TORCH_CHECK(failure.empty(), "sim error: ", failure);
}

// A position in a queue.
struct Mark {
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  std::chrono::steady_clock::time_point at;

  void reach() {
    std::lock_guard lock(mutex);
    at = std::chrono::steady_clock::now();
    done = true;
    reached.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    reached.wait(lock, [this] { return done; });
  }
  bool is_done() {
    std::lock_guard lock(mutex);
    return done;
  }
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {
 public:
  Queue() {
    std::thread([this] { run(); }).detach();
  }
  void push(std::function<void()> work, bool is_mark = false) {
    std::lock_guard lock(mutex_);
    works_.emplace_back(std::move(work), is_mark);
    unfinished_ += !is_mark;
    arrived_.notify_one();
  }
  MarkPtr mark() {
    auto made = std::make_shared<Mark>();
    push([made] { made->reach(); }, true);
    return made;
  }
  bool idle() { // whoever waited for a mark may ask before that has left the queue
    std::lock_guard lock(mutex_);
    return unfinished_ == 0;
  }

 private:
  void run() {
    c10::setThreadName("sim-stream");
    at::AutoDispatchBelowADInplaceOrView below;
    for (;;) {
      std::pair<std::function<void()>, bool>* work;
      {
        std::unique_lock lock(mutex_);
        arrived_.wait(lock, [this] { return !works_.empty(); });
        work = &works_.front(); // stays in the queue while it runs; a deque moves no element
      }
      try {
        work->first();
      } catch (const std::exception& error) {
        std::lock_guard lock(failure_mutex);
        failure = error.what();
      }
      std::lock_guard lock(mutex_);
      unfinished_ -= !work->second;
      works_.pop_front();
    }
  }
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::pair<std::function<void()>, bool>> works_; // and whether it is a mark
  int unfinished_ = 0; // without marks
};

constexpr int kMostStreams = 32; // further ones share these, as on CUDA
std::mutex queues_mutex;
std::map<c10::StreamId, Queue*> queues; // their threads end with the process
thread_local c10::StreamId current = 0;

Queue& queue_of(c10::StreamId id) {
  std::lock_guard lock(queues_mutex);
  auto& queue = queues[id];
  return *(queue ? queue : queue = new Queue);
}

void synchronize_all() {
  std::vector<MarkPtr> marks;
  {
    std::lock_guard lock(queues_mutex);
    for (auto& [_, queue] : queues)
      marks.push_back(queue->mark());
  }
  for (auto& mark : marks)
    mark->wait();
}

void synchronize_current() {
  check_wait();
  queue_of(current).mark()->wait();
  raise_failure();
}

struct Event {
  MarkPtr mark;
  bool timing;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static Stream stream(c10::StreamId id) { return Stream(Stream::UNSAFE, kDevice, id); }
  Stream getStream(c10::Device) const override { return stream(current); }
  Stream getDefaultStream(c10::Device) const override { return stream(0); }
  Stream getNewStream(c10::Device, int) const override {
    static std::atomic<int> made = 0;
    return stream(1 + made++ % kMostStreams);
  }
  Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override { return stream(std::exchange(current, next.id())); }
  bool queryStream(const Stream& stream) const override { return queue_of(stream.id()).idle(); }
  void synchronizeStream(const Stream& stream) const override {
    check_wait();
    queue_of(stream.id()).mark()->wait();
    raise_failure();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    check_wait();
    synchronize_all();
    raise_failure();
  }
  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event)
      *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->mark = queue_of(stream.id()).mark();
  }
  void block(void* event, const Stream& stream) const override {
    if (event)
      queue_of(stream.id()).push([mark = static_cast<Event*>(event)->mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->mark->is_done(); }
  void synchronizeEvent(void* event) const override {
    check_wait();
    if (event)
      static_cast<Event*>(event)->mark->wait();
    raise_failure();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto *first = static_cast<Event*>(begin), *last = static_cast<Event*>(end);
    TORCH_CHECK(first && last && first->timing && last->timing, "sim: both events must be recorded, with enable_timing");
    TORCH_CHECK(first->mark->is_done() && last->mark->is_done(), "sim: both events must be completed");
    return std::chrono::duration<double, std::milli>(last->mark->at - first->mark->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    c10::getDeviceAllocator(kSim)->recordStream(data, stream);
  }
};

// ---- memory ---------------------------------------------------------------------------------------------------------

struct Block {
  void* address;
  size_t size;
  c10::StreamId stream; // that it was allocated on: reuse there needs no wait
  std::vector<MarkPtr> uses; // on other streams
};

bool is_unused(const Block& block) {
  return std::all_of(block.uses.begin(), block.uses.end(), [](auto& mark) { return mark->is_done(); });
}

// A caching allocator: a freed block is reused at once by work of its own stream, which is queued later.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::unique_lock lock(mutex);
    if (bytes == 0)
      return {nullptr, kDevice};
    size_t size = (bytes + 511) / 512 * 512;
    Block* block = cached(size);
    if (!block && reserved.current + int64_t(size) > total) {
      retries++;
      lock.unlock();
      emptyCache({0, 0});
      lock.lock();
    }
    if (!block) {
      if (reserved.current + int64_t(size) > total) {
        ooms++;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes");
      }
      block = new Block{std::aligned_alloc(64, size), size, current, {}};
      reserved.increase(size);
    }
    allocated.increase(size);
    return {block->address, block, &Allocator::free, kDevice};
  }
  Block* cached(size_t size) {
    auto found = std::find_if(cache.begin(), cache.end(), [&](Block* block) {
      return block->size == size && block->stream == current && is_unused(*block);
    });
    if (found == cache.end())
      return nullptr;
    Block* block = *found;
    cache.erase(found);
    block->uses.clear();
    return block;
  }
  static void free(void* context);
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::free; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    synchronize_all();
    std::lock_guard lock(mutex);
    for (Block* block : cache) {
      reserved.decrease(block->size);
      std::free(block->address);
      delete block;
    }
    cache.clear();
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard lock(mutex);
    if (block && stream.id() != block->stream)
      streams[block].push_back(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = allocated;
    stats.reserved_bytes[0] = reserved;
    stats.num_alloc_retries = retries;
    stats.num_ooms = ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { retries = ooms = 0; }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex);
    allocated.reset_peak();
    reserved.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {
    return {total - reserved.current, total};
  }
  std::mutex mutex;
  std::vector<Block*> cache;
  std::map<Block*, std::vector<c10::StreamId>> streams; // of `recordStream`
  c10::CachingAllocator::Stat allocated, reserved;
  int64_t total = int64_t(1) << 32, retries = 0, ooms = 0;
} allocator;

void Allocator::free(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard lock(allocator.mutex);
  allocator.allocated.decrease(block->size);
  for (auto id : allocator.streams[block])
    block->uses.push_back(queue_of(id).mark());
  allocator.streams.erase(block);
  allocator.cache.push_back(block);
}

// Pinned host memory: reused after its last copy.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(mutex);
    size_t size = std::max<size_t>((bytes + 63) / 64 * 64, 64);
    auto found = std::find_if(free_blocks.begin(), free_blocks.end(), [&](Block* block) {
      return block->size == size && is_unused(*block);
    });
    Block* block;
    if (found == free_blocks.end()) {
      block = new Block{std::aligned_alloc(64, size), size, 0, {}};
      blocks[static_cast<char*>(block->address)] = block;
    } else {
      block = *found;
      free_blocks.erase(found);
      block->uses.clear();
    }
    return {block->address, block, &PinnedAllocator::free, c10::Device(c10::DeviceType::CPU)};
  }
  static void free(void* context);
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::free; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  Block* block_of(const void* address) {
    std::lock_guard lock(mutex);
    auto* byte = static_cast<char*>(const_cast<void*>(address));
    auto after = blocks.upper_bound(byte);
    if (after == blocks.begin())
      return nullptr;
    Block* block = std::prev(after)->second;
    return byte < static_cast<char*>(block->address) + block->size ? block : nullptr;
  }
  std::mutex mutex;
  std::map<char*, Block*> blocks;
  std::vector<Block*> free_blocks;
} pinned;

void PinnedAllocator::free(void* context) {
  std::lock_guard lock(pinned.mutex);
  pinned.free_blocks.push_back(static_cast<Block*>(context));
}
} // namespace sim

#include "sim_kernels.cpp"
