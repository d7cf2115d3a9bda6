// Streams as vector clocks. done[s].of(r) is how much work of stream r is done before the next work of stream s: s itself has
// waited for that much, by an event, or the host has, before it launched that work. Two uses of a block of memory race if neither is
// done before the other. A freed block is used again by its own stream, which therefore must have waited for all uses.
#include "device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <mutex>

namespace pretend {

uint64_t Times::of(int64_t stream) const {
  return static_cast<size_t>(stream) < size() ? (*this)[stream] : 0;
}

void Times::set(int64_t stream, uint64_t time) {
  if (static_cast<size_t>(stream) >= size()) resize(stream + 1, 0);
  (*this)[stream] = time;
}

void Times::join(const Times& other) {
  for (size_t stream = 0; stream < other.size(); ++stream) set(stream, std::max(of(stream), other[stream]));
}

namespace {

// What Python is told of: "wait" (the host waits), "free" (a block with this number is freed while others may use it), "race"
// (with the number of that block, or -1).
using Observer = void (*)(const char* kind, const char* text, int64_t number);

struct FreedBlock {
  History history;
  int64_t number;
};

std::mutex mutex;
Observer observer = nullptr;
bool watches_races = false;
bool capturing = false;
thread_local int64_t current = 0;
int64_t num_freed = 0;
Times host;
std::vector<Times> done(1);
std::vector<std::vector<FreedBlock>> freed(1);  // by stream, with uses that the stream has not waited for

// Python's lock is not to be waited for while this file's is held.
void tell(const char* kind, const std::string& text, int64_t number = -1) {
  if (observer != nullptr) observer(kind, text.c_str(), number);
}

std::string name(int64_t stream) {
  return "stream " + std::to_string(stream);
}

// A stream, other than `stream`, with uses that it has not waited for; -1 if there is none.
int64_t not_waited_for(int64_t stream, const Times& uses) {
  for (size_t other = 0; other < uses.size(); ++other)
    if (static_cast<int64_t>(other) != stream && uses[other] > done[stream].of(other)) return other;
  return -1;
}

int64_t user_of_freed(const History& history) {
  Times uses = history.reads;
  uses.join(history.writes);
  for (auto stream : history.recorded) uses.set(stream, 0);
  return not_waited_for(history.owner, uses);
}

void host_waits(const Times& until, const char* operation) {
  TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing (", operation, ")");
  {
    std::lock_guard<std::mutex> lock(mutex);
    host.join(until);
  }
  tell("wait", operation);
}

}  // namespace

int64_t current_stream() {
  return current;
}

void launch(const char* operation, bool allocates) {
  std::vector<std::pair<int64_t, int64_t>> races;
  {
    std::lock_guard<std::mutex> lock(mutex);
    done[current].join(host);
    done[current].set(current, done[current].of(current) + 1);
    if (watches_races && allocates) {
      for (const auto& block : freed[current])
        if (auto user = user_of_freed(block.history); user >= 0) races.emplace_back(user, block.number);
      freed[current].clear();
    }
  }
  for (auto [user, number] : races)
    tell("race", std::string(operation) + " on " + name(current) + " may get memory that " + name(user) + " still uses", number);
}

void use(History& history, bool writes, const char* operation) {
  int64_t reader = -1, writer = -1;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!watches_races) return;
    writer = not_waited_for(current, history.writes);
    reader = writes ? not_waited_for(current, history.reads) : -1;
    (writes ? history.writes : history.reads).set(current, done[current].of(current));
  }
  const std::string what = std::string(operation) + " on " + name(current) + (writes ? " writes" : " reads") + " memory that ";
  if (writer >= 0) tell("race", what + name(writer) + " may not have written yet");
  if (reader >= 0) tell("race", what + name(reader) + " may not have read yet");
}

void free_block(const History& history) {
  int64_t number = -1;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!watches_races || user_of_freed(history) < 0) return;
    number = num_freed++;
    freed[history.owner].push_back({history, number});
  }
  tell("free", "", number);
}

void wait_for_current_stream(const char* operation) {
  host_waits(done[current], operation);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::mutex> lock(mutex);
    done.emplace_back();
    freed.emplace_back();
    return stream(done.size() - 1);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing; }

  // An event is the time of the stream that recorded it.
  void record(void** event, const c10::Stream& by, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> lock(mutex);
    if (*event == nullptr) *event = new Times;
    done[by.id()].join(host);
    *static_cast<Times*>(*event) = done[by.id()];
  }
  void block(void* event, const c10::Stream& waiting) const override {
    std::lock_guard<std::mutex> lock(mutex);
    if (event != nullptr) done[waiting.id()].join(*static_cast<Times*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Times*>(event); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }

  void synchronizeStream(const c10::Stream& by) const override { host_waits(done[by.id()], "synchronize of a stream"); }
  void synchronizeEvent(void* event) const override {
    host_waits(event == nullptr ? Times() : *static_cast<Times*>(event), "synchronize of an event");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Times all;
    for (const auto& times : done) all.join(times);
    host_waits(all, "synchronize of the device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& by) const override {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto* history = history_of(memory)) history->recorded.insert(by.id());
  }
};

}  // namespace pretend

namespace at::detail {
using Guard = pretend::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace at::detail

// ---------------------------------------------------------------- called from Python

extern "C" void pretend_observe(pretend::Observer observer) {
  pretend::observer = observer;
}

extern "C" void pretend_watch_races(bool watch) {
  std::lock_guard<std::mutex> lock(pretend::mutex);
  pretend::watches_races = watch;
  for (auto& blocks : pretend::freed) blocks.clear();
}

extern "C" void pretend_capture(bool capture) {
  pretend::capturing = capture;
}

extern "C" bool pretend_is_capturing() {
  return pretend::capturing;
}
